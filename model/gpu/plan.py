"""A step's attention, cut into items of work for a GPU. Host arithmetic only: no triton here.

    an item     row | first query | first key | end of the keys | part     the part is -1 where the item has all keys
    a merge     row | first query | first part | number of parts           one for each tile of queries that was split

Decode rows and short drafts fit a small tile; rows of chunks get a large one, in a launch of their own. A context is
split where one program would otherwise work long after all others are done: no item has more than its share of the
launch's keys. So there are at most WAVES · programs / kv_heads items more than tiles, whatever the contexts are, and a
captured step reserves them (`Reserved`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvpool.formats import BLOCK_SIZES
from model.inputs import Ints, StepInputs, to_device

SMALL, LARGE = 16, 64
"""Rows of a tile: queries times the heads that share a key head. 16 is the least that matrix units take."""
LEAST = 256
"""Keys of a part: fewer are not worth a merge."""
STEP = 64
"""Parts begin at multiples of it: whole tiles of keys, whatever a kernel's tile is."""
WAVES = 2
"""Items that each of a GPU's processors should get."""
COLUMNS = 5


def power(least: int, size: int) -> int:
    """The smallest power of two that is neither below `least`, one itself, nor below `size`."""
    return max(least, 1 << (size - 1).bit_length())


def up(count: Any, size: Any) -> Any:
    """count / size, rounded up."""
    return -(-count // size)


@dataclass(frozen=True, slots=True)
class Work:
    """One launch. Tensors are int32 on the device."""

    rows: int
    """Of a tile."""
    items: Tensor
    """[n, COLUMNS], the largest first."""
    merges: Tensor
    """[m, 4]"""
    parts: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What all layers of a group and its window share. Tensors are int32 on the device; see `StepInputs` for the first
    two."""

    row_starts: Tensor
    starts: Tensor
    gone: Tensor
    """[R] blocks at the beginning of each row that none of its queries sees, and `tables` has not."""
    tables: Tensor
    """Rows one behind the other."""
    width: Tensor
    """[1] of `tables`; on the device, for a captured step has another one each time."""
    works: list[Work]


def plan(inputs: StepInputs, window: int | None, kv_heads: int, group: int, programs: int) -> Plan:
    """`group` query heads read one key head; `programs` is how many the GPU runs at once."""
    small = power(SMALL, group)
    few = inputs.counts <= small // group
    cuts = inputs.common(
        ("cuts", window, kv_heads, group, programs),
        lambda: [
            (rows, *cut(inputs, chosen, rows // group, window, kv_heads, programs))
            for chosen, rows in ((np.flatnonzero(few), small), (np.flatnonzero(~few), max(LARGE, small)))
            if len(chosen)
        ],
    )
    pairs = [array for _, *pair in cuts for array in pair]
    heads = _heads(inputs, window)
    arrays = [*heads, *pairs, _seen(inputs.tables, *heads[2:])]
    packed, begins = _pack(arrays)
    row_starts, starts, gone, width, *moved, tables = _views(to_device(packed, inputs.device), begins, arrays)
    works = [
        Work(rows, items, merges, int(merged[:, 3].sum()))
        for (rows, _, merged), items, merges in zip(cuts, moved[::2], moved[1::2], strict=True)
    ]
    return Plan(row_starts, starts, gone, tables, width, works)


class Reserved:
    """Room for the plan of any step of up to `rows` rows of one token, in tensors that stay where they are.

    What a step leaves of it are items without keys, of a query that its row has not: they write nothing.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        window: int | None,
        kv_heads: int,
        group: int,
        programs: int,
        device: torch.device,
    ) -> None:
        """columns: of the longest table. The rest as for `plan`."""
        self._window, self._kv_heads, self._group, self._programs = window, kv_heads, group, programs
        more = WAVES * programs // kv_heads
        merged = min(rows, more)
        if window is not None:
            columns = min(columns, up(window, BLOCK_SIZES[0]) + 1)
        shapes = [(rows + 1,), (rows,), (rows,), (1,), (rows + more, COLUMNS), (merged, 4)]
        self._spare = [np.zeros(shape, np.int64) for shape in shapes]
        self._spare[4][:] = (0, 1, 0, 0, -1)
        self._spare[5][:] = (0, 1, 0, 0)
        whole = [*self._spare, np.zeros((rows, columns), np.int64)]
        packed, begins = _pack(whole)
        self._flat = torch.from_numpy(packed).to(device)
        row_starts, starts, gone, width, items, merges, tables = _views(self._flat, begins, whole)
        work = Work(power(SMALL, group), items, merges, more + merged)
        self.plan = Plan(row_starts, starts, gone, tables, width, [work])

    def fill(self, inputs: StepInputs) -> None:
        """Let `plan` be that of a step, without waiting for the device."""
        rows = self.plan.works[0].rows
        every = np.arange(len(inputs.counts))
        pair = inputs.common(
            ("cut", rows, self._window, self._kv_heads, self._group, self._programs),
            lambda: cut(inputs, every, rows // self._group, self._window, self._kv_heads, self._programs),
        )
        heads, arrays = _heads(inputs, self._window), []
        for array, spare in zip([*heads, *pair], self._spare, strict=True):
            whole = spare.copy()
            whole[: len(array)] = array
            arrays.append(whole)
        packed = torch.from_numpy(_pack([*arrays, _seen(inputs.tables, *heads[2:])])[0])
        target = self._flat[: len(packed)]
        target.copy_(packed.pin_memory() if target.is_cuda else packed, non_blocking=True)


def cut(
    inputs: StepInputs, chosen: Ints, queries: int, window: int | None, kv_heads: int, programs: int
) -> tuple[Ints, Ints]:
    """Items and merges of the rows `chosen`, in tiles of so many queries."""
    starts, counts = inputs.starts[chosen], inputs.counts[chosen]
    tiles = up(counts, queries)
    owner = np.repeat(np.arange(len(chosen)), tiles)
    first = (np.arange(len(owner)) - np.repeat(tiles.cumsum() - tiles, tiles)) * queries
    position = starts[owner] + first
    end = position + np.minimum(queries, counts[owner] - first)
    begin = np.zeros_like(end) if window is None else np.maximum(position - window + 1, 0) // STEP * STEP
    keys = end - begin
    share = max(LEAST, up(int(keys.sum()) * kv_heads, WAVES * programs))
    size = up(up(keys, up(keys, share)), STEP) * STEP
    pieces = up(keys, size)

    item = np.repeat(np.arange(len(owner)), pieces)
    number = np.arange(len(item)) - np.repeat(pieces.cumsum() - pieces, pieces)
    split = pieces > 1
    before = np.where(split, pieces, 0).cumsum() - np.where(split, pieces, 0)
    row = chosen[owner]
    from_ = begin[item] + number * size[item]
    to = np.minimum(from_ + size[item], end[item])
    part = np.where(split[item], before[item] + number, -1)
    items = np.stack([row[item], first[item], from_, to, part], 1)
    merges = np.stack([row, first, before, pieces], 1)[split]
    return items[np.argsort(from_ - to, kind="stable")], merges


def _heads(inputs: StepInputs, window: int | None) -> list[Ints]:
    """Of a plan: row_starts, starts, gone, width."""
    gone = np.zeros_like(inputs.starts)
    width = inputs.tables.shape[1]
    if window is not None:
        gone = np.maximum(inputs.starts - window + 1, 0) // inputs.block_size
        width = int((up(inputs.contexts, inputs.block_size) - gone).max())
    return [inputs.row_starts, inputs.starts, gone, np.array([width])]


def _seen(tables: Ints, gone: Ints, width: Ints) -> Ints:
    """The blocks that rows see, [R, width]."""
    if not gone.any():
        return tables
    columns = np.minimum(gone[:, None] + np.arange(int(width[0])), tables.shape[1] - 1)
    return np.take_along_axis(tables, columns, 1)


def _pack(arrays: list[Ints]) -> tuple[npt.NDArray[np.int32], list[int]]:
    """One behind the other, to be moved in one copy, and where each begins: at multiples of 16 bytes, as kernels are
    compiled for."""
    begins = np.cumsum([0, *(up(array.size, 4) * 4 for array in arrays)]).tolist()
    packed: npt.NDArray[np.int32] = np.zeros(begins[-1], np.int32)
    for array, begin in zip(arrays, begins, strict=False):
        packed[begin : begin + array.size] = array.ravel()
    return packed, begins


def _views(flat: Tensor, begins: list[int], arrays: list[Ints]) -> list[Tensor]:
    return [flat[begin : begin + array.size].view(array.shape) for begin, array in zip(begins, arrays, strict=False)]
