"""plan(): who runs in the next step, with how many tokens, and who must make room. Pure: it reads and changes nothing.

1  decodes            one token for every running sequence that lacks just one
2  prompts            the oldest unfinished one gets half of what is left, or all of it where it is alone;
   running chunks     the others share the rest, shortest first, so that neither a long prompt blocks short
   and admissions     ones nor short ones starve a long one; what they leave goes back to the oldest

Where several tenants are active, the prompts of the one that had least go first, the next gets what they leave; the
streams of those that had more may sit a step out for them; and who is owed a place is given one (`scheduler.shares`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from kvpool.pool import KVPool, PrefixHit
from scheduler.budget import Budget, Purse
from scheduler.cost import Work
from scheduler.estimate import OutputLengths, Peak
from scheduler.fairness import Tenants
from scheduler.limits import Limits
from scheduler.resting import who_rests
from scheduler.retired import Retired
from scheduler.sequence import Sequence, seats_taken
from scheduler.shares import Shares
from scheduler.waiting import WaitingQueue

WINDOW = 64
"""Waiting sequences among which the shortest are looked for."""
MAX_TRIED = 32
"""Of those, how many one plan looks at."""
MAX_BLOCKS = 1024
"""Blocks of their prompts, the head's aside, behind which it looks at no more: the first look hashes them, two
milliseconds' worth, and a burst of long prompts must not hold up those that run."""
MANY_SEATS = 16
"""From so many on, one that a tenant had to be given is kept free for the next claim."""


@dataclass(slots=True)
class SchedulerState:
    """Everything plan() looks at. The engine owns and changes it."""

    pool: KVPool
    limits: Limits
    running: list[Sequence] = field(default_factory=list)
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    lengths: OutputLengths = field(default_factory=OutputLengths)
    closed: bool = False
    """The pool has no room for anybody who waits, and nothing has ended or arrived since that was found."""
    rested: bool = False
    """The last step was one that somebody's streams sat out."""
    reserved: float = -inf
    """Until when one seat is left to claims: who comes again soon should not preempt somebody each time."""
    retired: Retired = field(init=False)
    """Blocks of sequences that ended while a step in flight writes to them."""

    def __post_init__(self) -> None:
        self.retired = Retired(self.pool)

    @property
    def tenants(self) -> Tenants:
        return self.waiting.tenants


@dataclass(slots=True)
class Plan:
    """One step, or the one sequence that must be preempted before a step can be planned."""

    now: float
    counts: dict[Sequence, int] = field(default_factory=dict)
    """Tokens of each sequence of the step, decodes first."""
    admitted: dict[Sequence, PrefixHit] = field(default_factory=dict)
    """Those of `counts` that waited, and the cached prefix each begins with."""
    work: Work = field(default_factory=Work)
    victim: Sequence | None = None
    """Set: preempt it and plan again; the rest is void."""
    claimed: Sequence | None = None
    """Begins because its tenant is owed a place. With a victim: the one that it makes room for."""
    scarce: bool = False
    """The claim found one free seat or none."""
    rested: bool = False
    """Somebody's streams sit this step out."""
    crowded: bool = False
    """Some decodes found no place in the token budget: they are first next time."""
    closed: bool = False
    """Nobody who waits fits the pool."""
    passed: Sequence | None = None
    """The head of the queue, where others were admitted past it."""


@dataclass(slots=True)
class _Prompt:
    """A sequence that lacks more than one token, running or waiting."""

    sequence: Sequence
    start: int
    pending: int
    hit: PrefixHit | None = None
    count: int = 0


def plan(state: SchedulerState, budget: Budget, now: float) -> Plan:
    """The next step. `now`: when it begins; whoever is admitted counts as scheduled then.

    Admits nobody while the pool is short, and takes the blocks of nobody while there is another way.
    """
    resting = frozenset[str]()
    if not state.rested and state.tenants.contended:
        resting = who_rests(state.tenants, state.running, state.waiting.heads(MAX_TRIED), budget.cost)
    if resting:
        step = _plan(state, budget, now, resting)
        if step.victim is not None or any(
            (count > 1 or sequence in step.admitted) and sequence.request.tenant not in resting
            for sequence, count in step.counts.items()
        ):
            step.rested = True
            return step
    return _plan(state, budget, now, frozenset())


def _plan(state: SchedulerState, budget: Budget, now: float, resting: frozenset[str]) -> Plan:
    step = Plan(now)
    counts = step.counts
    prompts: list[_Prompt] = []
    pool = state.pool
    size = pool.block_size
    free = pool.num_free
    context = resting_rows = resting_context = 0
    most = _most_decodes(state, budget)
    for sequence in state.running:
        start = sequence.num_computed
        pending = len(sequence.tokens) + sequence.ahead - start
        if pending != 1:
            if pending:  # else a beam that waits for the others of its search, or a row in flight for its token
                prompts.append(_Prompt(sequence, start, pending))
            continue
        if resting and sequence.request.tenant in resting:
            resting_rows += 1
            resting_context += start
            continue
        if len(counts) == most:
            step.crowded = True
            continue
        if sequence.request.forks:
            need = pool.blocks_needed(sequence.table, start + 1, start)
        else:
            need = 0 if start < len(sequence.table.blocks) * size else pool.num_groups
        if need > free:
            return Plan(now, victim=_victim(state))
        free -= need
        counts[sequence] = 1
        context += start
    step.work = Work(len(counts), context)
    opens = bool(state.waiting) and not (state.closed and state.running)
    seats = state.limits.max_num_seqs - seats_taken(state.running) if opens else 0
    wanting = len(prompts) + min(len(state.waiting), seats)
    purse = budget.purse(len(counts), context, wanting, resting_rows, resting_context)
    if purse.tokens > 0:
        if state.waiting and state.tenants.contended:
            step.claimed, victim = _shares(state).claim(state.closed)
            if step.claimed is not None:
                step.scarce = seats_taken(state.running) >= state.limits.max_num_seqs - 1
            if victim is not None:
                return Plan(now, victim=victim, claimed=step.claimed, scarce=step.scarce)
        if state.waiting and (step.claimed is not None or opens):
            prompts += _candidates(state, step, purse.tokens)
        if prompts:
            _share_out(state.tenants, prompts, purse, step.claimed)
            victim = _place(state, step, prompts, free)
            if victim is not None:
                return Plan(now, victim=victim)
    return step


def _most_decodes(state: SchedulerState, budget: Budget) -> int:
    """How many decodes the budget holds, with a chunk for prompts where there is one."""
    if len(state.running) <= budget.tokens - budget.min_chunk:
        return len(state.running)
    chunking = any(len(s.tokens) - s.num_computed > 1 for s in state.running)
    return max(1, budget.tokens - budget.min_chunk) if chunking else budget.tokens


def _victim(state: SchedulerState) -> Sequence:
    """The youngest of the lowest priority, unprotected ones first; where several share, of those that hold too much."""
    bound = state.limits.max_preemptions
    running = state.running
    if state.tenants.contended:
        running = _shares(state).debtors() or running
    return max(running, key=lambda s: (s.preemptions < bound, s.rank))


def _shares(state: SchedulerState) -> Shares:
    return Shares(state.pool, state.limits, state.running, state.waiting, state.lengths)


# ---- admission ----


def _candidates(state: SchedulerState, step: Plan, tokens: int) -> list[_Prompt]:
    """Waiting sequences that may begin now: they have a seat, and the predicted peak fits the pool."""
    pool = state.pool
    limits = state.limits
    claimed = step.claimed
    seats = limits.max_num_seqs - seats_taken(state.running)
    if step.now < state.reserved and limits.max_num_seqs >= MANY_SEATS:
        seats = max(seats - 1, claimed.request.seats if claimed is not None else 0)
    if seats <= 0:
        return []
    capacity = pool.num_usable - int(limits.watermark * pool.num_usable)
    peak = Peak(pool, state.running, state.lengths, capacity)
    # The first block that is not findable yet, because it is still to be computed or to be collected.
    coming = [(sequence, sequence.table.registered) for sequence in state.running if sequence.chunked]
    tried = _order(state.waiting)
    head = tried[0]
    if claimed is not None:
        closed = state.closed and bool(state.running)
        tried = [claimed] if closed else [claimed, *(s for s in tried if s is not claimed)]
    found: list[_Prompt] = []
    wanted = unfit = deferred = blocks = 0
    for sequence in tried[:MAX_TRIED]:
        salt = sequence.salt
        hit = PrefixHit()
        if blocks > MAX_BLOCKS:
            break
        blocks += len(sequence.tokens) // pool.block_size if sequence is not head else 0
        if sequence.request.reads_cache and not (pool.slides and sequence.request.parts):
            hashes = pool.hashes(sequence.tokens, salt, sequence.hashes)
            if sequence is not claimed and _comes(sequence, coming, pool.block_size):
                deferred += 1
                continue
            hit = pool.match(sequence.tokens, salt, hashes)
        begins = _Prompt(sequence, hit.tokens, len(sequence.tokens) - hit.tokens, hit)
        if sequence.request.seats > seats or not peak.admit(sequence, hit.shared, sequence is claimed):
            if not state.running and not found:
                # Alone it fits, else it had been refused; what it really needs will show.
                return [begins]
            unfit += 1
            if sequence is head and (head.preempted or head.bypasses >= limits.max_bypasses):
                break
            if unfit == limits.look_ahead:
                break
            continue
        wanted += begins.pending if found else 0
        found.append(begins)
        seats -= sequence.request.seats
        if seats <= 0 or len(found) == limits.look_ahead or wanted >= tokens:
            break
    if found and all(begins.sequence is not head for begins in found):
        step.passed = head
    step.closed = unfit > 0 and not found and not deferred
    return found


def _order(waiting: WaitingQueue) -> list[Sequence]:
    """Whom to try: the preempted alone where one is the head; else the head, then those of a window, each tenant's
    shortest first, the tenants in the queue's order."""
    window = waiting.first(WINDOW)
    head = window[0]
    if head.preempted:
        return [s for s in window if s.preempted and s.rank[0] == head.rank[0]]
    rest = [s for s in window[1:] if not s.preempted]
    shortest = sorted(rest, key=lambda s: (s.rank[0], len(s.tokens)))
    if waiting.tenants.contended:
        lanes: dict[str, list[Sequence]] = {}
        for sequence in reversed(shortest):
            lanes.setdefault(sequence.request.tenant, []).append(sequence)
        shortest = [lanes[sequence.request.tenant].pop() for sequence in rest]
    return [head, *shortest]


def _comes(sequence: Sequence, coming: list[tuple[Sequence, int]], size: int) -> bool:
    """Whether another prompt is about to compute a block of this one's prefix: waiting for it is cheaper than computing
    it twice. `coming` must hold only prompts that advance in every step, else one might wait for ever."""
    most = min(len(sequence.hashes), (len(sequence.tokens) - 1) // size)
    return any(at < most and at < len(other.hashes) and other.hashes[at] == sequence.hashes[at] for other, at in coming)


# ---- the prompts' share ----


def _share_out(tenants: Tenants, prompts: list[_Prompt], purse: Purse, claimed: Sequence | None) -> None:
    """Set `count` of each prompt, and bring them into the order in which they are served: tenant by tenant, those that
    had least first, after equal service those that want least. What is claimed begins at least: its place was made."""
    if not tenants.contended:
        _share(prompts, purse, purse.min_chunk)
        return
    groups: dict[str, list[_Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.sequence.request.tenant, []).append(prompt)

    def turn(group: list[_Prompt]) -> tuple[int, float, int]:
        priority = min(prompt.sequence.rank[0] for prompt in group)
        service = tenants.service(group[0].sequence.request.tenant)
        return priority, service, sum(prompt.pending for prompt in group)

    ordered = sorted(groups.values(), key=turn)
    least = purse.min_chunk
    begins = [prompt for group in ordered[1:] for prompt in group if prompt.sequence is claimed]
    for prompt in begins:
        next(group for group in ordered if prompt in group).remove(prompt)
        prompt.count = min(prompt.pending, least)
        purse.spend(prompt.start, prompt.count)
    prompts[:] = begins
    for group in filter(None, ordered):
        _share(group, purse, least)
        prompts += group
        least = 0


def _share(prompts: list[_Prompt], purse: Purse, least: int) -> None:
    """One tenant's. `least`: what the oldest gets in any case.

    The oldest is one that runs, where one does: those that wait may yet find no block.
    """
    oldest = min(prompts, key=lambda p: (p.hit is not None, p.sequence.rank))
    others = [p for p in prompts if p is not oldest]
    others.sort(key=lambda p: (p.sequence.rank[0], p.pending, p.sequence.rank))
    count = min(oldest.pending, max(purse.afford(oldest.start, 0.5 if others else 1.0), least))
    if least or count >= min(oldest.pending, purse.min_chunk):
        oldest.count = count
        purse.spend(oldest.start, count)
    for prompt in others:
        count = min(prompt.pending, purse.afford(prompt.start))
        if count <= 0:
            break
        if count == prompt.pending or count >= purse.min_chunk:
            prompt.count = count
            purse.spend(prompt.start, count)
    if others and oldest.count:
        more = min(oldest.pending - oldest.count, purse.afford(oldest.start + oldest.count, begun=True))
        if more > 0:
            purse.spend(oldest.start + oldest.count, more, begun=True)
            oldest.count += more
    prompts[:] = [oldest, *others]


def _place(state: SchedulerState, step: Plan, prompts: list[_Prompt], free: int) -> Sequence | None:
    """Give the prompts their blocks, the running ones first; the victim where those find none."""
    pool = state.pool
    size = pool.block_size
    placed: list[_Prompt] = []
    for prompt in prompts:
        if prompt.count and prompt.hit is None:
            need = pool.blocks_needed(prompt.sequence.table, prompt.start + prompt.count, prompt.start)
            if need > free:
                return _victim(state)
            free -= need
            placed.append(prompt)
    coming: list[tuple[Sequence, int]] = []
    watermark = int(state.limits.watermark * pool.num_usable)
    for prompt in prompts:
        hit = prompt.hit
        if not prompt.count or hit is None or _comes(prompt.sequence, coming, size):
            continue
        columns = -(-(prompt.start + prompt.count) // size) - len(hit.blocks)
        need = hit.free + columns * pool.num_groups
        if need > (free - watermark if state.running or placed else free):
            continue
        free -= need
        placed.append(prompt)
        step.admitted[prompt.sequence] = hit
        if prompt.sequence.request.reads_cache:
            coming.append((prompt.sequence, prompt.start // size))
    prefill, product, reach = 0, 0.0, 0
    for prompt in placed:
        step.counts[prompt.sequence] = prompt.count
        prefill += prompt.count
        product += prompt.count * (prompt.start + prompt.count / 2)
        reach += prompt.start
    step.work = Work(step.work.rows, step.work.context, prefill, product, reach)
    return None
