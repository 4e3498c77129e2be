"""A step's rows as packed tensors: what the model and the attention backends read.

rows        r0 (decode)   r1 (chunk of 3)          r2 (decode)
tokens      a             b      c      d          e            T = 5, no padding
positions   17            32     33     34         4
slots       where each token's key and value go: block · block_size + offset
row_starts  0             1                        4       5
contexts    18            35                       5       keys a row's last token sees

Where layers share pages in groups (`kvpool.groups`), each group has blocks and tables of its own, and the rest is the
same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvpool.groups import Windows
from kvpool.lookup import unseen
from model.batch import Batch, Row
from model.params import SamplingParams

Ints = npt.NDArray[np.int64]
Plan = TypeVar("Plan")

_TOKENS, _POSITIONS, _OFFSETS, _LENGTHS, _BLOCKS = range(5)


class StepInputs:
    """One step, as the layers of one group see it. Tensors are int64 on the model's device; arrays are int64 on the
    host."""

    __slots__ = (
        "_common",
        "_others",
        "block_size",
        "blocks",
        "contexts",
        "counts",
        "device",
        "every_table",
        "fields",
        "lengths",
        "offsets",
        "plans",
        "positions",
        "row_starts",
        "sampled",
        "starts",
        "tables",
        "token_ids",
        "unread",
    )

    def __init__(self, packed: Tensor, sampled: Tensor, block_size: int) -> None:
        self.fields = packed
        """[4 + groups, T]: what follows, a row each; the blocks of all groups are the last."""
        self.token_ids: Tensor
        """[T]"""
        self.positions: Tensor
        """[T]"""
        self.offsets: Tensor
        """[T]"""
        self.lengths: Tensor
        """[T] known tokens of each token's sequence, computed or not; of a draft, those up to the token itself."""
        self.blocks: Tensor
        """[T]"""
        self.token_ids, self.positions, self.offsets, self.lengths, self.blocks, *others = packed.unbind()
        self.sampled = sampled
        """[S] index among the T tokens of those behind which a token is drawn: a row's last one, and its draft."""
        self.device = packed.device
        self.block_size = block_size
        self.row_starts: Ints
        """[R + 1] first token of each row, and T."""
        self.starts: Ints
        """[R] position of each row's first token."""
        self.counts: Ints
        """[R] drafts included."""
        self.contexts: Ints
        """[R] starts + counts."""
        self.tables: Ints
        """[R, most blocks of any row], padded with the null block 0; behind a window it may be null too."""
        self.every_table: Ints
        """[groups, R, most blocks of any row]: `tables` of each."""
        self.unread: list[tuple[int, int]]
        """Places among the T tokens that are still to be filled, and the rows of the step before that draw them."""
        self.plans: dict[Hashable, Any] = {}
        """What `plan` has made so far."""
        self._common: dict[Hashable, Any] = {}
        """The same of `common`, for all groups."""
        self._others: list[StepInputs] = []
        for blocks in others:
            view = copy(self)
            view.blocks, view.plans, view._others = blocks, {}, []
            self._others.append(view)

    @property
    def groups(self) -> list[StepInputs]:
        """The step as each group sees it; this is the first."""
        return [self, *self._others]

    def tabulate(self, tables: Ints) -> None:
        """Every group's, [groups, R, columns]."""
        for view, own in zip(self.groups, tables, strict=True):
            view.tables, view.every_table = own, tables

    @property
    def opened(self) -> Tensor:
        """Blocks that this step begins to write and does not fill. Unwritten slots must hold finite numbers where a
        backend reads them."""
        # A block is opened by the token at its first slot; only a row's last block can stay unfilled.
        last, size = self.contexts // self.block_size, self.block_size
        opens = (self.contexts % size != 0) & (self.starts <= last * size)
        return to_device(self.every_table[:, opens, last[opens]].reshape(-1), self.device)

    def packed(self) -> tuple[Tensor, ...]:
        """On a CPU: what the compiled kernels are told of the rows (`rows_of` in kernels/library.cpp), of one group."""
        return self._packed("packed", self.blocks.unsqueeze(0), self.tables[None])

    def every_packed(self) -> tuple[Tensor, ...]:
        """The same of all groups."""
        return self._packed("every packed", self.fields[_BLOCKS:], self.every_table)

    def _packed(self, key: str, blocks: Tensor, tables: Ints) -> tuple[Tensor, ...]:
        arrays = (self.row_starts, self.starts, self.counts, tables)
        hosts = self.plan(key, lambda: tuple(map(torch.from_numpy, arrays)))
        return blocks.contiguous(), self.offsets, *hosts

    def plan(self, key: Hashable, build: Callable[[], Plan]) -> Plan:
        """What a backend derives from a step, made once for all layers of a group that share `key`."""
        return _made(self.plans, key, build)

    def common(self, key: Hashable, build: Callable[[], Plan]) -> Plan:
        """The same for the layers of all groups, of what has nothing to do with blocks."""
        return _made(self._common, key, build)


def _made(plans: dict[Hashable, Any], key: Hashable, build: Callable[[], Plan]) -> Plan:
    if key not in plans:
        plans[key] = build()
    plan: Plan = plans[key]
    return plan


def draws(row: Row) -> bool:
    """Whether a token is drawn after the row: its last token, its draft aside, is the last that is known."""
    return row.samples and row.start + row.count == row.length


class InputBuilder:
    """Turns batches into StepInputs through buffers that are allocated once.

    On a CPU the tensors of a StepInputs are views, valid until the next `build`; on a GPU they are copies.
    """

    def __init__(self, max_tokens: int, block_size: int, device: torch.device, windows: Windows = (None,)) -> None:
        """`windows`: of the pool's groups."""
        self.block_size = block_size
        self.device = device
        self._windows = windows
        self._packed = np.zeros((_BLOCKS + len(windows), max_tokens), np.int64)

    def build(self, batch: Batch) -> StepInputs:
        """Pack a batch of at least one row. ValueError for more tokens than `max_tokens`, or a table that is short."""
        rows, size = batch.rows, self.block_size
        starts = np.array([row.start for row in rows], np.int64)
        drafts = np.array([len(row.draft) for row in rows], np.int64)
        counts = np.array([row.count for row in rows], np.int64) + drafts
        contexts = starts + counts
        row_starts = np.zeros(len(rows) + 1, np.int64)
        np.add.accumulate(counts, out=row_starts[1:])
        total = int(row_starts[-1])
        if total > self._packed.shape[1]:
            raise ValueError(f"a step of {total} tokens is larger than the {self._packed.shape[1]} of the runner")
        needed = (-(-contexts // size)).tolist()
        window, *others = self._windows
        tables = np.zeros((1 + len(others), len(rows), max(needed)), np.int64)
        tokens: list[int] = []
        sampled: list[int] = []
        unread: list[tuple[int, int]] = []
        for number, (row, blocks) in enumerate(zip(rows, needed, strict=True)):
            if len(row.more) != len(others):
                raise ValueError(f"row {number} has tables of {1 + len(row.more)} groups, the pool {1 + len(others)}")
            if len(row.blocks) < blocks:
                raise ValueError(f"row {number} needs {blocks} blocks and its table has {len(row.blocks)}")
            first = unseen(row.start, size, window)
            tables[0, number, first:blocks] = row.blocks[first:blocks]
            for group, own in enumerate(row.more):
                first = unseen(row.start, size, others[group])
                tables[1 + group, number, first:blocks] = own[first:blocks]
            if row.source >= 0:
                unread.append((len(tokens), row.source))
                tokens.append(0)
            elif row.count == 1:
                tokens.append(row.tokens[row.start])
            else:
                tokens += row.tokens[row.start : row.start + row.count]
            if draws(row):
                sampled += range(len(tokens) - 1, len(tokens) + len(row.draft))
            tokens += row.draft

        packed = self._packed[:, :total]
        packed[_TOKENS] = tokens
        owner = np.arange(len(rows)).repeat(counts)
        positions = np.arange(total) + (starts - row_starts[:-1])[owner]
        packed[_POSITIONS] = positions
        columns, packed[_OFFSETS] = np.divmod(positions, size)
        packed[_BLOCKS:] = tables[:, owner, columns]
        packed[_LENGTHS] = np.maximum(np.array([row.length for row in rows], np.int64)[owner], positions + 1)
        inputs = StepInputs(self._move(packed), self._move(np.array(sampled, np.int64)), size)
        for view in inputs.groups:
            view.row_starts, view.starts, view.counts, view.contexts = row_starts, starts, counts, contexts
        inputs.unread = unread
        inputs.tabulate(tables)
        return inputs

    def _move(self, array: Ints) -> Tensor:
        return to_device(array, self.device)


def whole_prompts(prompts: Sequence[list[int]], block_size: int, device: torch.device) -> tuple[StepInputs, int]:
    """One step that computes all of these, and how many blocks a pool of its own needs for it: the null block and 1, 2,
    3, … in their order."""
    rows, used = [], 1
    for tokens in prompts:
        blocks = list(range(used, used + -(-len(tokens) // block_size)))
        used += len(blocks)
        rows.append(Row(tokens, len(tokens), 0, len(tokens), blocks, SamplingParams(max_tokens=1, seed=0)))
    return InputBuilder(sum(map(len, prompts)), block_size, device).build(Batch(rows)), used


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A view on a CPU; on a GPU a copy through pinned memory of its own, so that no copy in flight is overwritten."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
