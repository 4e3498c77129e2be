from __future__ import annotations

import pytest

from kvpool.blocks import NULL_BLOCK, Blocks, PoolCorrupt


def test_blocks_come_in_order_and_the_null_block_never() -> None:
    blocks = Blocks(5)
    assert [blocks.take() for _ in range(4)] == [1, 2, 3, 4]
    assert blocks.free == 0
    with pytest.raises(PoolCorrupt, match="empty"):
        blocks.take()
    assert blocks.refs[NULL_BLOCK] == 0


def test_the_oldest_is_reused_first_and_any_block_can_leave_the_list() -> None:
    blocks = Blocks(6)
    for _ in range(5):
        blocks.refs[blocks.take()] = 0
    for block in (4, 2, 5):
        blocks.put_newest(block)
    blocks.put_oldest(1)
    blocks.put_newest(3)
    assert blocks.order() == [1, 4, 2, 5, 3]
    for block in (2, 3, 1):  # middle, tail, head
        blocks.revive(block)
    assert blocks.order() == [4, 5]
    blocks.check()
    assert [blocks.take(), blocks.take()] == [4, 5]


@pytest.mark.parametrize("total", [-1, 0, 1])
def test_a_pool_without_a_usable_block_is_refused(total: int) -> None:
    with pytest.raises(ValueError, match=f"at least 2.*not {total}"):
        Blocks(total)


def test_check_names_a_free_block_that_is_referenced() -> None:
    blocks = Blocks(4)
    blocks.refs[2] = 1
    with pytest.raises(PoolCorrupt, match="block 2 is free and has 1 references"):
        blocks.check()


def test_check_finds_a_lost_block() -> None:
    blocks = Blocks(4)
    blocks.refs[blocks.take()] = 0
    with pytest.raises(PoolCorrupt, match="3 blocks without references, 2 in the free list"):
        blocks.check()


def test_check_finds_a_broken_link() -> None:
    blocks = Blocks(5)
    blocks._prev[3] = 1
    with pytest.raises(PoolCorrupt, match="broken link at block 3"):
        blocks.check()


def test_check_finds_a_cycle() -> None:
    blocks = Blocks(4)
    blocks._next[3], blocks._prev[1] = 1, 3
    with pytest.raises(PoolCorrupt, match="broken link"):
        blocks.check()
