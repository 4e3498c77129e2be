"""The rotation before 4-bit codes: it spreads what stands out in a vector over all of its values.

    R = H · diag(s) / √b       s: fixed signs; H: Sylvester's Hadamard matrix of b, the largest power of two in head_dim

R is orthogonal: ⟨Rq, Rk⟩ = ⟨q, k⟩, and a weighted sum of rotated values is the rotated sum. So keys and values stay
rotated in the pool, each query is rotated once and each result back. Without the signs a mean would become one large
value. The kernels have the same matrix (`model/kernels/codes.h`).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

SIGNS = 0x243F6A88_85A308D3_13198A2E_03707344_A4093822_299F31D0_082EFA98_EC4E6C89
"""s, the first bit for the first value, again every 256 values: the fraction of π, which nobody has chosen."""


@cache
def rotation(head_dim: int, device: torch.device) -> Tensor:
    """R, float32 [head_dim, head_dim]; `x @ R.T` rotates rows, `y @ R` turns them back."""
    size = head_dim & -head_dim
    hadamard = torch.ones(1, 1)
    while len(hadamard) < size:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = torch.tensor([1.0 - 2.0 * (SIGNS >> (255 - i % 256) & 1) for i in range(head_dim)])
    blocks: Tensor = torch.kron(torch.eye(head_dim // size), hadamard / size**0.5)
    return (blocks * signs).to(device)
