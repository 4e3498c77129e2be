"""Ranks that are threads of one process: a Group without torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from model.parallel import Tally

T = TypeVar("T")


class Member:
    """See `model.parallel.Group`."""

    def __init__(self, rank: int, barrier: threading.Barrier, parts: list[Tensor]) -> None:
        self.rank, self.size = rank, barrier.parties
        self.tally = Tally()
        self._barrier, self._parts = barrier, parts

    def sum(self, part: Tensor) -> Tensor:
        self.tally.sums += 1
        return part.copy_(torch.stack(self._met(part)).sum(0))

    def join(self, part: Tensor, width: int) -> Tensor:
        self.tally.joins += 1
        joined = torch.cat(self._met(part), 1)
        assert joined.shape[1] == width
        return joined if self.rank == 0 else joined[:0]

    def _met(self, part: Tensor) -> list[Tensor]:
        """Everybody's, as they were; all have come, and have them."""
        self._parts[self.rank] = part.clone()
        self._barrier.wait(30)
        parts = list(self._parts)
        assert len({p.shape[:1] for p in parts}) == 1
        self._barrier.wait(30)
        return parts


def together(size: int, rank: Callable[[Member], T]) -> list[T]:
    """What `rank` returns on each of so many ranks. Where it raises on one, the others' meetings break."""
    barrier, parts = threading.Barrier(size), [torch.empty(0)] * size

    def run(number: int) -> T:
        try:
            with torch.inference_mode():
                return rank(Member(number, barrier, parts))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, number) for number in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]
