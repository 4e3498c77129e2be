from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpool.formats import FORMATS, KVLayout
from kvpool.storage import KVStorage, _independent

LAYERS, BLOCKS, HEADS, SIZE, DIM = 2, 6, 3, 4, 8


def make(dtype: torch.dtype = torch.float32) -> KVStorage:
    return KVStorage(LAYERS, BLOCKS, HEADS, SIZE, DIM, dtype)


def numbered() -> KVStorage:
    """Every block of every layer, K and V holds a number of its own."""
    storage = make()
    storage.data.copy_(torch.arange(LAYERS * 2 * BLOCKS).view(LAYERS, 2, BLOCKS, 1, 1, 1).expand_as(storage.data))
    return storage


@pytest.mark.parametrize("name", list(FORMATS))
def test_it_is_one_allocation_of_the_planned_size_and_starts_as_zeros(name: str) -> None:
    dtype: torch.dtype = getattr(torch, name)
    storage = make(dtype)
    layout = KVLayout(LAYERS, HEADS, DIM, FORMATS[name], SIZE)
    assert storage.nbytes == BLOCKS * layout.block_bytes
    assert storage.data.count_nonzero() == 0
    for layer in range(LAYERS):
        for view in (storage.k[layer], storage.v[layer]):
            assert view.shape == layout.shape(BLOCKS)
            assert view.is_contiguous()
            assert view.untyped_storage().data_ptr() == storage.data.untyped_storage().data_ptr()


@pytest.mark.parametrize("slots", [[9], [0], [23, 4, 11, 8, 5], list(range(4, 24))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_puts_each_token_where_plain_indexing_would(slots: list[int], dtype: torch.dtype) -> None:
    storage = make(dtype)
    k, v = torch.randn(2, len(slots), HEADS, DIM)
    storage.write(1, k, v, torch.tensor(slots))
    expected = torch.zeros(2, BLOCKS, HEADS, SIZE, DIM, dtype=dtype)
    for t, slot in enumerate(slots):
        for head in range(HEADS):
            expected[0, slot // SIZE, head, slot % SIZE] = k[t, head].to(dtype)
            expected[1, slot // SIZE, head, slot % SIZE] = v[t, head].to(dtype)
    assert torch.equal(storage.k[1], expected[0])
    assert torch.equal(storage.v[1], expected[1])
    assert storage.data[0].count_nonzero() == 0, "no other layer"


def test_write_takes_slices_of_a_fused_projection() -> None:
    storage = make()
    qkv = torch.randn(5, 4 + 2 * HEADS, DIM)
    k, v = qkv[:, 4 : 4 + HEADS], qkv[:, 4 + HEADS :]
    blocks, offsets = storage.locate(torch.tensor([4, 5, 6, 7, 8]))
    storage.write_at(0, k, v, blocks, offsets)
    assert torch.equal(storage.k[0][1].transpose(0, 1), k[:4])
    assert torch.equal(storage.v[0][2, :, 0], v[4])


def test_copy_moves_whole_blocks_in_all_layers() -> None:
    storage = numbered()
    before = storage.data.clone()
    storage.copy([(1, 4), (2, 5)])
    assert torch.equal(storage.data[:, :, 4:], before[:, :, 1:3])
    assert torch.equal(storage.data[:, :, :4], before[:, :, :4])
    storage.copy([])


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
