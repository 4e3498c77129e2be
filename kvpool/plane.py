"""Plane: the keys, or the values, of all layers, as tiles in memory that KVStorage owns.

a tile of numbers   [block_size, head_dim]
a tile of codes     codes [block_size, code_bytes] | scales [block_size] float16, as bytes
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpool.codes import Codec


class Plane:
    """`tiles` [slots, blocks, kv_heads, block_size, head_dim] of a float type, or of codes uint8
    [slots, blocks, kv_heads, tile_bytes]; a slot is contiguous. A layer's tiles lie in one slot, in the blocks of its
    group (`kvpool.groups`)."""

    __slots__ = ("_codes", "_scales", "block_size", "codec", "head_dim", "layers", "tiles")

    def __init__(
        self, tiles: Tensor, block_size: int, head_dim: int, codec: Codec | None, slots: Sequence[int]
    ) -> None:
        """slots: of each layer."""
        self.tiles = tiles
        self.layers: list[Tensor] = [tiles[slot] for slot in slots]
        self.block_size = block_size
        self.head_dim = head_dim
        self.codec = codec
        codes, scales = tiles, tiles[..., :0]
        if codec is not None:
            end = block_size * codec.code_bytes(head_dim)
            codes, scales = (
                tiles[..., :end].view(*tiles.shape[:3], block_size, -1),
                tiles[..., end:].view(torch.float16),
            )
        # Head and slot swapped, so that one index pair (block, offset) addresses all heads of a token.
        self._codes = [codes[slot].transpose(1, 2) for slot in slots]
        self._scales = [scales[slot].transpose(1, 2) for slot in slots]

    def write(self, layer: int, x: Tensor, blocks: Tensor, offsets: Tensor, sink: Tensor | None = None) -> None:
        """x [T, kv_heads, head_dim] at blocks and offsets int64 [T]; `sink` [kv_heads, head_dim] of keys as codes."""
        if self.codec is None:
            codes = x.to(self.tiles.dtype)
        else:
            codes, scales = self.codec.encode(x, sink)
            self._scales[layer].index_put_((blocks, offsets), scales)
        self._codes[layer].index_put_((blocks, offsets), codes)

    def read(self, layer: int, tiles: Tensor, sink: Tensor | None = None) -> Tensor:
        """Tiles int64 [n], each block · kv_heads + head → float32 [n, block_size, head_dim]; codes of rotated vectors
        come as those. `sink` as for write()."""
        found = self.layers[layer].flatten(0, 1).flatten(1).index_select(0, tiles)
        if self.codec is None:
            return found.view(-1, self.block_size, self.head_dim).float()
        end = self.block_size * self.codec.code_bytes(self.head_dim)
        codes = found[:, :end].reshape(len(tiles), self.block_size, -1)
        scales = found[:, end:].contiguous().view(torch.float16)
        return self.codec.decode(codes, scales, None if sink is None else sink[tiles % len(sink)].unsqueeze(1))

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Blocks int64 [n] to others, in all slots."""
        self.tiles[:, targets] = self.tiles[:, sources]  # forty times faster here than index_copy_ is

    def zero(self, blocks: Tensor) -> None:
        """Blocks int64 [n], in all slots."""
        self.tiles.index_fill_(1, blocks, 0)
