"""Packed matrices against float64, whatever the shape; and the same numbers for a row alone and among others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.batch import BAD_LOGITS
from model.kernels.loaded import Kernels
from model.linear import KernelLinear

KINDS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def case(rows: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + 100 * outputs + inputs)
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    return x, weight, torch.randn(outputs, generator=generator)


SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 90), st.integers(1, 150))


@pytest.mark.parametrize("kind", KINDS)
def test_float_weights_of_any_shape(kernels: Kernels, kind: str) -> None:
    @settings(max_examples=30, deadline=None)
    @given(SHAPES, st.booleans(), st.booleans())
    def check(shape: tuple[int, int, int], biased: bool, gated: bool) -> None:
        rows, outputs, inputs = shape
        x, weight, bias = case(rows, outputs * (2 if gated else 1), inputs)
        linear = KernelLinear(weight, bias if biased else None, kind, kernels, gated)
        if kind == "bfloat16" and kernels.isa in ("avx512bf16", "emulated"):
            x = x.bfloat16().float()  # the processor multiplies bfloat16 by bfloat16
        exact = x.double() @ weight.to(KINDS[kind]).double().t() + (bias.double() if biased else 0)
        torch.testing.assert_close(linear(x).double(), exact, rtol=1e-5, atol=1e-5)

    check()


def test_int8_is_within_its_rounding(kernels: Kernels) -> None:
    """Weights are off by half a step each, activations by half of theirs; a step is 1/127 of the largest at most."""

    @settings(max_examples=30, deadline=None)
    @given(SHAPES, st.booleans())
    def check(shape: tuple[int, int, int], gated: bool) -> None:
        rows, outputs, inputs = shape
        x, weight, bias = case(rows, outputs * (2 if gated else 1), inputs)
        out = KernelLinear(weight, bias, "int8", kernels, gated)(x).double()
        exact = x.double() @ weight.double().t() + bias.double()
        step_x, step_w = x.abs().amax(1, True).double() / 127, weight.abs().amax(1).double() / 127
        size_x, size_w = x.abs().sum(1, True).double(), weight.abs().sum(1).double()
        bound = 0.5 * (step_x * size_w + step_w * size_x + inputs * step_x * step_w) + 1e-4
        assert ((out - exact).abs() <= bound).all()

    check()


@pytest.mark.parametrize("kind", [*KINDS, "int8"])
def test_a_row_is_the_same_alone_and_among_others(kernels: Kernels, kind: str) -> None:
    x, weight, bias = case(65, 200, 130)
    linear = KernelLinear(weight, bias, kind, kernels)
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in (2, 3, 5, 6, 7, 12, 13, 32, 65):
        assert torch.equal(linear(x[:rows]), alone[:rows]), rows


def test_broken_rows_stay_broken_and_break_no_other(kernels: Kernels) -> None:
    x, weight, bias = case(4, 50, 40)
    x[1, 3], x[2, 39] = torch.nan, torch.inf
    for kind in (*KINDS, "int8"):
        out = KernelLinear(weight, bias, kind, kernels)(x)
        assert out[[0, 3]].isfinite().all()
        assert not out[[1, 2]].isfinite().any()


@pytest.mark.parametrize("kind", [*KINDS, "int8"])
def test_the_likeliest_output_is_the_first_of_the_largest(kernels: Kernels, kind: str) -> None:
    @settings(max_examples=30, deadline=None)
    @given(SHAPES, st.booleans(), st.sampled_from([0.0, 10.0, torch.nan, torch.inf, -torch.inf]), st.data())
    def check(shape: tuple[int, int, int], biased: bool, added: float, data: st.DataObject) -> None:
        rows, outputs, inputs = shape
        x, weight, bias = case(rows, outputs, inputs)
        same = data.draw(st.lists(st.integers(0, outputs - 1), min_size=outputs, max_size=outputs))
        weight, bias = weight[same], bias[same]  # some outputs are equal
        bias[data.draw(st.integers(0, outputs - 1))] += added
        linear = KernelLinear(weight, bias if biased else None, kind, kernels)
        logits = linear(x)
        expected = torch.where(logits.amax(1).isfinite(), torch.from_numpy(logits.numpy().argmax(1)), BAD_LOGITS)
        assert torch.equal(linear.likeliest(x), expected)

    check()


def test_broken_rows_have_no_likeliest_output(kernels: Kernels) -> None:
    x, weight, bias = case(4, 50, 40)
    x[1, 3], x[2, 39] = torch.nan, torch.inf
    for kind in (*KINDS, "int8"):
        linear = KernelLinear(weight, bias, kind, kernels)
        assert (linear.likeliest(x) == BAD_LOGITS).tolist() == [False, True, True, False]
        linear = KernelLinear(weight, torch.full_like(bias, -torch.inf), kind, kernels)
        assert (linear.likeliest(x) == BAD_LOGITS).all()


def test_zeros_and_sizes(kernels: Kernels) -> None:
    x, weight, bias = case(3, 70, 64)
    weight[5] = 0
    for kind in (*KINDS, "int8"):
        linear = KernelLinear(weight, bias, kind, kernels)
        torch.testing.assert_close(linear(torch.zeros(2, 64)), bias.expand(2, -1))
        assert torch.equal(linear(x)[:, 5], bias[5].expand(3))
        assert linear(x[:0]).shape == (0, 70)
        assert linear.likeliest(x[:0]).shape == (0,)
    bytes_of = {kind: KernelLinear(weight, None, kind, kernels).nbytes for kind in (*KINDS, "int8")}
    assert bytes_of["float32"] == 2 * bytes_of["bfloat16"] == 2 * bytes_of["float16"]
    assert bytes_of["int8"] < 0.6 * bytes_of["bfloat16"]


def test_mistakes_are_errors_not_crashes(kernels: Kernels) -> None:
    x, weight, bias = case(3, 70, 64)
    with pytest.raises(RuntimeError, match="unknown kind int3"):
        KernelLinear(weight, bias, "int3", kernels)
    with pytest.raises(RuntimeError, match="bias must have the shape"):
        KernelLinear(weight, bias[1:], "float32", kernels)
    with pytest.raises(RuntimeError, match="x must have the shape"):
        KernelLinear(weight, bias, "float32", kernels)(x[:, 1:])
    with pytest.raises(RuntimeError, match="a gated matrix has no likeliest output"):
        KernelLinear(weight, bias, "float32", kernels, gated=True).likeliest(x)
