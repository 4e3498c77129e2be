"""Who keeps its connection, and who loses it."""

from __future__ import annotations

import random
import resource

import pytest

from server.connections import MOST_REFUSED, OWN_FILES, Connections, room


class Fake:
    """Leaves when it is dropped, as a connection does a moment later."""

    def __init__(self, all: Connections) -> None:
        self.all = all
        self.dropped = False

    def drop(self) -> None:
        self.dropped = True
        self.all.leave(self)


def test_the_one_that_has_asked_for_longest_goes() -> None:
    it = Connections(3, 1.0)
    first, busy, third = (Fake(it) for _ in range(3))
    for one in (first, busy, third):
        assert it.enter(one)
    it.answered(busy)
    it.answered(first)
    it.asks(first)  # it was answered: now the third has asked for longer
    assert it.enter(fourth := Fake(it))
    assert [one.dropped for one in (first, busy, third, fourth)] == [False, False, True, False]
    assert it.enter(Fake(it))
    assert first.dropped
    assert not busy.dropped
    assert (it.count, it.dropped["max_connections"]) == (3, 2)


def test_nobody_is_dropped_who_waits_for_an_answer() -> None:
    it = Connections(2, 1.0)
    busy = [Fake(it) for _ in range(2)]
    for one in busy:
        assert it.enter(one)
        it.answered(one)
    newcomer = Fake(it)
    assert not it.enter(newcomer)
    it.leave(newcomer)
    assert not any(one.dropped for one in busy)
    it.leave(busy[0])
    assert it.enter(Fake(it))


def test_who_has_had_its_last_answer_goes_first() -> None:
    """Refused newcomers too; they never take a place from anybody, and are a handful."""
    it = Connections(3, 1.0)
    busy, asking, ending = (Fake(it) for _ in range(3))
    for one in (busy, asking, ending):
        assert it.enter(one)
    it.answered(busy)
    it.ends(ending)
    fourth = Fake(it)
    assert it.enter(fourth)
    assert [one.dropped for one in (busy, asking, ending)] == [False, False, True]
    for one in (asking, fourth):
        it.answered(one)
    refused = [Fake(it) for _ in range(100)]
    for one in refused:
        assert not it.enter(one)
        it.ends(one)
    assert it.count == 3 + MOST_REFUSED + 1
    assert [one.dropped for one in refused] == [True] * (99 - MOST_REFUSED) + [False] * (MOST_REFUSED + 1)
    it.leave(asking)
    assert it.enter(Fake(it))


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_events(seed: int) -> None:
    """Never more than the limit, nobody forgotten, nobody kept."""
    rng = random.Random(seed)
    it = Connections(5, 1.0)
    live: list[Fake] = []
    busy: set[Fake] = set()
    ending: set[Fake] = set()
    for _ in range(300):
        open = [one for one in live if one not in ending]
        match rng.randrange(5):
            case 0:
                one = Fake(it)
                if it.enter(one):
                    live.append(one)
                else:
                    assert len(busy) == 5
                    it.leave(one)
            case 1 if open:
                it.answered(one := rng.choice(open))
                busy.add(one)
            case 2 if open:
                it.asks(one := rng.choice(open))
                busy.discard(one)
            case 3 if live:
                it.leave(one := live.pop(rng.randrange(len(live))))
                busy.discard(one)
            case 4 if open:
                it.ends(one := rng.choice(open))
                busy.discard(one)
                ending.add(one)
        assert not any(one.dropped for one in busy)
        live = [one for one in live if not one.dropped]
        ending &= set(live)
        assert it.count == len(live) <= 5
        assert set(it._ending) == ending
        assert set(it._asking) == set(live) - busy - ending


def test_files_are_left_for_the_process_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, expected in ((1024, 1024 - OWN_FILES), (100, 1), (resource.RLIM_INFINITY, 2**16)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, soft=soft: (soft, soft))
        assert room() == expected
        assert Connections(10**6, 1.0).limit == expected
        assert Connections(1, 1.0).limit == 1
