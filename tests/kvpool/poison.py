"""Memory that must not be read: a test that lets a number of it through sees NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpool.storage import KVStorage


def poison(storage: KVStorage, blocks: int | slice | Tensor = slice(1, None), layer: int | slice = slice(None)) -> None:
    """Fill blocks with NaN, or with codes whose scale is NaN."""
    for plane in (storage.keys, storage.values):
        plane.tiles[layer, blocks] = torch.nan if plane.codec is None else 255
