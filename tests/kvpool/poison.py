"""Pools as a test wants them: memory that must not be read, as NaN, and keys that are fitted somehow."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpool.fit import KeyFit
from kvpool.storage import KVStorage


def randomise(fit: KeyFit | None, seed: int = 0) -> None:
    """Any shift, balance and sink, where there are any."""
    if fit is not None:
        balance = torch.randn(fit.data[:, 0].shape, generator=torch.Generator().manual_seed(seed)).div(2).exp()
        sink = torch.randn(balance.shape, generator=torch.Generator().manual_seed(seed + 1)).div(2)
        fit.data.copy_(torch.stack([balance - 1, 1 / balance, balance, sink], 1))


def poison(storage: KVStorage, blocks: int | slice | Tensor = slice(1, None), layer: int | slice = slice(None)) -> None:
    """Fill blocks with NaN, or with codes whose scale is NaN."""
    for plane in (storage.keys, storage.values):
        plane.tiles[layer, blocks] = torch.nan if plane.codec is None else 255
