"""KVStorage: the pool's memory. With `pages` the only file of this room that knows torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvpool.pages import zeroed


class KVStorage:
    """Keys and values of all layers, in one allocation that is made here and never grows.

        data  [layers, 2, blocks, kv_heads, block_size, head_dim]

    `k[layer]` and `v[layer]` are contiguous views [blocks, kv_heads, block_size, head_dim]; one (block, head) is one
    contiguous tile. Everything starts as zeros, so that a masked read of a slot that was never written is finite, and
    is backed by memory from the start or soon after (`kvpool.pages`), not under load.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """`num_blocks` includes the null block 0. Raises what torch raises where the memory cannot be had."""
        shape = (num_layers, 2, num_blocks, kv_heads, block_size, head_dim)
        if torch.device(device).type == "cpu":
            self.data = zeroed(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        else:
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.block_size = block_size
        self.k: list[Tensor] = [layer[0] for layer in self.data]
        self.v: list[Tensor] = [layer[1] for layer in self.data]
        # Head and slot swapped, so that one index pair (block, offset) addresses all heads of a token.
        self._k_slots = [k.transpose(1, 2) for k in self.k]
        self._v_slots = [v.transpose(1, 2) for v in self.v]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def locate(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """(block, offset) of each slot; slots int64 [T] = block * block_size + offset. The same for every layer, so a
        step computes it once and calls write_at."""
        return slots // self.block_size, slots % self.block_size

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store k and v [T, kv_heads, head_dim] of one layer at slots int64 [T]. Padding goes to slot 0, which lies in
        the null block; other slots must differ from each other."""
        self.write_at(layer, k, v, *self.locate(slots))

    def write_at(self, layer: int, k: Tensor, v: Tensor, blocks: Tensor, offsets: Tensor) -> None:
        """As write(), at blocks and offsets int64 [T] from locate(). Values are rounded to the storage's dtype."""
        dtype = self.data.dtype
        self._k_slots[layer].index_put_((blocks, offsets), k.to(dtype))
        self._v_slots[layer].index_put_((blocks, offsets), v.to(dtype))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) in all layers, as if one after the other."""
        for run in _independent(pairs):
            index = torch.tensor(run, dtype=torch.int64, device=self.data.device)
            self.data.index_copy_(2, index[:, 1], self.data.index_select(2, index[:, 0]))


def _independent(pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Cut the pairs into runs that may be copied at once: a run reads all its sources before it writes, so within it
    no source may be an earlier target, and no target may be written twice."""
    runs: list[list[tuple[int, int]]] = []
    written: set[int] = set()
    for source, target in pairs:
        if not runs or source in written or target in written:
            runs.append([])
            written = set()
        runs[-1].append((source, target))
        written.add(target)
    return runs
