"""Drawn: tokens that the device drew and keeps, so that a step may go on from them before the host knows them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model.inputs import to_device


class Drawn:
    """`tokens` int64 [n] on the device, on their way to the host; `places`: which of a step's draws are there, and
    where."""

    __slots__ = ("_arrived", "_host", "places", "tokens")

    def __init__(self, tokens: Tensor, draws: Sequence[int]) -> None:
        """draws [n]: what number each has among the step's draws."""
        self.tokens = self._host = tokens
        self.places = {draw: place for place, draw in enumerate(draws)}
        self._arrived: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> dict[int, int]:
        """The token of each draw that is here. Waits for these, and for nothing that was launched later."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return dict(zip(self.places, self._host.tolist(), strict=True))

    def take(self, draws: Sequence[int]) -> Tensor:
        """The tokens of these draws, int64 [len(draws)] on the device, without waiting for it; all of them are here.

        A draw that failed has no token, and its row will end: what it would go on from is 0, for an embedding has no
        row -1, and a GPU that looks for it is lost to the process.
        """
        places = to_device(np.array([self.places[draw] for draw in draws], np.int64), self.tokens.device)
        return self.tokens.index_select(0, places).clamp_min_(0)
