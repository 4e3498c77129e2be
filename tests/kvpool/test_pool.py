from __future__ import annotations

import pytest

from kvpool import prefix
from kvpool.pool import BlockTable, KVPool, PoolCorrupt, PoolUsage

SALT = b"tenant"


def run(pool: KVPool, tokens: list[int], salt: bytes = SALT) -> BlockTable:
    """Compute `tokens` in one step."""
    table = pool.adopt(pool.match(tokens, salt))
    assert pool.extend(table, len(tokens), len(table) * pool.block_size)
    pool.commit(table, tokens, len(tokens), salt)
    return table


def test_a_released_prompt_is_found_again_and_one_token_is_left_to_compute() -> None:
    pool = KVPool(10, 4)
    for length in (7, 8, 9):
        tokens = list(range(length))
        table = run(pool, tokens)
        held = table.blocks
        pool.release(table)
        hit = pool.match(tokens, SALT)
        assert hit.tokens == {7: 4, 8: 4, 9: 8}[length]
        assert hit.blocks == tuple(held[: hit.tokens // 4])
        assert hit.free == len(hit.blocks)
    pool.check([])


def test_a_hit_on_a_live_table_shares_its_blocks() -> None:
    pool = KVPool(10, 4)
    one = run(pool, list(range(9)))
    hit = pool.match(list(range(9)), SALT)
    assert hit.free == 0
    two = pool.adopt(hit)
    assert two.blocks == one.blocks[:2]
    assert two.tokens() == list(range(8))
    pool.check([one, two])
    assert pool.usage() == PoolUsage(total=9, free=6, cached=0, active=3)
    assert pool.freed_by(one) == 1
    pool.release(one)
    assert pool.usage() == PoolUsage(total=9, free=7, cached=0, active=2)
    pool.check([two])


def test_salts_never_share() -> None:
    pool = KVPool(10, 4)
    pool.release(run(pool, list(range(9)), b"one"))
    assert pool.match(list(range(9)), b"two").tokens == 0
    assert pool.match(list(range(9)), b"").tokens == 0
    hashes = pool.hashes(list(range(9)), b"one")
    assert pool.match(list(range(9)), b"two", hashes).tokens == 0, "not even under the other's digests"
    assert pool.match(list(range(9)), b"one", hashes).tokens == 8


def test_a_table_keeps_its_salt() -> None:
    pool = KVPool(10, 4)
    table = run(pool, list(range(4)), b"one")
    assert pool.extend(table, 8, 4)
    with pytest.raises(ValueError, match="another salt"):
        pool.commit(table, list(range(8)), 8, b"two")


def test_one_digest_for_everything_never_gives_a_wrong_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "chain_digest", lambda parent, payload, salt: b"c" * 16)
    pool = KVPool(10, 2)
    one = run(pool, [1, 1, 1, 1, 1])
    two = run(pool, [2, 2, 1, 1, 1])
    pool.check([one, two])
    assert pool.match([1, 1, 1, 1, 1], SALT).blocks == (one.blocks[0],), "the same tokens one block on are no hit"
    assert pool.match([2, 2, 1, 1, 1], SALT).tokens == 0
    assert pool.match([1, 1, 1], b"").tokens == 0


def test_the_least_recently_freed_tail_goes_first() -> None:
    pool = KVPool(6, 2)
    old, new = [1, 2, 3, 4, 5], [6, 7, 8, 9]
    tables = run(pool, old), run(pool, new)
    pool.release(tables[0])
    pool.release(tables[1])
    assert pool.usage() == PoolUsage(total=5, free=1, cached=4, active=0)
    other = pool.new_table()
    assert pool.extend(other, 2, 0)
    assert pool.match(old, SALT).tokens == 4, "the block that held nothing findable was taken"
    assert pool.extend(other, 4, 2)
    assert pool.match(old, SALT).tokens == 2, "the tail of the older one"
    assert pool.extend(other, 6, 4)
    assert pool.match(old, SALT).tokens == 0
    assert pool.match([*new, 0], SALT).tokens == 4
    pool.check([other])


def test_a_stale_hit_is_refused_and_changes_nothing() -> None:
    pool = KVPool(4, 2)
    pool.release(run(pool, [1, 2, 3]))
    hit = pool.match([1, 2, 3], SALT)
    table = pool.new_table()
    assert pool.extend(table, 6, 0)
    with pytest.raises(ValueError, match="stale prefix hit"):
        pool.adopt(hit)
    pool.check([table])


def test_extend_says_no_and_changes_nothing_when_the_pool_is_full() -> None:
    pool = KVPool(4, 2)
    one = run(pool, [1, 2, 3])
    two = pool.fork(one)
    three = run(pool, [9])
    assert pool.num_free == 0
    assert pool.blocks_needed(two, 4, 3) == 1
    assert not pool.extend(two, 4, 3)
    assert not pool.extend(one, 5, 4)
    assert (two.blocks, pool.take_copies()) == ([1, 2], [])
    pool.check([one, two, three])


def test_the_first_writer_of_a_shared_block_copies_it_and_the_last_holder_does_not() -> None:
    pool = KVPool(8, 4)
    one = run(pool, list(range(6)))
    two, three = pool.fork(one), pool.fork(one)
    assert pool.extend(one, 7, 6)
    assert pool.extend(two, 7, 6)
    assert pool.extend(three, 7, 6)
    assert (one.blocks, two.blocks, three.blocks) == ([1, 3], [1, 4], [1, 2])
    assert pool.take_copies() == [(2, 3), (2, 4)]
    assert pool.take_copies() == []
    pool.check([one, two, three])


def test_a_block_that_is_rewritten_from_its_first_slot_is_not_copied() -> None:
    pool = KVPool(8, 2)
    one = run(pool, [1, 2, 3, 4])
    two = pool.fork(one)
    assert pool.extend(two, 4, 2)
    assert two.blocks == [1, 3]
    assert pool.take_copies() == []
    assert pool.match([1, 2, 3, 4, 5], SALT).blocks == (1, 2)
    pool.check([one, two])


def test_a_block_that_is_written_again_is_not_found_under_its_old_tokens() -> None:
    pool = KVPool(8, 2)
    table = run(pool, [1, 2, 3, 4])
    assert pool.extend(table, 4, 1)
    assert pool.match([1, 2, 3], SALT).tokens == 0
    pool.commit(table, [1, 9, 3, 4], 4, SALT)
    assert pool.match([1, 9, 3, 4, 5], SALT).tokens == 4
    assert table.tokens() == [1, 9, 3, 4]
    pool.check([table])


def test_what_lies_behind_a_rewritten_end_is_forgotten_when_it_is_reached() -> None:
    pool = KVPool(8, 2)
    table = run(pool, [1, 2, 3, 4])
    assert pool.extend(table, 2, 0)
    pool.commit(table, [8, 9], 2, SALT)
    assert pool.extend(table, 3, 2)
    pool.check([table])
    pool.release(table)
    pool.release(run(pool, [1, 2]))
    assert pool.match([1, 2, 3, 4, 5], SALT).tokens == 2, "block 1 was about to be overwritten"


def test_a_duplicate_that_is_written_again_is_rewound() -> None:
    """Its block was never filed, so only the table knows that commit has seen it."""
    pool = KVPool(8, 2)
    one, two = pool.new_table(), pool.new_table()
    for table in (one, two):
        assert pool.extend(table, 2, 0)
    for table in (one, two):
        pool.commit(table, [1, 2], 2, SALT)
    assert pool.extend(two, 2, 1)
    pool.commit(two, [1, 9], 2, SALT)
    assert two.tokens() == [1, 9]
    assert pool.match([1, 9, 0], SALT).blocks == tuple(two.blocks)
    pool.check([one, two])


def test_an_empty_write_copies_and_forgets_nothing() -> None:
    pool = KVPool(8, 2)
    one = run(pool, [1, 2, 3, 4])
    two = pool.fork(one)
    assert pool.blocks_needed(two, 3, 3) == 0
    assert pool.extend(two, 3, 3)
    assert two.blocks == one.blocks
    assert two.registered == 2
    pool.check([one, two])


def test_two_tables_that_compute_the_same_prompt_keep_their_own_blocks() -> None:
    pool = KVPool(8, 2)
    one, two = pool.new_table(), pool.new_table()
    tokens = [1, 2, 3, 4]
    for table in (one, two):
        assert pool.extend(table, 4, 0)
    for table in (one, two):
        pool.commit(table, tokens, 4, SALT)
    assert pool.match([*tokens, 5], SALT).blocks == tuple(one.blocks)
    assert two.blocks == [3, 4]
    pool.check([one, two])
    pool.release(two)
    assert pool.usage().cached == 0, "a duplicate is of no use once it is free"
    pool.check([one])


def test_commit_files_only_what_is_computed_and_only_in_full_blocks() -> None:
    pool = KVPool(8, 4)
    table = pool.new_table()
    tokens = list(range(12))
    assert pool.extend(table, 12, 0)
    for computed, found in ((3, 0), (4, 4), (7, 4), (11, 8)):
        pool.commit(table, tokens, computed, SALT)
        assert pool.match([*tokens, 0], SALT).tokens == found
    with pytest.raises(ValueError, match="commit of 16 tokens"):
        pool.commit(table, [*tokens, 0, 0, 0, 0], 16, SALT)
    with pytest.raises(ValueError, match="commit of 12 tokens: 11 known"):
        pool.commit(table, tokens[:11], 12, SALT)


def test_hashes_grow_in_place_and_save_hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KVPool(8, 2)
    tokens = [1, 2, 3, 4, 5]
    pool.release(run(pool, tokens))
    hashes = pool.hashes(tokens[:3], SALT)
    assert len(hashes) == 1
    assert pool.hashes(tokens, SALT, hashes) is hashes
    assert hashes == pool.hashes(tokens, SALT)
    assert len(hashes) == 2
    assert pool.match(tokens, SALT, hashes[:1]).tokens == 4, "the rest is hashed on the way"

    def never(*_: bytes) -> bytes:
        raise AssertionError("hashed again")

    monkeypatch.setattr(prefix, "chain_digest", never)
    assert pool.match(tokens, SALT, hashes).tokens == 4


def test_without_prefix_caching_nothing_is_found_or_hashed() -> None:
    pool = KVPool(8, 2, prefix_caching=False)
    table = run(pool, [1, 2, 3, 4])
    assert pool.hashes([1, 2, 3], SALT) == []
    assert pool.match([1, 2, 3], SALT).tokens == 0
    pool.check([table])
    pool.release(table)
    assert pool.usage() == PoolUsage(total=7, free=7, cached=0, active=0)


def test_tokens_held_counts_shared_blocks_once() -> None:
    pool = KVPool(20, 4)
    one = run(pool, list(range(10)))
    two = pool.fork(one)
    assert pool.tokens_held([(one, 10), (two, 10)]) == 10
    assert pool.waste(10) == pytest.approx(1 - 10 / 12)
    assert pool.extend(two, 11, 10)
    assert pool.tokens_held([(one, 10), (two, 10)]) == 12
    assert pool.tokens_held([(one, 10), (two, 11)]) == 13
    assert KVPool(4, 4).waste(0) == 0.0


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        ("reference", "block 1: 2 references, 1 live tables hold it"),
        ("missing table", "block 1: 1 references, 0 live tables hold it"),
        ("twice", "a table holds a block twice"),
        ("null", "a table holds block 0 of 8"),
        ("foreign tokens", "block 1 is registered for other tokens"),
        ("chain", "1 blocks registered, 2 in the chain"),
        ("cached", "counted 1 cached, 0 surplus; found 0, 0"),
        ("surplus", "counted 0 cached, 1 surplus; found 0, 0"),
    ],
)
def test_check_says_what_is_wrong(breakage: str, message: str) -> None:
    pool = KVPool(8, 2)
    table = run(pool, [1, 2, 3, 4, 5])
    tables = [table]
    pool.check(tables)
    match breakage:
        case "reference":
            pool._refs[1] += 1
        case "missing table":
            tables = []
        case "twice":
            table.blocks[1] = table.blocks[0]
        case "null":
            table.blocks[2] = 0
        case "foreign tokens":
            table.blocks[0], table.blocks[1] = table.blocks[1], table.blocks[0]
            message = "block 2 is registered for other tokens"
        case "chain":
            table.registered = 1
        case "cached":
            pool._cached = 1
        case "surplus":
            pool._surplus = 1
    with pytest.raises(PoolCorrupt, match=message):
        pool.check(tables)


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size must be at least 1, not 0"):
        KVPool(8, 0)
    with pytest.raises(ValueError, match="num_blocks must be at least 2"):
        KVPool(1)
