"""Codes of 8 and 4 bits for key and value vectors, in torch: the oracle of the kernels, and what runs without them.

    8 bits   integers -127 … 127, to nearest, ties to even; scale: the largest magnitude / 127
    4 bits   scaled to unit variance: sign and index of the nearest of eight levels, those of Lloyd and Max
             for a Gaussian in whole numbers of 1 / SPREAD; so a nibble is a small integer too, by a table

Keys, and 4-bit values, are rotated first. The scale is float16, one for a vector. Of a 4-bit key it makes
⟨x, x̂⟩ = ‖x‖², so that scores are right in the mean; of a 4-bit value it makes ‖x - x̂‖ least. A vector with a
number that is not finite gets the scale NaN. A scale below zero says that its vector, the scale taken without its sign,
is what a key has beside the sink (`kvpool.fit`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpool.rotation import rotation

LEVELS = (6, 18, 31, 44, 58, 75, 96, 127)
SPREAD = 46.47
LARGEST, LEAST = 65504.0, 2.0**-24
"""Of float16; the least above zero."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How the vectors of keys, or of values, become codes."""

    bits: int
    unbiased: bool
    """The vectors are keys."""

    @property
    def rotated(self) -> bool:
        """Whether codes are of the rotated vector, which has nothing that stands out."""
        return self.bits == 4 or self.unbiased

    def code_bytes(self, head_dim: int) -> int:
        return head_dim * self.bits // 8

    def encode(self, x: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[..., head_dim] → codes uint8 [..., code_bytes], scales float16 [...]. `sink`, rotated, broadcasts to
        x."""
        x = x.float()
        if self.rotated:
            x = x @ rotation(x.shape[-1], x.device).T
        sinks = torch.zeros_like(x[..., 0], dtype=torch.bool)
        if sink is not None:
            left = x - sink
            sinks = left.square().sum(-1) < x.square().sum(-1)
            x = torch.where(sinks.unsqueeze(-1), left, x)
        codes, scale = self._nibbles(x) if self.bits == 4 else self._bytes(x)
        return codes, torch.where(sinks, -scale.clamp(min=LEAST), scale).half()

    def decode(self, codes: Tensor, scales: Tensor, sink: Tensor | None = None) -> Tensor:
        """What encode() made → float32 [..., head_dim], rotated where this codec rotates."""
        if sink is not None:
            left = self.decode(codes, scales.abs())
            return torch.where((scales < 0).unsqueeze(-1), left + sink, left)
        if self.bits == 4:
            levels = torch.tensor(LEVELS, dtype=torch.float32, device=codes.device)
            values = torch.cat([levels, -levels])[torch.cat([codes & 15, codes >> 4], -1).long()]
        else:
            values = codes.view(torch.int8).float()
        return values * scales.float().unsqueeze(-1)

    def _bytes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = ((x.abs().amax(-1) / 127).clamp(max=LARGEST) + _broken(x)).half()
        codes = (x / scale.float().unsqueeze(-1)).round().clamp(-127, 127)
        return codes.nan_to_num(0.0).to(torch.int8).view(torch.uint8), scale

    def _nibbles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        dim = x.shape[-1]
        square = x.square().sum(-1)
        spread = x * (SPREAD * dim**0.5 / square.sqrt()).unsqueeze(-1)
        levels = torch.tensor(LEVELS, dtype=torch.float32, device=x.device)
        index = torch.bucketize(spread.abs(), (levels[1:] + levels[:-1]) / 2)
        values = levels[index].where(spread >= 0, -levels[index])
        dot = (x * values).sum(-1)
        scale = square / dot if self.unbiased else dot / values.square().sum(-1)
        nibbles = (index | (spread < 0) << 3).to(torch.uint8)
        codes = nibbles[..., : dim // 2] | nibbles[..., dim // 2 :] << 4
        return codes, scale.where(square != 0, 0.0).clamp(max=LARGEST) + _broken(x)


def _broken(x: Tensor) -> Tensor:
    """0 for a vector of finite numbers, else NaN."""
    return (x - x).sum(-1)
