"""KeyFit: what is done to keys before they become codes, and to queries, so that scores stay what they are.

    key      (k - shift) / balance     what all keys of a head have in common moves all scores of a query alike, which
    query    q · balance               the softmax does not see; so bits are better spent on what differs

The rotation spreads the noise of codes evenly over a head's places, and at each it weighs q². It is least where key and
query are alike in size: balance = √(rms of k - shift / rms of q). Both are of a layer and head, from what a model makes
of a text when it is loaded (`model.calibration`); shift 0 and balance 1 until then. Whoever keeps codes for longer than
the process must keep the fit with them.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 1e-3
"""A place's rms counts as at least so much of the head's largest."""


class KeyFit:
    """`data` float32 [layers, 3, kv_heads, head_dim]: shift, 1 / balance, balance."""

    __slots__ = ("data",)

    def __init__(self, num_layers: int, kv_heads: int, head_dim: int, device: torch.device | str = "cpu") -> None:
        self.data = torch.zeros(num_layers, 3, kv_heads, head_dim, device=device)
        self.data[:, 1:] = 1.0

    def set(self, layer: int, keys: Tensor, squares: Tensor, *, centred: bool = True) -> None:
        """keys [kv_heads, n, head_dim] of a layer; squares [kv_heads, head_dim]: mean of q² over their queries.

        `centred` False, shift 0: where scores are capped, moving them all is no longer nothing.
        """
        shift = keys.mean(1) if centred else torch.zeros_like(keys[:, 0])
        key, query = (keys - shift.unsqueeze(1)).square().mean(1).sqrt(), squares.sqrt()
        key, query = (x.clamp(min=(LEAST * x.amax(-1, keepdim=True)).clamp(min=1e-30)) for x in (key, query))
        balance = (key / query).sqrt()
        balance = balance / balance.log().mean(-1, keepdim=True).exp()
        self.data[layer] = torch.stack([shift, 1.0 / balance, balance])

    def layer(self, layer: int) -> Tensor:
        """[1, 3, kv_heads, head_dim]"""
        return self.data[layer : layer + 1]

    def key(self, layer: int, k: Tensor) -> Tensor:
        """[..., kv_heads, head_dim]"""
        shift, inverse, _ = self.data[layer]
        fitted: Tensor = (k.float() - shift) * inverse
        return fitted

    def query(self, layer: int, q: Tensor) -> Tensor:
        """[..., kv_heads, queries, head_dim] of the queries that read each head."""
        return q * self.data[layer, 2].unsqueeze(1)
