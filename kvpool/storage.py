"""KVStorage: the pool's memory. Of this room, it and what it is made of know torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvpool.codes import Codec
from kvpool.fit import KeyFit
from kvpool.formats import KVLayout
from kvpool.pages import zeroed
from kvpool.plane import Plane


class KVStorage:
    """Keys and values of all layers, in one allocation that is made here and never grows.

        data     slot 0: keys, values | slot 1: keys, values | …

    Where a block holds all layers, a slot is a layer; else layers of several groups lie in one, each in blocks of its
    own (`kvpool.groups`). `keys` and `values` are views of it (`kvpool.plane`), and `k[layer]` and `v[layer]` those of
    one layer: contiguous [blocks, kv_heads, …], one (block, head) is one contiguous tile. Everything starts as zeros,
    so that a masked read of a slot that was never written is finite, and is backed by memory from the start or soon
    after (`kvpool.pages`), not under load.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device | str = "cpu") -> None:
        """`num_blocks` includes the null block 0. Raises what torch raises where the memory cannot be had."""
        form, size, dim = layout.format, layout.block_size, layout.head_dim
        nbytes = num_blocks * layout.block_bytes
        on_cpu = torch.device(device).type == "cpu"
        memory = zeroed(nbytes) if on_cpu else torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.block_size, self.num_blocks = size, num_blocks
        self.groups = groups = layout.groups
        self.places = torch.tensor([groups.slots, groups.of]).T.contiguous()
        """int64 [layers, 2] on the host: slot and group of each layer."""
        shape = (num_blocks, layout.kv_heads)
        key_tile, value_tile = layout.tile_bytes(form.key_bits), layout.tile_bytes(form.value_bits)
        split = num_blocks * layout.kv_heads * key_tile
        self.data = memory.view(groups.size, -1)
        self.fit: KeyFit | None = None
        """Of keys as codes."""
        keys = self.data[:, :split].view(groups.size, *shape, key_tile)
        values = self.data[:, split:].view(groups.size, *shape, value_tile)
        if form.scale_bytes:
            self.keys = Plane(keys, size, dim, Codec(form.key_bits, unbiased=True), groups.slots)
            self.values = Plane(values, size, dim, Codec(form.value_bits, unbiased=False), groups.slots)
            self.fit = KeyFit(layout.num_layers, layout.kv_heads, dim, device)
        else:
            dtype: torch.dtype = getattr(torch, form.name)
            self.data = memory.view(dtype).view(groups.size, 2, *shape, size, dim)
            self.keys = Plane(self.data[:, 0], size, dim, None, groups.slots)
            self.values = Plane(self.data[:, 1], size, dim, None, groups.slots)
        self.k, self.v = self.keys.layers, self.values.layers
        parts = (*self.keys.tiles, *self.values.tiles)
        self._parts = [slot.flatten(1).view(torch.uint8) for slot in parts]
        """The keys of each slot, then the values, as bytes [blocks, n]: together what a block holds."""

    @property
    def block_bytes(self) -> int:
        return sum(part.shape[1] for part in self._parts)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def locate(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """(block, offset) of each slot; slots int64 [T] = block * block_size + offset. The same for all layers of a
        group, so a step computes it once and calls write_at."""
        return slots // self.block_size, slots % self.block_size

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store k and v [T, kv_heads, head_dim] of one layer at slots int64 [T]. Padding goes to slot 0, which lies in
        the null block; other slots must differ from each other."""
        self.write_at(layer, k, v, *self.locate(slots))

    def write_at(self, layer: int, k: Tensor, v: Tensor, blocks: Tensor, offsets: Tensor) -> None:
        """As write(), at blocks and offsets int64 [T] from locate(). Values are rounded, or made codes of, as the
        format has it."""
        if self.fit is None:
            self.keys.write(layer, k, blocks, offsets)
        else:
            self.keys.write(layer, self.fit.key(layer, k), blocks, offsets, self.fit.sink(layer))
        self.values.write(layer, v, blocks, offsets)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target), as if one after the other."""
        for run in _independent(pairs):
            sources, targets = torch.tensor(run, dtype=torch.int64, device=self.data.device).T
            for plane in (self.keys, self.values):
                plane.copy(sources, targets)

    def gather(self, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        """The content of whole blocks, as a copy on the host, [n, block_bytes]."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.data.device)
        content: npt.NDArray[np.uint8] = (
            torch.cat([part.index_select(0, index) for part in self._parts], 1).cpu().numpy()
        )
        return content

    def scatter(self, blocks: Sequence[int], content: npt.NDArray[np.uint8]) -> None:
        """Write what gather() gave, perhaps of other blocks or of another process, to whole blocks, no two the same."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.data.device)
        rows = torch.from_numpy(content).to(self.data.device)
        begin = 0
        for part in self._parts:
            end = begin + part.shape[1]
            part.index_copy_(0, index, rows[:, begin:end])
            begin = end

    def zero(self, blocks: Tensor) -> None:
        """Zero whole blocks int64 [n]."""
        for plane in (self.keys, self.values):
            plane.zero(blocks)


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
