"""What is true of the scheduler between two steps. Tests call it after every one."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.policy import SchedulerState
from scheduler.sequence import Phase, Request, Sequence, seats_taken


class StateCorrupt(AssertionError):
    """An invariant of the scheduler does not hold: a bug, never a user's fault."""


def check(state: SchedulerState, requests: Iterable[Request]) -> None:
    """Raise StateCorrupt or PoolCorrupt where an invariant is broken. O(everything).

    The pool's own (`KVPool.check`) over the tables of the running sequences, the retired ones, and no others; every
    living sequence is in exactly one place, the one its phase names; num_computed ≤ capacity of the table, and at least
    one token is left to compute, save for a beam that waits for the others and a row in flight that waits for its own;
    only who is in flight has tokens ahead; who does not run holds no block; of a search either all live beams run, or
    one and no other is born; a matcher has followed every token.
    """
    places = {Phase.RUNNING: list(state.running), Phase.WAITING: list(state.waiting), Phase.UNBORN: list[Sequence]()}
    size = state.pool.block_size
    living, requests = 0, list(requests)
    for request in requests:
        places[Phase.UNBORN] += request.unborn
        alive = [s for s in request.sequences if s.phase is not Phase.FINISHED]
        living += len(alive)
        _require(
            len(alive) == request.alive > 0, f"request {request.id} counts {request.alive} alive, not {len(alive)}"
        )
        born = {s.index for s in alive if s.phase is not Phase.UNBORN}
        _require(bool(born), f"request {request.id}: nobody computes its prompt")
        live = born if request.beams is None else set(request.beams.live)
        _require(len(born) == 1 or born == live, f"request {request.id}: {born} run of the live beams {live}")
        for sequence in alive:
            _require(
                sequence in places[sequence.phase], f"sequence {sequence.rank} is not where {sequence.phase!r} says"
            )
    found = sum(map(len, places.values()))
    _require(found == living, f"{found} places for {living} sequences")
    places_once = {id(s) for members in places.values() for s in members}
    _require(len(places_once) == found, "a sequence is in two places")
    taken = seats_taken(state.running)
    _require(taken <= state.limits.max_num_seqs, f"{taken} seats are taken")
    _require(sum(len(s.tokens) for s in state.waiting) == state.waiting.tokens, "tokens of the queue are miscounted")
    _require(state.waiting.check(), "the waiting queue is out of order")
    _require(state.tenants.check(r.tenant for r in requests), "requests of a tenant are miscounted")
    for phase, members in places.items():
        for sequence in members:
            held, matcher = len(sequence.table.blocks), sequence.matcher
            if matcher is not None and matcher.error is None:
                _require(matcher.consumed == sequence.generated, f"{sequence.rank}: its matcher lags behind")
            computed = sequence.num_computed
            if phase is Phase.RUNNING:
                _require(computed <= held * size, f"{sequence.rank}: {computed} tokens computed, {held} blocks")
                beams, known = sequence.request.beams, len(sequence.tokens) + sequence.ahead
                flies = sequence.flown > state.retired.landed
                idle = flies or (beams is not None and beams.noted(sequence.index))
                _require(flies or not sequence.ahead, f"{sequence.rank}: {sequence.ahead} tokens come from nowhere")
                _require(computed + (not idle) <= known <= sequence.limit, f"{sequence.rank}: nothing left to do")
            else:
                _require(
                    held == computed == sequence.ahead == 0, f"{sequence.rank} holds {held} blocks and does not run"
                )
    state.pool.check([*(s.table for s in state.running), *(table for table, _ in state.retired.tables)])


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise StateCorrupt(message)
