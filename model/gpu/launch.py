"""Launch: one kernel with its arguments, to be run here or compiled for a GPU that is elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in numpy (TRITON_INTERPRET=1 when triton was imported), which has no bfloat16 and no assembly."""


@dataclass(frozen=True, slots=True)
class Launch:
    """`arguments` by the names of the kernel's parameters, compile-time constants among them."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int = 4
    stages: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """What it is compiled with."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, **({} if INTERPRETED else self.options))


def dot_type(query: torch.dtype, pool: torch.dtype) -> tl.dtype:
    """What matrix units multiply: queries of `query` with numbers of `pool`, or with codes where it is uint8.

    Codes are whole numbers that bfloat16 holds exactly; its range leaves room for their scales, which float16's would
    not. Types that differ meet in float32.
    """
    if query == torch.float16 and pool == torch.float16:
        return tl.float16
    if query == torch.float32 or INTERPRETED:
        return tl.float32
    if pool == torch.uint8 or (query == torch.bfloat16 and pool == torch.bfloat16):
        return tl.bfloat16
    return tl.float32


def torch_type(dot: tl.dtype) -> torch.dtype:
    return {tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32}[dot]
