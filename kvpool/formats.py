"""KV formats: how one key or value vector is stored, and what that makes a token and a block cost. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.groups import LayerGroups, Paging, Windows

BLOCK_SIZES = (16, 32, 64)
"""Token slots per block that `--block-size` allows: 16 is the least that Triton's dot takes."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """One way to store a vector of head_dim values: packed codes, and beside them a scale for the whole vector.

    Plain floating point has no scale, and the name of torch's type. How codes are made: `kvpool.codes`.
    """

    name: str
    key_bits: int
    """Per value."""
    value_bits: int
    scale_bytes: int = 0
    """Per vector."""

    @property
    def head_multiple(self) -> int:
        """A head's size must be a multiple of it: halves of 4-bit codes fill whole vectors of the kernels."""
        return 16 if min(self.key_bits, self.value_bits) < 8 else 1

    def vector_bytes(self, head_dim: int) -> int:
        """Bytes of one key and one value vector together."""
        return (self.key_bits + self.value_bits) * head_dim // 8 + 2 * self.scale_bytes


FORMATS = {
    form.name: form
    for form in (
        KVFormat("float32", 32, 32),
        KVFormat("bfloat16", 16, 16),
        KVFormat("float16", 16, 16),
        KVFormat("int8", 8, 8, 2),
        KVFormat("k8v4", 8, 4, 2),
        KVFormat("tq4", 4, 4, 2),
    )
}
"""By the name that `--kv-cache-dtype` has for it."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The pool of one model. Per layer K and V each are [blocks, kv_heads] tiles of block_size vectors."""

    num_layers: int
    kv_heads: int
    head_dim: int
    format: KVFormat
    block_size: int = 16
    windows: Windows = ()
    """Of all layers, where those of one window share pages (`kvpool.groups`); empty: a block holds all layers."""

    @property
    def groups(self) -> LayerGroups:
        return LayerGroups.by(self.windows or (None,) * self.num_layers)

    @property
    def paging(self) -> Paging:
        return Paging(self.block_size, self.groups.windows)

    @property
    def bytes_per_token(self) -> int:
        """2 x layers x kv_heads x head_dim x bytes per value, and the scales, where the format has them."""
        return self.num_layers * self.kv_heads * self.format.vector_bytes(self.head_dim)

    @property
    def block_bytes(self) -> int:
        """block_size tokens in every layer of a group."""
        return self.block_size * self.groups.size * self.kv_heads * self.format.vector_bytes(self.head_dim)

    def tile_bytes(self, bits: int) -> int:
        """The keys (or values) of one block and head, with so many bits per value."""
        return self.block_size * (self.head_dim * bits // 8 + self.format.scale_bytes)

    def blocks_for(self, num_tokens: int, chunk: int = 1) -> int:
        """Blocks that one sequence of so many tokens takes, whose steps compute up to `chunk` of them."""
        return self.paging.pages(num_tokens, chunk)
