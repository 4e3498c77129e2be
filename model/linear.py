"""Matrix multiplications: the kinds there are, and which one a weight gets.

| device | stored   | kernels | the CPU has it | kind                                                            |
|--------|----------|---------|----------------|-----------------------------------------------------------------|
| cpu    | any      | yes     |                | packed for our kernels, original dropped                        |
| cpu    | float32  | no      | yes            | packed by oneDNN, original dropped                              |
| cpu    | bfloat16 | no      | AVX-512, AMX   | packed by oneDNN, original dropped                              |
| cpu    | 16 bits  | no      | no             | tiles widened to float32 for each call; no float32 copy is kept |
| cuda   | any      |         |                | dense                                                           |
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from model.kernels.loaded import Kernels
from model.precision import Precision

log = logging.getLogger("octavo.kernels")
TILE_ELEMENTS = 1 << 20
"""Size of a widened tile: 4 MiB of float32, which a core's share of the cache can hold."""
PACK_ROWS = 64
"""Rows of activations that packing is tuned for; such a weight serves every other number well."""


class Linear(Protocol):
    """y = x · Wᵀ + b for x [rows, in_features] → [rows, out_features], in the type of x."""

    nbytes: int
    """Bytes of memory the weight and bias take."""

    def __call__(self, x: Tensor) -> Tensor: ...


class DenseLinear:
    """The plain kind: one contiguous weight [out_features, in_features]."""

    __slots__ = ("bias", "nbytes", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class PackedLinear:
    """Weight reordered once for oneDNN's kernels; at eight rows and more about half as fast again as the plain kind."""

    __slots__ = ("bias", "nbytes", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        self.bias = bias
        self.nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out

    @staticmethod
    def available() -> bool:
        """Whether this build of torch has the operators."""
        return hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class WideningLinear:
    """16-bit weight, float32 arithmetic: tiles of rows are widened one after the other and thrown away."""

    __slots__ = ("bias", "nbytes", "tile", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias.float() if bias is not None else None
        self.tile = max(64, TILE_ELEMENTS // weight.shape[1])
        self.nbytes = weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], self.weight.shape[0], dtype=torch.float32, device=x.device)
        wide = x.float()
        for begin in range(0, self.weight.shape[0], self.tile):
            tile = self.weight[begin : begin + self.tile]
            torch.mm(wide, tile.float().t(), out=out[:, begin : begin + self.tile])
        if self.bias is not None:
            out += self.bias
        return out


class KernelLinear:
    """Weight packed for our own kernels, in its type, as int8 with one scale an output, or as int4 in groups of 32
    inputs; float32 in and out."""

    __slots__ = ("matrix", "nbytes", "shape")

    def __init__(self, weight: Tensor, bias: Tensor | None, kind: str, kernels: Kernels, gated: bool = False) -> None:
        """`kind`: float32, float16, bfloat16, int8 or int4. `gated`: the rows are gates, then as many ups."""
        self.matrix = kernels.classes.Matrix(weight, bias.float() if bias is not None else None, kind, gated)
        self.nbytes: int = self.matrix.nbytes()
        self.shape = (kind, gated, *weight.shape)
        """What its register tiles depend on."""

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.matrix.multiply(x.float().contiguous())
        return out

    def likeliest(self, x: Tensor) -> Tensor:
        """x [rows, in_features] → int64 [rows]: see `Head.likeliest`."""
        found: Tensor = self.matrix.likeliest(x.float().contiguous())
        return found


def make_linear(weight: Tensor, bias: Tensor | None, precision: Precision, *, gated: bool = False) -> Linear:
    """The fastest kind for a weight [out_features, in_features] that lies on its device in any float type.

    The caller must drop its own reference to the weight: packing makes a copy.
    """
    weight = weight.to(precision.weights).contiguous()
    if precision.kernels is not None:
        return KernelLinear(weight, bias, precision.stored, precision.kernels, gated)
    if weight.device.type != "cpu":
        return DenseLinear(weight, bias.to(precision.compute) if bias is not None else None)
    if precision.compute != precision.weights:
        return WideningLinear(weight, bias)
    bias = bias.to(precision.compute) if bias is not None else None
    return PackedLinear(weight, bias) if PackedLinear.available() else DenseLinear(weight, bias)


def measure_tiles(linears: Iterable[Linear]) -> None:
    """Measure, once for each shape that our own kernels multiply, which register tiles are quickest for how many rows.

    It takes some 20 ms a shape. No result depends on it.
    """
    found: dict[tuple[object, ...], list[int]] = {}
    for linear in linears:
        if not isinstance(linear, KernelLinear):
            continue
        if linear.shape in found:
            linear.matrix.set_tiles(found[linear.shape])
        else:
            found[linear.shape] = linear.matrix.measure()
            log.debug("register tiles of %s: %s panels wide", linear.shape, found[linear.shape])


class Head:
    """The LM head: logits [rows, vocab] in float32, accumulated in float32 whatever the weight's type.

    16-bit logits would turn near-ties into ties and change greedy text.
    """

    __slots__ = ("linear", "nbytes")

    def __init__(self, weight: Tensor, bias: Tensor | None, precision: Precision) -> None:
        """`weight` [vocab, hidden]. A table of `precision.weights` in 16 bits is used where it lies, not copied."""
        self.linear: Linear
        if precision.weights == torch.float32 or precision.kernels is not None:
            self.linear = make_linear(weight, bias, precision.head)
        elif weight.device.type == "cuda":
            self.linear = _CudaHead(weight.to(precision.weights), bias)
        else:
            self.linear = WideningLinear(weight.to(precision.weights), bias)
        self.nbytes = self.linear.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def likeliest(self, x: Tensor) -> Tensor | None:
        """The first id with the largest logit of each row, int64 [rows], found while they are computed: none is written
        to memory and read again. BAD_LOGITS where they are not finite. None where only our kernels could do it."""
        return self.linear.likeliest(x) if isinstance(self.linear, KernelLinear) else None


class _CudaHead:
    """16-bit operands, float32 out of the tensor cores' accumulators."""

    __slots__ = ("bias", "nbytes", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias.float() if bias is not None else None
        self.nbytes = weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return out if self.bias is None else out.add_(self.bias)
