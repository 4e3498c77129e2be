"""Phases: every change of a sequence's phase, and what it takes or gives up with it: a seat, a place, blocks.

The one place that changes the running list and the waiting queue, and that makes tables and releases them.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvpool.pool import PrefixHit
from scheduler.beams import Move
from scheduler.policy import SchedulerState
from scheduler.sequence import Phase, Request, Sequence, prefix_salt, seats_taken


class Phases:
    """Owned by the engine."""

    __slots__ = ("_gone", "_state", "requests", "unborn")

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.requests: dict[int, Request] = {}
        """Those that have not ended, by id."""
        self.unborn = 0
        """Sequences that are."""
        self._gone = 0
        """Sequences in the running list that run no more; they leave it before the next plan."""

    def enter(self, request: Request, weight: float) -> None:
        """A new request. `weight`: its tenant's."""
        state = self._state
        self.requests[request.id] = request
        state.tenants.join(request.tenant, weight)
        self.unborn += len(request.unborn)
        state.closed = False
        for sequence in request.sequences:
            if sequence.phase is Phase.WAITING:
                state.waiting.add(sequence)

    def admit(self, sequence: Sequence, hit: PrefixHit) -> None:
        """It begins, or goes on, behind what its table holds: its hit, and what a tier had of the rest."""
        state = self._state
        state.waiting.remove(sequence)
        state.running.append(sequence)
        sequence.phase = Phase.RUNNING
        sequence.num_computed = sequence.table.registered * state.pool.block_size
        sequence.shared = hit.shared
        sequence.preempted = False
        sequence.request.pooled = None

    def preempt(self, sequence: Sequence, yields: bool) -> None:
        """Release and recompute: back to the head of its queue; of a search, all beams. What was computed stays
        findable for a while. `yields`: to another tenant, and not because the pool ran out. Not while in flight."""
        state, request = self._state, sequence.request
        self._gather(sequence)
        self._empty(sequence)
        state.running.remove(sequence)
        for each in [sequence] if request.beams is None else request.sequences:
            each.preemptions += not yields
            each.yields += yields
        sequence.preempted = True
        sequence.phase = Phase.WAITING
        state.waiting.add(sequence)
        state.closed = state.closed or not yields
        self.sweep()

    def restart(self, sequence: Sequence) -> None:
        """Every key must be computed anew: it has outgrown the short rotary factors, or a draft may have spoiled some.
        It keeps its seat."""
        switch = self._state.limits.rope_switch
        self._empty(sequence)
        sequence.salt = prefix_salt(sequence.request.salt, len(sequence.tokens), switch)
        sequence.hashes = []

    def release(self, sequence: Sequence) -> None:
        """The one way out: whatever ended a sequence, its place and its blocks are given up here."""
        state = self._state
        request = sequence.request
        if sequence.phase is Phase.RUNNING:
            self._gone += 1
        elif sequence.phase is Phase.WAITING:
            state.waiting.remove(sequence)
        else:
            request.unborn.remove(sequence)
            self.unborn -= 1
        self._empty(sequence)
        leads = sequence.phase is not Phase.UNBORN and bool(request.unborn)
        sequence.phase = Phase.FINISHED
        state.closed = False
        if sequence.generated > 0:
            state.lengths.observe(sequence.generated)
        if leads:
            heir = request.unborn.pop(0)
            self.unborn -= 1
            heir.phase = Phase.WAITING
            state.waiting.add(heir)
        request.alive -= 1
        if request.alive == 0:
            del self.requests[request.id]
            state.tenants.leave(request.tenant)

    def land(self, step: int) -> None:
        """All steps up to this one have ended: the blocks that they wrote to may be had again."""
        if self._state.retired.land(step):
            self._state.closed = False

    def sweep(self) -> None:
        """Drop from the running list who runs no more."""
        if self._gone:
            running = self._state.running
            running[:] = [s for s in running if s.phase is Phase.RUNNING]
            self._gone = 0

    # ---- one prompt, several sequences ----

    def fork(self, leader: Sequence) -> None:
        """The prompt is computed: its siblings begin, each by computing the prompt's last position in a block of its
        own and drawing from its own random stream. Whoever finds no seat waits, and begins with prefix hits."""
        state = self._state
        request = leader.request
        born, request.unborn = request.unborn, []
        self.unborn -= len(born)
        for sequence in born:
            if seats_taken(state.running) - self._gone < state.limits.max_num_seqs:
                self._share(sequence, leader, sequence.prompt_len - 1)
            else:
                sequence.hashes = leader.hashes.copy()
                sequence.phase = Phase.WAITING
                state.waiting.add(sequence)

    def follow(self, request: Request, moves: Iterable[Move]) -> None:
        """The beams of a search go on. A table changes only where two go on from one; nothing is copied yet."""
        assert request.beams is not None
        sequences = request.sequences
        for slot, source, token in moves:
            if slot != source:
                sequence, parent = sequences[slot], sequences[source]
                if sequence.phase is Phase.RUNNING:
                    self._empty(sequence)
                else:
                    request.unborn.remove(sequence)
                    self.unborn -= 1
                self._share(sequence, parent, parent.num_computed)
                sequence.tokens = [*parent.tokens, token]
        for slot, source, token in moves:
            if slot == source:
                sequences[slot].tokens.append(token)
        for sequence in sequences:
            if sequence.phase is Phase.RUNNING and sequence.index not in request.beams.live:
                self._rest(sequence)
        best = sequences[next(iter(request.beams.live))]
        if len(best.tokens) - 1 == self._state.limits.rope_switch:
            self._gather(best)
            self.restart(best)

    def revive(self, leader: Sequence) -> None:
        """A beam is through with what it knows: the live ones that are unborn go on from its blocks, as far as both
        know the same."""
        request = leader.request
        assert request.beams is not None
        for sequence in request.unborn.copy():
            if sequence.index in request.beams.live:
                request.unborn.remove(sequence)
                self.unborn -= 1
                pairs = zip(sequence.tokens, leader.tokens, strict=True)
                same = next(place for place, (a, b) in enumerate(pairs) if a != b)  # No two beams are alike.
                self._share(sequence, leader, same)

    def _gather(self, leader: Sequence) -> None:
        """The other beams of its search are unborn again, if it is one; what the round has brought is forgotten."""
        beams = leader.request.beams
        if beams is not None:
            beams.forget()
            for sequence in leader.request.sequences:
                if sequence.phase is Phase.RUNNING and sequence is not leader:
                    self._rest(sequence)

    def _rest(self, sequence: Sequence) -> None:
        """A running one becomes unborn."""
        self._empty(sequence)
        self._gone += 1
        self.unborn += 1
        sequence.phase = Phase.UNBORN
        sequence.request.unborn.append(sequence)

    def _share(self, sequence: Sequence, source: Sequence, num_computed: int) -> None:
        """It runs from now on, with what another one has computed of their first tokens."""
        state = self._state
        if sequence.phase is not Phase.RUNNING:
            sequence.phase = Phase.RUNNING
            state.running.append(sequence)
        sequence.table = state.pool.fork(source.table)
        sequence.num_computed = num_computed
        sequence.shared = num_computed // state.pool.block_size
        sequence.salt = source.salt
        sequence.hashes = source.hashes[: sequence.shared]

    def _empty(self, sequence: Sequence) -> None:
        self._state.retired.take(sequence)
        sequence.num_computed = 0
        sequence.shared = 0
