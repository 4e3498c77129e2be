from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from server.probation import Probation


def test_without_a_death_everybody_goes_at_once() -> None:
    line = Probation(2)
    line.begin([])
    for id in range(5):
        line.add(id)
    assert line.next(0, 0) == [0, 1, 2, 3, 4]


def test_suspects_go_one_by_one_and_the_guilty_fails_alone() -> None:
    line = Probation(8)
    live = [1, 2, 3]
    line.begin(live)
    assert line.next(0, 0) == [1, 2, 3]
    assert line.end(live, outside=False) is None
    line.begin(live)
    assert line.next(1, 1) == [1, 2, 3]
    assert line.end(live, outside=False) is None
    line.begin(live)
    assert line.next(2, 2) == [1]
    line.progress(1)
    assert line.next(3, 3) == [2]
    assert line.end(live, outside=False) == 2
    line.forget(2)
    line.begin([1, 3])
    assert 3 in line.next(4, 4)


@given(seed=st.integers(0, 10_000), killer=st.integers(0, 9), outside=st.booleans())
def test_only_the_killer_fails(seed: int, killer: int, outside: bool) -> None:
    """It kills whatever engine it is in before a token comes of it; others get theirs in any order."""
    rng = random.Random(seed)
    line, live, failed = Probation(64), list(range(10)), []
    for _ in range(40):
        line.begin(live)
        inside: list[int] = []
        while True:
            going = line.next(0, 0)
            inside += going
            if killer in inside or not (going or inside):
                break
            id = rng.choice(inside)
            inside.remove(id)
            line.progress(id)
        if killer not in inside:
            break
        for id in rng.sample(inside, rng.randrange(len(inside))):
            if id != killer:
                line.progress(id)
        guilty = line.end(live, outside=outside)
        if guilty is not None:
            failed.append(guilty)
            live.remove(guilty)
            line.forget(guilty)
    assert failed == [killer]


@given(seed=st.integers(0, 10_000))
def test_five_kills_from_outside_make_nobody_guilty(seed: int) -> None:
    rng = random.Random(seed)
    line, live = Probation(64), list(range(32))
    for _ in range(5):
        line.begin(live)
        inside = line.next(0, 0)
        for _ in range(rng.randrange(6)):
            if inside:
                line.progress(inside.pop(0))
            inside += line.next(0, 0)
        assert line.end(live, outside=True) is None


@given(seed=st.integers(0, 10_000))
def test_five_kills_at_the_ends_of_searches_make_nobody_guilty(seed: int) -> None:
    """Nothing comes of a search before its end, and a kill then finds the next one alone."""
    rng = random.Random(seed)
    line, live = Probation(64), list(range(4))
    for kill in range(5):
        line.begin(live)
        going = line.next(0, 0)
        for _ in range(rng.randint(1, 2) if kill >= 2 else 0):
            if live:
                line.forget(going[0])
                live.remove(going[0])
                going = line.next(0, 0)
        assert line.end(live, outside=True) is None
