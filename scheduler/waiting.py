"""The waiting queue: by priority, then by what the tenant has had, then the preempted before others, then by arrival.

priority 0   lane of b, who had least   s s s          first() deals from the lanes of a priority as if each
             lane of a                  s s s s s s    tenant were charged a sequence's tokens when it is taken,
priority 1   lane of a                  s              so that those who had the same alternate
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heappop, heappush

from scheduler.fairness import Tenants
from scheduler.sequence import Sequence

Place = tuple[int, bool, float, int, int]


class _Lane:
    """The waiting sequences of one tenant and priority, by place; never empty between two calls."""

    __slots__ = ("places", "sequences", "service", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.service = 0.0
        """Under which it is listed; the tenant's may have grown since."""
        self.places: list[Place] = []
        self.sequences: list[Sequence] = []


class WaitingQueue:
    """Insertion and removal are O(log n) comparisons and a few memmoves, whatever waits and for whom.

    Lanes are listed by the service their tenants had when they were listed. It only grows, so a look from the front
    finds the true order: it lists a lane anew where that is out of date, and stops at the first that is not.
    """

    __slots__ = ("_lanes", "_order", "_size", "tenants", "tokens")

    def __init__(self) -> None:
        self.tenants = Tenants()
        self._lanes: dict[tuple[int, str], _Lane] = {}
        self._order: list[tuple[int, float, Place, _Lane]] = []
        """(priority, service, place of the head, lane), sorted."""
        self._size = 0
        self.tokens = 0
        """Σ tokens of the sequences in it."""

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.first(self._size))

    def first(self, count: int) -> list[Sequence]:
        if len(self._lanes) == 1:
            return self._order[0][3].sequences[:count]
        found: list[Sequence] = []
        order = self._order
        heap: list[tuple[int, float, Place, int, _Lane]] = []
        """The next of each lane that has been reached: priority, service by then, place, index."""
        reached = 0
        while len(found) < count and (heap or reached < len(order)):
            while reached < len(order):
                priority, service, place, lane = self._fresh(reached)
                if heap and heap[0][:3] < (priority, service, place):
                    break
                heappush(heap, (priority, service, place, 0, lane))
                reached += 1
            priority, service, _, index, lane = heappop(heap)
            sequence = lane.sequences[index]
            found.append(sequence)
            if index + 1 < len(lane.places):
                service += len(sequence.tokens) / self.tenants.weight(lane.tenant)
                heappush(heap, (priority, service, lane.places[index + 1], index + 1, lane))
        return found

    def heads(self, count: int) -> list[Sequence]:
        """The first of each of so many lanes."""
        return [self._fresh(at)[3].sequences[0] for at in range(min(count, len(self._order)))]

    def add(self, sequence: Sequence) -> None:
        place = sequence.place
        tenant = sequence.request.tenant
        lane = self._lanes.get((place[0], tenant))
        if lane is None:
            lane = self._lanes[place[0], tenant] = _Lane(tenant)
        else:
            del self._order[self._listed(lane)]
        at = bisect_left(lane.places, place)
        lane.places.insert(at, place)
        lane.sequences.insert(at, sequence)
        self._list(lane)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """ValueError where it is not in the queue. Its place must be the one it was added with."""
        place = sequence.place
        key = place[0], sequence.request.tenant
        lane = self._lanes.get(key)
        at = bisect_left(lane.places, place) if lane is not None else 0
        if lane is None or at == len(lane.places) or lane.sequences[at] is not sequence:
            raise ValueError(f"sequence {sequence.rank} does not wait")
        del self._order[self._listed(lane)], lane.places[at], lane.sequences[at]
        if lane.places:
            self._list(lane)
        else:
            del self._lanes[key]
        self._count(sequence, -1)

    def check(self) -> bool:
        """Whether every lane is sorted and listed once, where its head belongs. O(n)."""
        lanes = {(p, lane.tenant): lane for p, service, place, lane in self._order if place == lane.places[0]}
        return (
            [entry[:3] for entry in self._order] == sorted(entry[:3] for entry in self._order)
            and len(self._order) == len(lanes)
            and lanes == self._lanes
            and all([s.place for s in lane.sequences] == sorted(lane.places) == lane.places for lane in lanes.values())
            and self._size == sum(len(lane.sequences) for lane in lanes.values())
        )

    def _count(self, sequence: Sequence, count: int) -> None:
        self._size += count
        self.tokens += count * len(sequence.tokens)
        self.tenants.wait(sequence.request.tenant, count)

    def _list(self, lane: _Lane) -> None:
        lane.service = self.tenants.service(lane.tenant)
        insort(self._order, (lane.places[0][0], lane.service, lane.places[0], lane))

    def _listed(self, lane: _Lane) -> int:
        """Where it is listed. A tuple without the lane sorts right before the one with it."""
        return bisect_left(self._order, (lane.places[0][0], lane.service, lane.places[0]))

    def _fresh(self, at: int) -> tuple[int, float, Place, _Lane]:
        """The entry that belongs at `at`, where all before it are in their places."""
        while True:
            entry = self._order[at]
            if entry[1] == self.tenants.service(entry[3].tenant):
                return entry
            del self._order[at]
            self._list(entry[3])
