from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import prefix
from kvpool.blocks import PoolCorrupt
from kvpool.prefix import ROOT, Node, PrefixMap, chain_digest, pack, same_prefix, unpack


def chain(*payloads: bytes, salt: bytes = b"") -> Node:
    node: Node | None = None
    for payload in payloads:
        node = Node([0], chain_digest(node.digest if node else ROOT, payload, salt), node, payload, salt)
    assert node is not None
    return node


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_pack_keeps_every_id(tokens: list[int]) -> None:
    assert unpack(pack(tokens)) == tokens
    assert len(pack(tokens)) == 4 * len(tokens)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_id_is_never_filed(token: int) -> None:
    with pytest.raises(OverflowError):
        pack([1, token])


def test_a_digest_depends_on_parent_tokens_and_salt() -> None:
    digests = {
        chain_digest(parent, payload, salt)
        for parent in (ROOT, b"p" * 16)
        for payload in (pack([1, 2]), pack([2, 1]))
        for salt in (b"", b"s")
    }
    assert len(digests) == 8


def test_same_prefix_compares_whole_chains() -> None:
    one = chain(b"a", b"b", b"c")
    assert same_prefix(one, chain(b"a", b"b", b"c"))
    assert not same_prefix(one, chain(b"x", b"b", b"c"))
    assert not same_prefix(one, chain(b"b", b"c"))
    assert not same_prefix(one, chain(b"a", b"b", b"c", salt=b"s"))
    assert not same_prefix(one, None)


@pytest.mark.parametrize("what", ["tokens", "parent", "salt"])
def test_a_collision_is_no_hit(what: str) -> None:
    """Two links under one digest, alike in all but one respect."""
    entries = PrefixMap(4)
    parent = entries.register([1], b"root", None, pack([1]), b"")
    other = Node([0], b"root", None, pack([9]), b"")
    entries.register([2], b"same", parent, pack([2]), b"")
    assert entries.find(b"same", parent, pack([2]), b"") is entries.of[2]
    if what == "tokens":
        assert entries.find(b"same", parent, pack([3]), b"") is None
    elif what == "parent":
        assert entries.find(b"same", other, pack([2]), b"") is None
        assert entries.find(b"same", None, pack([2]), b"") is None
    else:
        assert entries.find(b"same", parent, pack([2]), b"s") is None


def test_the_second_prefix_of_a_digest_stays_unfindable() -> None:
    entries = PrefixMap(4)
    first = entries.register([1], b"same", None, pack([1]), b"")
    second = entries.register([2], b"same", None, pack([2]), b"")
    assert entries.find(b"same", None, pack([1]), b"") is first
    assert second.blocks == [0]
    assert entries.of[2] is None


def test_a_child_is_found_below_a_parent_that_was_computed_again() -> None:
    """Its old parent was evicted. The chain is compared once, then linked to the parent that is findable."""
    entries = PrefixMap(4)
    digests = [chain_digest(ROOT, pack([1]), b"")]
    digests.append(chain_digest(digests[0], pack([2]), b""))
    old = entries.register([1], digests[0], None, pack([1]), b"")
    child = entries.register([2], digests[1], old, pack([2]), b"")
    entries.drop(1)
    assert old.blocks == [0]
    assert entries.find(digests[0], None, pack([1]), b"") is None
    new = entries.register([3], digests[0], None, pack([1]), b"")
    assert entries.find(digests[1], new, pack([2]), b"") is child
    assert child.parent is new
    assert entries.find(digests[1], old, pack([2]), b"") is child
    assert child.parent is new, "never linked back to an evicted parent"
    entries.check(1)


def test_a_block_is_filed_once() -> None:
    entries = PrefixMap(4)
    entries.register([1], b"one", None, pack([1]), b"")
    with pytest.raises(PoolCorrupt, match="block 1 is already registered"):
        entries.register([1], b"two", None, pack([2]), b"")
    entries.drop(1)
    entries.drop(1)
    assert len(entries) == 0


def test_check_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = PrefixMap(4)
    node = entries.register([1], chain_digest(ROOT, pack([1, 2]), b""), None, pack([1, 2]), b"")
    entries.check(2)
    with pytest.raises(PoolCorrupt, match="block 1 is not full"):
        entries.check(3)
    node.blocks = [2]
    with pytest.raises(PoolCorrupt, match="block 1 and its entry disagree"):
        entries.check(2)
    node.blocks = [1]
    with monkeypatch.context() as patch:
        patch.setattr(prefix, "chain_digest", lambda parent, payload, salt: b"other")
        with pytest.raises(PoolCorrupt, match="wrong digest"):
            entries.check(2)
    entries.of[1] = None
    with pytest.raises(PoolCorrupt, match="1 entries of 1 blocks, 0 registered"):
        entries.check(2)


def test_a_long_chain_is_freed_without_recursion() -> None:
    node: Node | None = None
    for _ in range(200_000):
        node = Node([0], b"", node, b"", b"")
    del node
