"""Engine.step(): apply messages, plan, execute, collect, finish. No IO, no clock and no globals of its own.

step n   apply ─ plan ─ launch ─ ─ ─ ─ collect ─ report         depth 0: a step is collected before it returns
                               device
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from kvpool.pool import KVPool
from model.batch import BAD_GRAMMAR, BAD_LOGITS, NO_TOKEN, Batch, Executor, Row
from model.grammar import Grammars
from model.pooling import Vector
from scheduler import invariants, isolation
from scheduler.budget import Budget
from scheduler.compiling import Compiling
from scheduler.cost import CostModel
from scheduler.counters import Counters
from scheduler.flight import Flight
from scheduler.limits import Limits
from scheduler.messages import Abort, FinishReason, Logprob, PromptLogprobs, Started, StepOutput, Submit
from scheduler.policy import Plan, SchedulerState, plan
from scheduler.refusal import refusal
from scheduler.report import Report
from scheduler.sequence import Phase, Request, Sequence, prefix_salt
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
    ) -> None:
        """`clock` gives monotonic seconds. Without `grammars` requests that have one are refused. `memory`: the pool's,
        where that has a tier."""
        self._state = SchedulerState(pool, limits)
        self._executor = executor
        self._clock = clock
        self._capacity = min(limits.max_model_len, pool.num_usable * pool.block_size)
        self._requests: dict[int, Request] = {}
        self._compiling = Compiling(grammars)
        self._unborn = 0
        self._gone = 0
        """Sequences in the running list that have ended; they leave it before the next plan."""
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
        return bool(self._state.running or self._state.waiting or self._compiling)

    def step(self, inbox: Items[Message] = ()) -> StepOutput:
        """Apply the messages and compute one step, if anybody has work. A row that fails ends alone: this raises only
        where the runner fails whatever it is given."""
        self._report = Report()
        for message in self._compiling.ready(inbox, idle=not (self._state.running or self._state.waiting)):
            if isinstance(message, Submit):
                self._submit(message)
            else:
                self._abort(message)
        self._sweep()
        if self._state.running or self._state.waiting:
            step = self._plan()
            if step.counts:
                self._collect(self._launch(step))
                self._sweep()
        return self._report.output(self._counters.stats(self._state, self._unborn), self._clock())

    def check(self) -> None:
        """Raise where an invariant is broken (`scheduler.invariants`)."""
        invariants.check(self._state, self._requests.values())

    # ---- messages ----

    def _submit(self, submit: Submit) -> None:
        pool = self._state.pool
        if submit.id in self._requests:
            return  # Ids are never reused; a second one is a resubmission that crossed its first.
        refused = refusal(submit, self._state.limits.max_model_len, pool.num_usable, pool.block_size)
        if refused is None:
            request = Request(submit, self._capacity, self._state.limits.rope_switch)
            refused = self._compiling.attach(request)
        if refused is not None:
            for index in range(max(1, submit.n)):
                self._report.end(submit.id, index, FinishReason.ERROR, refused)
            return
        self._requests[request.id] = request
        self._state.tenants.join(request.tenant, submit.weight)
        self._unborn += len(request.unborn)
        self._state.closed = False
        for sequence in request.sequences:
            if sequence.phase is Phase.WAITING:
                self._state.waiting.add(sequence)
                finish = sequence.finish if sequence.generated > 0 else FinishReason.RUNNING
                if finish is not FinishReason.RUNNING:  # It had ended before it was resumed.
                    self._report.end(request.id, sequence.index, finish)
                    self._release(sequence)

    def _abort(self, abort: Abort) -> None:
        request = self._requests.get(abort.id)
        if request is None:
            return
        # The unborn first, so that nobody is made leader only to end next.
        for sequence in request.sequences[::-1]:
            if sequence.phase is not Phase.FINISHED and abort.index in (None, sequence.index):
                self._report.end(request.id, sequence.index, FinishReason.ABORT)
                self._release(sequence)

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
            self._preempt(step.victim, yields=step.claimed is not None)
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
            self._state.waiting.remove(sequence)
            self._state.running.append(sequence)
            sequence.phase = Phase.RUNNING
            sequence.num_computed = sequence.table.registered * pool.block_size
            sequence.shared = len(hit.blocks) - hit.free
            sequence.preempted = False
            request = sequence.request
            request.pooled = None
            if not request.started:
                request.started = True
                cached = min(sequence.num_computed, request.prompt_len)
                self._counters.prefix_queried_tokens += request.prompt_len
                self._counters.prefix_hit_tokens += cached
                self._report.started.append(Started(request.id, step.now, cached))
        for sequence in self._chunked:
            sequence.chunked = False
        self._chunked.clear()
        rows: list[Row] = []
        for sequence, count in step.counts.items():
            start = sequence.num_computed
            end = start + count
            if not pool.extend(sequence.table, end, start):
                raise RuntimeError(f"the plan promised blocks that the pool does not have: {pool.usage()}")
            if count > 1:
                sequence.chunked = True
                self._chunked.append(sequence)
            tokens = sequence.tokens
            params = sequence.request.params
            samples = end == len(tokens) and params.max_tokens > 0
            row = Row(tokens, sequence.prompt_len, start, count, sequence.table.blocks, params, sequence.index, samples)
            row.matcher, row.pooled = sequence.matcher, sequence.request.pooled
            rows.append(row)
        work = self._speculation.attach(step, rows)
        if self.tiering is not None:
            self.tiering.save()
        batch = Batch(rows, pool.take_copies())
        launched = self._clock()
        return Flight(step, batch, isolation.launch(self._executor, batch), work, launched)

    def _collect(self, flight: Flight) -> None:
        outcome = isolation.collect(self._executor, flight.batch, flight.pending)
        seconds = self._clock() - flight.launched
        counters = self._counters
        rows = flight.batch.rows
        counters.step(rows, outcome, seconds)
        counters.step_tokens = flight.work.rows + flight.work.prefill
        failures = outcome.failures
        if failures:
            self._failed_steps = self._failed_steps + 1 if len(failures) == len(rows) else 0
            if self._failed_steps == MAX_FAILED_STEPS:
                raise RuntimeError(f"{MAX_FAILED_STEPS} steps in a row failed") from failures[0]
        else:
            self._failed_steps = 0
            self._cost.observe(flight.work, seconds)
        result = outcome.result
        for number, (sequence, count) in enumerate(flight.plan.counts.items()):
            if number in failures:
                self._fail(sequence, FAILED)
                continue
            row, drawn = rows[number], result.tokens[number]
            if BAD_LOGITS in drawn[:1]:
                if row.draft:  # Perhaps the draft's fault: compute it anew without one.
                    self._speculation.bar(sequence)
                    self._restart(sequence)
                else:
                    self._fail(sequence, "the model's logits for this request are not finite")
                continue
            if BAD_GRAMMAR in drawn[:1]:
                self._fail(sequence, (sequence.matcher and sequence.matcher.error) or FAILED)
                continue
            request, new = sequence.request, 0
            if count > 1 or row.start < sequence.prompt_len:
                counters.computed_tokens += count
                new = request.bill(row.start, row.start + count)
            self._state.tenants.charge(request.tenant, new, len(drawn))
            self._advance(sequence, count)
            if request.prompt_values is not None:
                values = result.prompt_logprobs[number]
                whole = request.collect_prompt(row.start, sequence.num_computed, values)
                if whole is not None:
                    self._report.prompt_logprobs.append(PromptLogprobs(request.id, whole))
            if drawn:
                self._draw(sequence, drawn, result.logprobs[number])
                if row.draft:
                    self._speculation.settle(sequence, len(row.draft), len(drawn) - 1)
                    counters.drafts += 1
                    counters.drafted_tokens += len(row.draft)
                    counters.accepted_tokens += len(drawn) - 1
            elif request.params.pooling is not None:
                self._pool(sequence, result.pooled[number])
            elif sequence.num_computed == len(sequence.tokens):  # Nothing is to be generated, by anyone.
                for other in request.sequences[::-1]:
                    if other.phase is not Phase.FINISHED:
                        self._report.end(request.id, other.index, FinishReason.LENGTH)
                        self._release(other)

    def _advance(self, sequence: Sequence, count: int) -> None:
        """So many tokens more are computed. Blocks that this has filled become findable."""
        start = sequence.num_computed
        sequence.num_computed = end = start + count
        pool = self._state.pool
        if end // pool.block_size > start // pool.block_size:
            pool.commit(sequence.table, sequence.tokens, end, sequence.salt)
            pool.slide(sequence.table, end)

    def _draw(self, sequence: Sequence, drawn: list[int], logprobs: list[Logprob]) -> None:
        """Append what a row drew, until it ends the sequence. All but the last were in its draft, hence computed."""
        for place, token in enumerate(drawn):
            if place:
                self._advance(sequence, 1)
            self._append(sequence, token, logprobs[place] if place < len(logprobs) else None)
            if sequence.phase is Phase.FINISHED:
                break

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
            self._release(sequence)

    def _append(self, sequence: Sequence, token: int, logprob: Logprob | None) -> None:
        request = sequence.request
        if request.unborn:
            self._fork(sequence)
        if token == NO_TOKEN:  # The request's masks leave nothing to draw.
            self._report.end(request.id, sequence.index, FinishReason.STOP)
            self._release(sequence)
            return
        sequence.tokens.append(token)
        finish, matcher = sequence.finish, sequence.matcher
        complete = matcher is not None and finish != FinishReason.STOP and matcher.follow(sequence.tokens)
        self._report.token(sequence, token, 0 if complete else int(finish), logprob)
        if complete:  # Whole also where it has just reached its limit; the token belongs to the text.
            self._report.end(request.id, sequence.index, FinishReason.STOP)
        if complete or finish is not FinishReason.RUNNING:
            self._release(sequence)
        elif len(sequence.tokens) - 1 == self._state.limits.rope_switch:
            self._restart(sequence)

    # ---- changes of phase ----

    def _preempt(self, sequence: Sequence, yields: bool = False) -> None:
        """Release and recompute: back to the head of its queue. What it computed stays findable for a while.
        `yields`: to another tenant, and not because the pool ran out."""
        self._state.running.remove(sequence)
        self._state.pool.release(sequence.table)
        sequence.num_computed = 0
        sequence.shared = 0
        sequence.preempted = True
        sequence.preemptions += not yields
        sequence.yields += yields
        sequence.phase = Phase.WAITING
        self._state.waiting.add(sequence)
        self._state.closed = self._state.closed or not yields
        self._counters.preemptions += 1

    def _restart(self, sequence: Sequence) -> None:
        """Every key must be computed anew: it has outgrown the short rotary factors, or a draft may have spoiled some.
        It keeps its seat."""
        self._state.pool.release(sequence.table)
        switch = self._state.limits.rope_switch
        sequence.salt = prefix_salt(sequence.request.salt, len(sequence.tokens), switch)
        sequence.hashes = []
        sequence.num_computed = 0
        sequence.shared = 0

    def _fork(self, leader: Sequence) -> None:
        """The prompt is computed: its siblings begin, each by computing the prompt's last position in a block of its
        own and drawing from its own random stream. Whoever finds no seat waits, and begins with prefix hits."""
        state = self._state
        request = leader.request
        self._unborn -= len(request.unborn)
        for sequence in request.unborn:
            sequence.hashes = leader.hashes.copy()
            if len(state.running) - self._gone < state.limits.max_num_seqs:
                sequence.table = state.pool.fork(leader.table)
                sequence.shared = len(sequence.table.blocks) - 1
                sequence.num_computed = sequence.prompt_len - 1
                sequence.phase = Phase.RUNNING
                state.running.append(sequence)
            else:
                sequence.phase = Phase.WAITING
                state.waiting.add(sequence)
        request.unborn = []

    def _fail(self, sequence: Sequence, message: str) -> None:
        """End a sequence with an error, and with it those that wait for its prompt: theirs is the same."""
        request = sequence.request
        for other in [*request.unborn[::-1], sequence]:
            self._report.end(request.id, other.index, FinishReason.ERROR, message)
            self._release(other)

    def _release(self, sequence: Sequence) -> None:
        """The one way out: whatever ended a sequence, its place and its blocks are given up here."""
        state = self._state
        request = sequence.request
        if sequence.phase is Phase.RUNNING:
            state.pool.release(sequence.table)
            self._gone += 1
        elif sequence.phase is Phase.WAITING:
            state.waiting.remove(sequence)
        else:
            request.unborn.remove(sequence)
            self._unborn -= 1
        sequence.num_computed = 0
        leads = sequence.phase is not Phase.UNBORN and bool(request.unborn)
        sequence.phase = Phase.FINISHED
        state.closed = False
        if sequence.generated > 0:
            state.lengths.observe(sequence.generated)
        if leads:
            heir = request.unborn.pop(0)
            self._unborn -= 1
            heir.phase = Phase.WAITING
            state.waiting.add(heir)
        request.alive -= 1
        if request.alive == 0:
            del self._requests[request.id]
            state.tenants.leave(request.tenant)

    def _sweep(self) -> None:
        """Drop from the running list who has ended."""
        if self._gone:
            running = self._state.running
            running[:] = [s for s in running if s.phase is Phase.RUNNING]
            self._gone = 0
