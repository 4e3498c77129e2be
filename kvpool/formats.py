"""KV formats: how one key or value vector is stored, and what that makes a token and a block cost. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_SIZES = (16, 32, 64)
"""Token slots per block that `--block-size` allows: 16 is the least that Triton's dot takes."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """One way to store a vector of head_dim values: packed codes, and beside them a scale for the whole vector.

    Plain floating point has no scale. A quantised format (int8: 8, 8, 2; k8v4: 8, 4, 2; tq4: 4, 4, 2) is one more
    entry of FORMATS, and its encoding in `kvpool.storage`.
    """

    name: str
    key_bits: int
    """Per value."""
    value_bits: int
    scale_bytes: int = 0
    """Per vector."""

    def vector_bytes(self, head_dim: int) -> int:
        """Bytes of one key and one value vector together."""
        return (self.key_bits + self.value_bits) * head_dim // 8 + 2 * self.scale_bytes


FORMATS = {f.name: f for f in (KVFormat("float32", 32, 32), KVFormat("bfloat16", 16, 16), KVFormat("float16", 16, 16))}
"""By the name that `--kv-cache-dtype` has for it."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The pool of one model. Per layer K and V each are [blocks, kv_heads, block_size, head_dim]."""

    num_layers: int
    kv_heads: int
    head_dim: int
    format: KVFormat
    block_size: int = 16

    @property
    def bytes_per_token(self) -> int:
        """2 x layers x kv_heads x head_dim x bytes per value, and the scales, where the format has them."""
        return self.num_layers * self.kv_heads * self.format.vector_bytes(self.head_dim)

    @property
    def block_bytes(self) -> int:
        """One row of blocks: block_size tokens in every layer."""
        return self.block_size * self.bytes_per_token

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that one sequence of so many tokens takes."""
        return -(-num_tokens // self.block_size)

    def shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        """Of K, and of V, in one layer."""
        return (num_blocks, self.kv_heads, self.block_size, self.head_dim)
