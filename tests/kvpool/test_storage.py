from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpool.formats import FORMATS, KVLayout
from kvpool.storage import KVStorage, _independent

LAYERS, BLOCKS, HEADS, SIZE, DIM = 2, 6, 3, 4, 16
PLAIN = ("float32", "bfloat16", "float16")
every_format = pytest.mark.parametrize("name", list(FORMATS))


def layout(name: str) -> KVLayout:
    return KVLayout(LAYERS, HEADS, DIM, FORMATS[name], SIZE)


def make(name: str = "float32") -> KVStorage:
    return KVStorage(layout(name), BLOCKS)


def numbered(name: str = "float32") -> KVStorage:
    """Every block of every layer, K and V holds a number of its own."""
    storage = make(name)
    for number, plane in enumerate((storage.keys, storage.values)):
        numbers = torch.arange(LAYERS * BLOCKS) * 2 + number
        plane.tiles.copy_(numbers.view(LAYERS, BLOCKS, *[1] * (plane.tiles.dim() - 2)).expand_as(plane.tiles))
    return storage


@every_format
def test_it_is_one_allocation_of_the_planned_size_and_starts_as_zeros(name: str) -> None:
    storage = make(name)
    assert storage.data.nbytes == storage.nbytes == BLOCKS * layout(name).block_bytes
    assert storage.num_blocks == BLOCKS
    assert storage.data.count_nonzero() == 0
    views = [*storage.k, *storage.v]
    assert len(views) == 2 * LAYERS
    assert sum(view.nbytes for view in views) == storage.nbytes
    for view in views:
        assert view.shape[:2] == (BLOCKS, HEADS)
        assert view.is_contiguous()
        assert view.untyped_storage().data_ptr() == storage.data.untyped_storage().data_ptr()
    starts = sorted((view.data_ptr(), view.nbytes) for view in views)
    assert all(start + size == after for (start, size), (after, _) in itertools.pairwise(starts))


@pytest.mark.parametrize("slots", [[9], [0], [23, 4, 11, 8, 5], list(range(4, 24))])
@pytest.mark.parametrize("name", PLAIN)
def test_write_puts_each_token_where_plain_indexing_would(slots: list[int], name: str) -> None:
    storage = make(name)
    k, v = torch.randn(2, len(slots), HEADS, DIM)
    storage.write(1, k, v, torch.tensor(slots))
    expected = torch.zeros(2, BLOCKS, HEADS, SIZE, DIM, dtype=storage.data.dtype)
    for t, slot in enumerate(slots):
        for head in range(HEADS):
            expected[0, slot // SIZE, head, slot % SIZE] = k[t, head]
            expected[1, slot // SIZE, head, slot % SIZE] = v[t, head]
    assert torch.equal(storage.k[1], expected[0])
    assert torch.equal(storage.v[1], expected[1])
    assert storage.data[0].count_nonzero() == 0, "no other layer"


@pytest.mark.parametrize("slots", [[9], [23, 4, 11, 8, 5]])
@every_format
def test_what_was_written_is_read(slots: list[int], name: str) -> None:
    storage = make(name)
    k, v = torch.randn(2, len(slots), HEADS, DIM)
    storage.write(1, k, v, torch.tensor(slots))
    for plane, x in ((storage.keys, k), (storage.values, v)):
        found = plane.read(1, torch.arange(BLOCKS * HEADS)).view(BLOCKS, HEADS, SIZE, DIM)
        written = x.to(plane.tiles.dtype).float() if plane.codec is None else plane.codec.decode(*plane.codec.encode(x))
        for t, slot in enumerate(slots):
            assert torch.equal(found[slot // SIZE, :, slot % SIZE], written[t])
            found[slot // SIZE, :, slot % SIZE] = 0
        assert found.count_nonzero() == 0, "no other slot"
        assert plane.tiles[0].count_nonzero() == 0, "no other layer"


def test_a_tile_of_codes_has_its_scales_behind_it() -> None:
    storage = make("int8")
    ones = torch.ones(1, HEADS, DIM)
    storage.write(0, ones, ones * 127, torch.tensor([2 * SIZE + 1]))
    tile = storage.v[0][2, 1]
    assert tile[DIM : 2 * DIM].tolist() == [127] * DIM
    assert tile[SIZE * DIM :].view(torch.float16).tolist() == [0.0, 1.0, 0.0, 0.0]
    assert make("k8v4").v[0].shape == (BLOCKS, HEADS, SIZE * (DIM // 2 + 2))


def test_write_takes_slices_of_a_fused_projection() -> None:
    storage = make()
    qkv = torch.randn(5, 4 + 2 * HEADS, DIM)
    k, v = qkv[:, 4 : 4 + HEADS], qkv[:, 4 + HEADS :]
    blocks, offsets = storage.locate(torch.tensor([4, 5, 6, 7, 8]))
    storage.write_at(0, k, v, blocks, offsets)
    assert torch.equal(storage.k[0][1].transpose(0, 1), k[:4])
    assert torch.equal(storage.v[0][2, :, 0], v[4])


@every_format
def test_copy_and_zero_take_whole_blocks_in_all_layers(name: str) -> None:
    storage, before = numbered(name), numbered(name)
    storage.copy([(1, 4), (2, 5)])
    storage.copy([])
    storage.zero(torch.tensor([3]))
    for plane, old in ((storage.keys, before.keys), (storage.values, before.values)):
        assert torch.equal(plane.tiles[:, 4:], old.tiles[:, 1:3])
        assert torch.equal(plane.tiles[:, :3], old.tiles[:, :3])
        assert plane.tiles[:, 3].count_nonzero() == 0


@every_format
def test_a_block_s_content_goes_out_and_in(name: str) -> None:
    """To another storage, other blocks and in another order; nothing else changes."""
    storage, other = numbered(name), numbered(name)
    content = storage.gather([4, 1])
    assert content.shape == (2, storage.block_bytes)
    assert storage.block_bytes == layout(name).block_bytes
    kept = content.copy()
    storage.zero(torch.tensor([1, 4]))
    assert (content == kept).all(), "a copy"
    other.scatter([2, 5], content)
    fresh = numbered(name)
    for plane, old in ((other.keys, fresh.keys), (other.values, fresh.values)):
        assert torch.equal(plane.tiles[:, [2, 5]], old.tiles[:, [4, 1]])
        assert torch.equal(plane.tiles[:, [0, 1, 3, 4]], old.tiles[:, [0, 1, 3, 4]])


@given(st.lists(st.tuples(st.integers(1, BLOCKS - 1), st.integers(1, BLOCKS - 1)), max_size=8))
def test_copies_happen_as_if_one_after_the_other(pairs: list[tuple[int, int]]) -> None:
    """Chains (1→2, 2→3), a target that becomes a source's copy again, a target written twice."""
    storage = numbered()
    expected = storage.data.clone()
    for source, target in pairs:
        expected[:, :, target] = expected[:, :, source].clone()
    storage.copy(pairs)
    assert torch.equal(storage.data, expected)


def test_copies_that_depend_on_each_other_are_not_made_at_once() -> None:
    """A device may order the writes of one call as it likes, so a CPU's result alone proves nothing."""
    assert _independent([(1, 3), (2, 4)]) == [[(1, 3), (2, 4)]]
    assert _independent([(1, 3), (2, 3)]) == [[(1, 3)], [(2, 3)]]
    assert _independent([(1, 2), (2, 3), (1, 4)]) == [[(1, 2)], [(2, 3), (1, 4)]]
    assert _independent([(1, 2), (3, 1)]) == [[(1, 2), (3, 1)]]
