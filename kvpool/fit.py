"""KeyFit: what is done to keys before they become codes, and to queries, so that scores stay what they are.

    key      (k - shift) / balance     what all keys of a head have in common moves all scores of a query alike, which
    query    q · balance               the softmax does not see; so bits are better spent on what differs

The rotation spreads the noise of codes evenly over a head's places, and at each it weighs q². It is least where key and
query are alike in size: balance = √(rms of k - shift / rms of q).

A sequence's first token draws to itself what attention is left over (Xiao et al., "Efficient Streaming Language Models
with Attention Sinks", ICLR 2024). Its key is several times longer than others, hence its noise too; and it is nearly
the same whatever the token. So there is a second centre, the `sink`: of keys that lie nearer to it than to zero, the
codes say what is left, and the sign of the scale that it is so (`Codec`). On the demo model this halves what 4-bit keys
cost.

All of it is of a layer and head, from what a model makes of a text when it is loaded (`model.calibration`); shift and
sink are 0 and balance 1 until then. Whoever keeps codes for longer than the process must keep the fit with them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpool.rotation import rotation

LEAST = 1e-3
"""A place's rms counts as at least so much of the head's largest."""


class KeyFit:
    """`data` float32 [layers, 4, kv_heads, head_dim]: shift, 1 / balance, balance, and the sink, rotated as codes
    are."""

    __slots__ = ("data",)

    def __init__(self, num_layers: int, kv_heads: int, head_dim: int, device: torch.device | str = "cpu") -> None:
        self.data = torch.zeros(num_layers, 4, kv_heads, head_dim, device=device)
        self.data[:, 1:3] = 1.0

    def set(self, layer: int, keys: Tensor, squares: Tensor, firsts: Tensor, *, centred: bool = True) -> None:
        """keys [kv_heads, n, head_dim] of a layer; squares [kv_heads, head_dim]: mean of q² over their queries; firsts
        [kv_heads, m, head_dim]: keys of first tokens.

        `centred` False, shift 0: where scores are capped, moving them all is no longer nothing.
        """
        shift = keys.mean(1) if centred else torch.zeros_like(keys[:, 0])
        key, query = (keys - shift.unsqueeze(1)).square().mean(1).sqrt(), squares.sqrt()
        key, query = (x.clamp(min=(LEAST * x.amax(-1, keepdim=True)).clamp(min=1e-30)) for x in (key, query))
        balance = (key / query).sqrt()
        balance = balance / balance.log().mean(-1, keepdim=True).exp()
        sink = (firsts.mean(1) - shift) / balance @ rotation(keys.shape[-1], keys.device).T
        self.data[layer] = torch.stack([shift, 1.0 / balance, balance, sink])

    def layer(self, layer: int) -> Tensor:
        """[1, 4, kv_heads, head_dim]"""
        return self.data[layer : layer + 1]

    def key(self, layer: int, k: Tensor) -> Tensor:
        """[..., kv_heads, head_dim]"""
        shift, inverse, _, _ = self.data[layer]
        fitted: Tensor = (k.float() - shift) * inverse
        return fitted

    def sink(self, layer: int) -> Tensor:
        """[kv_heads, head_dim], among rotated keys."""
        return self.data[layer, 3]

    def query(self, layer: int, q: Tensor) -> Tensor:
        """[..., kv_heads, queries, head_dim] of the queries that read each head."""
        return q * self.data[layer, 2].unsqueeze(1)
