"""What the pool's operations cost does not depend on how much is cached: counted in look-ups, not in seconds."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.pool import KVPool

SIZE = 4


class Counted(dict[bytes, Any]):
    """Counts every access by key."""

    accesses = 0

    def get(self, key: bytes, default: Any = None) -> Any:
        self.accesses += 1
        return super().get(key, default)

    def __getitem__(self, key: bytes) -> Any:
        self.accesses += 1
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.accesses += 1
        return super().__contains__(key)

    def __delitem__(self, key: bytes) -> None:
        self.accesses += 1
        super().__delitem__(key)

    def _walked(self, *_: object) -> Any:
        raise AssertionError("the whole map was walked")

    __iter__ = keys = values = items = _walked


def filled(cached: int) -> tuple[KVPool, Counted]:
    """Ten blocks of prefix 0, 1, 2, …, and others."""
    pool = KVPool(cached + 1, SIZE)
    for number in range(0, cached, 10):
        tokens = list(range(number * SIZE, (number + 10) * SIZE))
        table = pool.new_table()
        assert pool.extend(table, len(tokens), 0)
        pool.commit(table, tokens, len(tokens), b"")
        pool.release(table)
    assert pool.usage().cached == cached
    counted = pool._map._by_digest = Counted(pool._map._by_digest)
    return pool, counted


@pytest.mark.parametrize("cached", [100, 10_000])
def test_lookups_do_not_grow_with_what_is_cached(cached: int) -> None:
    pool, counted = filled(cached)
    prompt = [*range(10 * SIZE), 0]
    assert pool.match(prompt, b"").tokens == 10 * SIZE
    assert counted.accesses == 10, "one a block that is found"
    assert pool.match([*prompt[:-1], *[0] * (9 * SIZE)], b"").tokens == 10 * SIZE
    assert counted.accesses == 10 + 11, "and one more, for the first that is not"
    assert pool.match([7] * 1000 * SIZE, b"").tokens == 0
    assert counted.accesses == 22, "however long the prompt is"


@pytest.mark.parametrize("cached", [100, 10_000])
def test_nor_does_evicting_or_filing_a_block(cached: int) -> None:
    pool, counted = filled(cached)
    table = pool.new_table()
    assert pool.extend(table, 3 * SIZE, 0)
    assert counted.accesses == 3, "the three least recently used are forgotten"
    pool.commit(table, [9] * 3 * SIZE, 3 * SIZE, b"")
    assert counted.accesses == 3 + 3 * 2, "a look whether it is known, and one whether its digest is"
    pool.release(table)
    assert counted.accesses == 9
