"""KeyFit: what is done to keys before they become codes, and to queries, so that scores stay what they are.

    key      (k - shift) K     what all keys of a head have in common moves all scores of a query alike, which the
    query    q Q               softmax does not see; so bits are better spent on what differs.   Q Kᵀ = 1

The noise of codes grows with the length of a key, and weighs with that of a query: the error of a score is as
E|k K|² · E|q Q|². It is least where both spread alike in every direction. With the moments Σk of k - shift and Σq of q,

    Σk = L Lᵀ,   Lᵀ Σq L = V D Vᵀ:   K = L⁻ᵀ V D^¼ Rᵀ,   Q = L V D^-¼ Rᵀ

gives both the moment R D^½ Rᵀ; the rotation R then spreads it evenly over a head's places (`kvpool.rotation`). A factor
keeps volumes, so that scales stay where float16 is exact. K and Q are of a layer and head, from what a model makes of a
text when it is loaded (`model.calibration`); until then both are Rᵀ, and shift is 0. Whoever keeps codes for longer than
the process must keep the fit with them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpool.rotation import rotation

LEAST = 1e-3
"""A place's rms counts as at least so much of the head's largest."""
SHRINK = 0.1
"""How much less two places of a head are taken to have in common than the text says, which is short."""


class KeyFit:
    """`data` float32 [layers, kv_heads, 1 + 2 · head_dim, head_dim]: of each head shift, rows of K, rows of Q."""

    __slots__ = ("data", "head_dim")

    def __init__(self, num_layers: int, kv_heads: int, head_dim: int, device: torch.device | str = "cpu") -> None:
        self.head_dim = head_dim
        self.data = torch.zeros(num_layers, kv_heads, 1 + 2 * head_dim, head_dim, device=device)
        turn = rotation(head_dim, self.data.device).T
        self.data[:, :, 1:] = torch.cat([turn, turn])

    def set(self, layer: int, keys: Tensor, moments: Tensor, *, centred: bool = True) -> None:
        """keys [kv_heads, n, head_dim] of a layer; moments [kv_heads, head_dim, head_dim]: Σq, the mean of qᵀq over the
        queries that read them.

        `centred` False, shift 0: where scores are capped, moving them all is no longer nothing.
        """
        shift = keys.mean(1, keepdim=True) if centred else torch.zeros_like(keys[:, :1])
        off = (keys - shift).double()
        lower = torch.linalg.cholesky(_sound(off.mT @ off / off.shape[1]))
        values, vectors = torch.linalg.eigh(lower.mT @ _sound(moments.double()) @ lower)
        spread = values.clamp(min=1e-14 * values.amax(-1, keepdim=True)).pow(0.25).unsqueeze(1)
        volume = (spread.log() - lower.diagonal(dim1=-2, dim2=-1).log().unsqueeze(1)).mean(-1, keepdim=True)
        spread = spread / volume.exp()
        turn = rotation(self.head_dim, keys.device).T.double()
        key = torch.linalg.solve_triangular(lower.mT, vectors * spread, upper=True) @ turn
        query = lower @ (vectors / spread) @ turn
        self.data[layer] = torch.cat([shift.double(), key, query], 1)

    def layer(self, layer: int) -> Tensor:
        """[1, kv_heads, 1 + 2 · head_dim, head_dim]"""
        return self.data[layer : layer + 1]

    def key(self, layer: int, k: Tensor) -> Tensor:
        """[..., kv_heads, head_dim]"""
        data = self.data[layer]
        return torch.einsum("...hd,hde->...he", k.float() - data[:, 0], data[:, 1 : 1 + self.head_dim])

    def query(self, layer: int, q: Tensor) -> Tensor:
        """[..., kv_heads, queries, head_dim] of the queries that read each head."""
        return torch.einsum("...hnd,hde->...hne", q, self.data[layer, :, 1 + self.head_dim :])


def _sound(moments: Tensor) -> Tensor:
    """Moments as one may take them to be, seen so few vectors; positive definite."""
    own = moments.diagonal(dim1=-2, dim2=-1)
    least = LEAST**2 * own.amax(-1, keepdim=True) + 1e-30
    return (1 - SHRINK) * moments + torch.diag_embed(SHRINK * own + least)
