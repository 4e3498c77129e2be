from __future__ import annotations

from kvpool.pool import KVPool
from kvpool.table import BlockTable


def filled(pool: KVPool, tokens: list[int]) -> BlockTable:
    table = pool.new_table()
    assert pool.extend(table, len(tokens), 0)
    pool.commit(table, tokens, len(tokens), b"")
    return table


def test_tokens_are_those_of_the_full_blocks() -> None:
    table = filled(KVPool(5, 2), [5, 6, 7, 8, 9])
    assert (len(table), table.registered) == (3, 2)
    assert table.tokens() == [5, 6, 7, 8]


def test_rewind_forgets_the_blocks_behind() -> None:
    table = filled(KVPool(5, 2), [5, 6, 7, 8])
    table.rewind(3)
    assert table.tokens() == [5, 6, 7, 8]
    table.rewind(1)
    assert (table.registered, table.tokens()) == (1, [5, 6])
    table.rewind(0)
    assert (table.registered, table.node) == (0, None)


def test_a_fork_shares_blocks_but_no_list() -> None:
    pool = KVPool(5, 2)
    one = filled(pool, [5, 6, 7])
    two = pool.fork(one)
    assert two.blocks == one.blocks
    assert two.blocks is not one.blocks
    assert two.tokens() == one.tokens() == [5, 6]


def test_release_gives_the_table_a_new_list() -> None:
    pool = KVPool(5, 2)
    table = filled(pool, [5, 6, 7])
    held = table.blocks
    pool.release(table)
    assert held == [1, 2]
    assert table.blocks == []
    assert pool.extend(table, 1, 0)
    assert held == [1, 2]
