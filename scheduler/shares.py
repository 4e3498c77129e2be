"""Shares: what each tenant holds of the seats and of the pool while several are active, and who must give up some.

A tenant's share of both is its part of the weights, and at least what one seat is worth. Nobody is kept to it while
there is enough for all. Where there is not,

    claim    who waits and is owed may begin: its tenant stays within its share of the pool, with what it is expected to
             generate, and there is a seat, or it has less than half of its share of them. Whoever holds more than
             its share makes room, at equal or lower priority
    debtors  a pool that runs out is taken from those that hold more than their share of it: what a claim grows into is
             theirs

Half a share lies between who claims a seat and who must give one, so that no two tenants take it from each other in
turn. A sequence makes room at most `max_preemptions` times. What it computed stays findable: where seats were short and
blocks were not, it loses next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from kvpool.pool import KVPool
from scheduler.estimate import OutputLengths, holding, needed
from scheduler.limits import Limits
from scheduler.sequence import Sequence, seats_taken
from scheduler.waiting import WaitingQueue

MOST_HEADS = 32
"""Waiting tenants, those that had least first, among whom one that is owed is looked for."""


@dataclass(slots=True)
class _Holding:
    """Of one tenant's running sequences."""

    seats: int = 0
    blocks: int = 0
    """Theirs, and those that their prompts still need."""
    expected: int = 0
    """Those, and what the sequences will need by what is known of answers' lengths."""


class Shares:
    """For one plan. O(running)."""

    __slots__ = ("_held", "_lengths", "_limits", "_pool", "_running", "_waiting")

    def __init__(
        self, pool: KVPool, limits: Limits, running: Items[Sequence], waiting: WaitingQueue, lengths: OutputLengths
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._running = running
        self._waiting = waiting
        self._lengths = lengths
        self._held: dict[str, _Holding] = {}
        for sequence in running:
            held = self._held.setdefault(sequence.request.tenant, _Holding())
            left = lengths.remaining(sequence)
            blocks, _, most = holding(pool, sequence, left)
            held.seats += 1
            held.blocks += blocks
            held.expected += most + self._growth(sequence, left)

    def claim(self, closed: bool) -> tuple[Sequence | None, Sequence | None]:
        """The waiting sequence that may begin in this step whatever others are expected to need, and the running one
        that must be preempted for it first; None, None where nobody is owed, or needs it, or nobody can make room.
        `closed`: nobody would be admitted otherwise."""
        limits, pool = self._limits, self._pool
        capacity = pool.num_usable - int(limits.watermark * pool.num_usable)
        room = capacity - sum(held.blocks for held in self._held.values())
        slack = capacity - sum(held.expected for held in self._held.values())
        seats = limits.max_num_seqs - seats_taken(self._running)
        heads = self._waiting.heads(MOST_HEADS)
        if heads and heads[0].bypasses >= limits.max_bypasses and heads[0].request.tenant not in self._held:
            # It may need more than its share, and its tenant has nothing else: the pool empties for it.
            heads = heads[:1]
        closed = closed or any(head.preempted for head in heads[:1])  # It would let nobody pass.
        for head in heads:
            tenant = head.request.tenant
            held = self._held.get(tenant, _Holding())
            share = self._share(tenant)
            left = self._lengths.remaining(head)
            blocks = pool.paging.pages(len(head.tokens))
            expected = needed(pool, len(head.tokens), left) + self._growth(head, left)
            need = head.request.seats
            if seats > need and expected <= slack and not closed:
                continue  # It needs no claim.
            if held.expected + expected > share * pool.num_usable:
                continue
            if seats <= need and held.seats >= share * limits.max_num_seqs / 2:
                continue
            if seats < need and need > 1:
                continue  # A search takes nobody's seat, for it would have to take many; see max_bypasses.
            giver = None
            if seats <= 0:
                giver = self._giver(head, lambda holding: holding.seats, limits.max_num_seqs)
                if giver is None:
                    continue
            if blocks > room:
                giver = self._giver(head, lambda holding: holding.blocks, pool.num_usable)
                if giver is None:
                    continue
            return head, giver
        return None, None

    def debtors(self) -> list[Sequence]:
        """Running sequences of tenants that hold their share of the pool or more; perhaps none. Without those that are
        all that their tenant has and were preempted often enough: a sequence may need more than a share."""
        usable, bound = self._pool.num_usable, self._limits.max_preemptions
        over = {name: held.seats for name, held in self._held.items() if held.blocks >= self._share(name) * usable}
        return [s for s in self._running if over.get(s.request.tenant, 0) > int(s.preemptions >= bound)]

    def _giver(self, head: Sequence, measure: Callable[[_Holding], int], total: int) -> Sequence | None:
        """The youngest of the lowest priority of the tenant that is furthest above its share of `total`."""
        bound = self._limits.max_preemptions
        ratios = {name: measure(held) / (self._share(name) * total) for name, held in self._held.items()}
        others = [
            sequence
            for sequence in self._running
            if ratios[sequence.request.tenant] > 1.0
            and sequence.request.tenant != head.request.tenant
            and sequence.rank[0] >= head.rank[0]
            and sequence.yields < bound
        ]
        return max(others, key=lambda s: (ratios[s.request.tenant], s.rank), default=None)

    def _share(self, tenant: str) -> float:
        return max(self._waiting.tenants.share(tenant), 1 / self._limits.max_num_seqs)

    def _growth(self, sequence: Sequence, left: int) -> int:
        """Blocks that it and those that wait for its prompt will need beyond what it needs now and behind windows."""
        pool, unborn = self._pool, len(sequence.request.unborn)
        growing = pool.windows.count(None) * pool.paging.columns(left)
        return growing + unborn * (growing + needed(pool, 0, left))
