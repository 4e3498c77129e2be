"""The ranks of a split model, as each of them sees the others: parts are added up, and joined on rank 0.

        x ──▶ q k v ── attention ── o ──┐            ┌── gate up ── down ──┐
        x ──▶ q k v ── attention ── o ──┴ sum ─▶ x ──┴── gate up ── down ──┴ sum ─▶ x        head ──┬ join ─▶ logits
        each rank its heads                            its channels                         its tokens

A model that is not split has no Group, and pays for none. Collectives must meet: every rank makes the same ones in the
same order. Where a step fails on one of them, it makes the rest with zeros (`Decoder.abstain`), for which the Tally
says how far it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

LOOPBACK = "lo"
"""The only network that ranks talk over: they are all on one machine."""


@dataclass(slots=True)
class Tally:
    """Collectives that a step has made."""

    sums: int = 0
    joins: int = 0


class Group(Protocol):
    """What a split decoder needs of the other ranks. One thread uses it."""

    rank: int
    size: int
    tally: Tally
    """Of the step under way; whoever begins another puts a new one here."""

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, of one shape and type, in place; to the last bit the same on all of them."""
        ...

    def join(self, part: Tensor, width: int) -> Tensor:
        """Logits [rows, own tokens] → [rows, width] on rank 0, which alone draws; [0, width] on the others."""
        ...


class Ranks:
    """Group over torch.distributed: NCCL between GPUs, Gloo between CPUs."""

    def __init__(self, rank: int, size: int, store: str, lost: Callable[[Exception], NoReturn]) -> None:
        """`store`: a file that all ranks can open, in which they find each other. `lost` is called where another rank
        does not answer any more; it does not return."""
        self.rank, self.size = rank, size
        self.tally = Tally()
        self._store = store
        self._lost = lost
        self._device = torch.device("cpu")

    def connect(self, device: torch.device) -> None:
        """Wait for the others, all of which call this. `device`: where this one computes."""
        self._device = device
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
        gpu = device.type == "cuda"
        with self._meeting():
            dist.init_process_group(
                "nccl" if gpu else "gloo",
                store=dist.FileStore(self._store, self.size),  # type: ignore[attr-defined]
                rank=self.rank,
                world_size=self.size,
                device_id=device if gpu else None,
            )

    def sum(self, part: Tensor) -> Tensor:
        self.tally.sums += 1
        with self._meeting():
            dist.all_reduce(part)
        return part

    def join(self, part: Tensor, width: int) -> Tensor:
        self.tally.joins += 1
        rows, most = part.shape[0], -(-width // self.size)
        part = pad(part, (0, most - part.shape[1])) if part.shape[1] < most else part.contiguous()
        with self._meeting():
            if self.rank:
                dist.gather(part, dst=0)
                return part.new_empty(0, width)
            parts = [torch.empty_like(part) for _ in range(self.size)]
            dist.gather(part, parts, dst=0)
        return torch.cat(parts, 1)[:, :width].contiguous() if rows else part.new_empty(0, width)

    def least(self, value: int) -> int:
        """Of all ranks' values, 64 bits each. So they decide alike: on sizes, and with 0 and 1 on whether to go on."""
        box = torch.tensor(value, dtype=torch.int64, device=self._device)
        with self._meeting():
            dist.all_reduce(box, dist.ReduceOp.MIN)
        return int(box)

    def leading(self, values: list[float]) -> list[float]:
        """Rank 0's; all give as many."""
        box = torch.tensor(values, dtype=torch.float64, device=self._device)
        with self._meeting():
            dist.broadcast(box, 0)
        found: list[float] = box.tolist()
        return found

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._lost(error)
