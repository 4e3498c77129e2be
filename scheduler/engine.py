"""Engine.step(): apply messages, plan, launch, collect, report. No IO, no clock and no globals of its own.

depth 0     apply ─ plan ─ launch n ─ collect n ─ report                   a step is collected before step() returns
depth 1     apply ─ plan ─ launch n+1 ─ collect n ─ report                 n+1 is planned and launched while n runs
device      ──── n ───────────────┴──── n+1 ─────────────

The depth is a number and no second way: a plan counts what is in flight as done (`scheduler.flight`), and at depth 0
nothing is. Where the plan has nobody, or would preempt somebody, or a step fails, what is in flight is collected first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items

from kvpool.pool import KVPool
from model.batch import BAD_LOGITS, NO_TOKEN, Batch, Executor, Row
from model.grammar import Grammars
from model.pooling import Vector
from scheduler import invariants, isolation
from scheduler.budget import Budget
from scheduler.compiling import Compiling
from scheduler.cost import CostModel
from scheduler.counters import Counters
from scheduler.flight import Flight, look_ahead
from scheduler.limits import Limits
from scheduler.messages import Abort, FinishReason, Logprob, PromptLogprobs, Started, StepOutput, Submit
from scheduler.phases import Phases
from scheduler.policy import Plan, SchedulerState, plan
from scheduler.refusal import longest, refusal
from scheduler.report import Report
from scheduler.sequence import Phase, Request, Sequence
from scheduler.speculation import Speculation
from scheduler.tiering import BlockMemory, Tiering

Message = Submit | Abort

FAILED = "the model failed on this request"
"""All that a client learns of an exception, whose words may be private; `isolation` logs it."""
RESERVED_SECONDS = 30.0
"""How long a seat that somebody had to give up is left to claims."""
MAX_FAILED_STEPS = 8
"""After so many steps in a row without one good row the runner is taken for broken, and step() raises."""


class Engine:
    """One model, one pool, many requests. Not thread-safe; one thread calls step()."""

    def __init__(
        self,
        pool: KVPool,
        executor: Executor,
        limits: Limits,
        clock: Callable[[], float],
        cost: CostModel | None = None,
        grammars: Grammars | None = None,
        memory: BlockMemory | None = None,
        depth: int = 0,
    ) -> None:
        """`clock` gives monotonic seconds. Without `grammars` requests that have one are refused. `memory`: the pool's,
        where that has a tier. `depth`: steps that are in flight while the next one is planned, 0 or 1."""
        if depth not in (0, 1):
            raise ValueError(f"depth must be 0 or 1, not {depth}")
        self._state = SchedulerState(pool, limits)
        self._phases = Phases(self._state)
        self._executor = executor
        self._clock = clock
        self._compiling = Compiling(grammars)
        self._depth = depth
        self._flights: deque[Flight] = deque()
        self._launched = 0
        """Steps so far."""
        self._collected = 0.0
        """When the last one was."""
        self._chunked: list[Sequence] = []
        self._counters = Counters()
        self._failed_steps = 0
        self._report = Report()
        self._cost = cost or CostModel()
        self._speculation = Speculation(pool, limits, self._cost)
        self.tiering = Tiering.behind(self._state, memory, self._cost, clock)
        self._budget = Budget.of(limits, self._cost)

    @property
    def has_work(self) -> bool:
        """Whether step() would compute anything. Where it would not, wait for a message."""
        return bool(self._busy or self._compiling)

    @property
    def _busy(self) -> bool:
        return bool(self._state.running or self._state.waiting or self._flights)

    def step(self, inbox: Items[Message] = ()) -> StepOutput:
        """Apply the messages, launch one step if anybody has work, and collect one. A row that fails ends alone: this
        raises only where the runner fails whatever it is given."""
        self._report = Report()
        self._counters.step_tokens = 0  # Perhaps none is collected.
        for message in self._compiling.ready(inbox, idle=not self._busy):
            if isinstance(message, Submit):
                self._submit(message)
            else:
                self._abort(message)
        self._phases.sweep()
        if self._flights and self._flights[-1].stalls:
            self._collect_all_but(0)
        step = self._plan() if self._state.running or self._state.waiting else None
        if step is not None and step.counts:
            self._flights.append(self._launch(step))
            self._collect_all_but(self._depth)
        else:
            self._collect_all_but(0)
        return self._report.output(self._counters.stats(self._state, self._phases.unborn), self._clock())

    def check(self) -> None:
        """Raise where an invariant is broken (`scheduler.invariants`)."""
        invariants.check(self._state, self._phases.requests.values())

    # ---- messages ----

    def _submit(self, submit: Submit) -> None:
        pool, limits = self._state.pool, self._state.limits
        if submit.id in self._phases.requests:
            return  # Ids are never reused; a second one is a resubmission that crossed its first.
        refused = refusal(submit, limits, pool.paging, pool.num_usable)
        if refused is None:
            request = Request(submit, longest(submit, limits, pool.paging, pool.num_usable), limits.rope_switch)
            refused = self._compiling.attach(request)
        if refused is not None:
            for index in range(max(1, submit.n)):
                self._report.end(submit.id, index, FinishReason.ERROR, refused)
            return
        self._phases.enter(request, submit.weight)
        for sequence in request.left if any(submit.generated) else ():
            finish = sequence.finish if sequence.generated > 0 else FinishReason.RUNNING
            if finish is not FinishReason.RUNNING:  # It had ended before it was resumed.
                self._report.end(request.id, sequence.index, finish)
                self._phases.release(sequence)

    def _abort(self, abort: Abort) -> None:
        request = self._phases.requests.get(abort.id)
        if request is not None and (abort.index is None or request.beams is not None):
            self._end(request, FinishReason.ABORT)
        elif request is not None:
            for sequence in request.left:
                if sequence.index == abort.index:
                    self._report.end(request.id, sequence.index, FinishReason.ABORT)
                    self._phases.release(sequence)

    # ---- plan → launch → collect ----

    def _plan(self) -> Plan:
        """A plan that can be executed as it is; makes room for it first."""
        state = self._state
        now = self._clock()
        state.tenants.settle(now)
        while True:
            step = plan(state, self._budget, now)
            if step.scarce:
                state.reserved = now + RESERVED_SECONDS
            if step.victim is None:
                break
            if self._flights:  # What has ended by then may be enough; and nobody is preempted in flight.
                self._collect_all_but(0)
                continue
            self._phases.preempt(step.victim, yields=step.claimed is not None)
            self._counters.preemptions += 1
        state.rested = step.rested
        state.closed = step.closed or (state.closed and bool(state.running))
        if step.passed is not None:
            step.passed.bypasses += len(step.admitted)
        if step.crowded:
            state.running.sort(key=step.counts.__contains__)
        return step

    def _launch(self, step: Plan) -> Flight:
        pool = self._state.pool
        # Adopt before anything is extended, and restoring extends: what was matched may lie in the free list.
        for sequence, hit in step.admitted.items():
            sequence.table = pool.adopt(hit)
        if self.tiering is not None:
            self.tiering.restore(step.admitted)
        for sequence, hit in step.admitted.items():
            self._phases.admit(sequence, hit)
            request = sequence.request
            if not request.started:
                request.started = True
                cached = min(sequence.num_computed, request.prompt_len)
                self._counters.prefix_queried_tokens += request.prompt_len
                self._counters.prefix_hit_tokens += cached
                self._report.started.append(Started(request.id, step.now, cached))
        for sequence in self._chunked:
            sequence.chunked = False
        self._chunked.clear()
        self._launched += 1
        rows: list[Row] = []
        for sequence, count in step.counts.items():
            start = sequence.num_computed
            end = start + count
            if not pool.extend(sequence.table, end, start):
                raise RuntimeError(f"the plan promised blocks that the pool does not have: {pool.usage()}")
            if count > 1:
                sequence.chunked = True
                self._chunked.append(sequence)
            rows.append(sequence.row(count))
            sequence.num_computed, sequence.flown = end, self._launched
        work = self._speculation.attach(step, rows)
        if self.tiering is not None:
            self.tiering.save()
        stalls = self._depth > 0 and look_ahead(step, rows, self._state.limits, self._speculation)
        batch = Batch(rows, pool.take_copies(), self._flights[-1].pending if self._flights else None)
        launched = self._clock()
        return Flight(self._launched, step, batch, isolation.launch(self._executor, batch), work, launched, stalls)

    def _collect_all_but(self, left: int) -> None:
        """Read steps in flight, the oldest first, until so many are left."""
        while len(self._flights) > left:
            self._collect(self._flights.popleft())
        self._phases.sweep()

    def _abandon(self) -> None:
        """A step failed: those behind it are ended, and their rows are to be computed anew."""
        while self._flights:
            flight = self._flights.pop()
            isolation.end(flight.pending)
            for row, sequence in zip(flight.batch.rows, flight.plan.counts, strict=True):
                sequence.num_computed, sequence.ahead = row.start, int(row.source >= 0)
                if row.draft:
                    self._state.pool.trim(sequence.table, row.start + row.count)

    def _collect(self, flight: Flight) -> None:
        outcome = isolation.collect(self._executor, flight.batch, flight.pending, self._abandon)
        self._phases.land(self._flights[0].number - 1 if self._flights else self._launched)
        now = self._clock()
        seconds, self._collected = now - max(flight.launched, self._collected), now
        counters = self._counters
        rows = flight.batch.rows
        counters.step(len(rows), flight.work, seconds)
        failures = outcome.failures
        if failures:
            self._failed_steps = self._failed_steps + 1 if len(failures) == len(rows) else 0
            if self._failed_steps == MAX_FAILED_STEPS:
                raise RuntimeError(f"{MAX_FAILED_STEPS} steps in a row failed") from failures[0]
        else:
            self._failed_steps = 0
            self._cost.observe(flight.work, seconds)
        result = outcome.result
        size = self._state.pool.block_size
        for number, (sequence, count) in enumerate(flight.plan.counts.items()):
            if sequence.phase is Phase.FINISHED:
                continue  # While this step was in flight, or with another beam of its search.
            if number in failures:
                counters.failed(isolation.reason(failures[number]))
                self._fail(sequence, FAILED)
                continue
            row, drawn = rows[number], result.tokens[number]
            end = row.start + count
            if row.samples and sequence.ahead:
                sequence.ahead -= 1
            if drawn and drawn[0] < NO_TOKEN:
                self._bad(sequence, row, drawn[0])
                continue
            request, new = sequence.request, 0
            if count > 1 or row.start < sequence.prompt_len:
                counters.computed_tokens += count
                new = request.bill(row.start, end)
            self._state.tenants.charge(request.tenant, new, len(drawn), end - new / 2)
            if end // size > row.start // size:
                self._commit(sequence, end)
            if request.prompt_values is not None:
                values = result.prompt_logprobs[number]
                whole = request.collect_prompt(row.start, end, values)
                if whole is not None:
                    self._report.prompt_logprobs.append(PromptLogprobs(request.id, whole))
            if drawn and request.beams is not None:
                self._search(sequence, result.logprobs[number])
            elif drawn:
                self._draw(sequence, drawn, result.logprobs[number])
                if row.draft:
                    self._speculation.settle(sequence, len(row.draft), len(drawn) - 1)
                    counters.drafts += 1
                    counters.drafted_tokens += len(row.draft)
                    counters.accepted_tokens += len(drawn) - 1
            elif request.params.pooling is not None:
                self._pool(sequence, result.pooled[number])
            elif end == row.length:  # Nothing is to be generated, by anyone.
                self._end(request, FinishReason.LENGTH)

    def _commit(self, sequence: Sequence, end: int) -> None:
        """Token end - 1 is computed and filled a block, which becomes findable."""
        pool = self._state.pool
        pool.commit(sequence.table, sequence.tokens, end, sequence.salt)
        if not sequence.request.parts:
            pool.slide(sequence.table, end)

    def _bad(self, sequence: Sequence, row: Row, drawn: int) -> None:
        """A row that has no token, and not because its request's own masks leave none."""
        if drawn == BAD_LOGITS and row.draft:  # Perhaps the draft's fault: compute it anew without one.
            self._speculation.bar(sequence)
            self._phases.restart(sequence)
        elif drawn == BAD_LOGITS:
            self._counters.failed(isolation.LOGITS)
            self._fail(sequence, "the model's logits for this request are not finite")
        else:
            self._counters.failed(isolation.GRAMMAR)
            self._fail(sequence, (sequence.matcher and sequence.matcher.error) or FAILED)

    def _draw(self, sequence: Sequence, drawn: list[int], logprobs: list[Logprob]) -> None:
        """Append what a row drew, until it ends the sequence. All but the last were in its draft, hence computed."""
        for place, token in enumerate(drawn):
            if place:
                sequence.num_computed += 1
                if sequence.num_computed % self._state.pool.block_size == 0:
                    self._commit(sequence, sequence.num_computed)
            self._append(sequence, token, logprobs[place] if place < len(logprobs) else None)
            if sequence.phase is Phase.FINISHED:
                break

    def _search(self, sequence: Sequence, logprobs: list[Logprob]) -> None:
        """A beam knows what it may go on with. Once all of its search do, they go on, or the search is over."""
        request = sequence.request
        beams = request.beams
        assert beams is not None
        beams.note(sequence.index, logprobs)
        if request.unborn:
            self._phases.revive(sequence)
        if not beams.complete:
            return
        moves = beams.advance()
        if not beams.done:
            self._phases.follow(request, moves)
            return
        for index in range(request.n):
            if index < len(beams.ended):
                self._report.beam(request.id, index, beams.ended[index][1])
            else:  # A vocabulary of a few tokens, most of which end a beam.
                self._report.end(request.id, index, FinishReason.STOP)
        for left in request.left:
            self._phases.release(left)

    def _pool(self, sequence: Sequence, pooled: Vector) -> None:
        """Keep what the prompt comes to so far; at its end send it, and be done."""
        request = sequence.request
        request.pooled = pooled
        if sequence.num_computed == request.prompt_len:
            if (vector := request.vector()) is None:
                self._counters.failed_logits += 1
                self._fail(sequence, "the model's hidden states for this request are not finite")
                return
            self._report.vector(request.id, vector)
            self._phases.release(sequence)

    def _append(self, sequence: Sequence, token: int, logprob: Logprob | None) -> None:
        request = sequence.request
        if request.unborn:
            self._phases.fork(sequence)
        if token == NO_TOKEN:  # The request's masks leave nothing to draw.
            self._report.end(request.id, sequence.index, FinishReason.STOP)
            self._phases.release(sequence)
            return
        sequence.tokens.append(token)
        finish, matcher = sequence.finish, sequence.matcher
        complete = matcher is not None and finish != FinishReason.STOP and matcher.follow(sequence.tokens)
        self._report.token(sequence, token, 0 if complete else int(finish), logprob)
        if complete:  # Whole also where it has just reached its limit; the token belongs to the text.
            self._report.end(request.id, sequence.index, FinishReason.STOP)
        if complete or finish is not FinishReason.RUNNING:
            self._phases.release(sequence)
        elif len(sequence.tokens) - 1 == self._state.limits.rope_switch:
            self._phases.restart(sequence)

    # ---- ends ----

    def _fail(self, sequence: Sequence, message: str) -> None:
        """End a sequence with an error, and with it those that wait for its prompt: theirs is the same. With a beam
        its search ends."""
        request = sequence.request
        if request.beams is not None:
            self._end(request, FinishReason.ERROR, message)
            return
        for other in [*request.unborn[::-1], sequence]:
            self._report.end(request.id, other.index, FinishReason.ERROR, message)
            self._phases.release(other)

    def _end(self, request: Request, finish: FinishReason, error: str | None = None) -> None:
        """End all of a request that has not ended, without a token."""
        left = request.left
        for index in [s.index for s in left] if request.beams is None else range(request.n):
            self._report.end(request.id, index, finish, error)
        for sequence in left:
            self._phases.release(sequence)
