"""Packed matrices against float64, whatever the shape; and the same numbers for a row alone and among others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.batch import BAD_LOGITS
from model.kernels.loaded import Kernels
from model.linear import DenseLinear, KernelLinear, measure_tiles

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


GROUP = 32


def test_int4_is_within_its_rounding(kernels: Kernels) -> None:
    """A group of 32 weights is off by no more, in squares, than if each were off by half a step."""

    @settings(max_examples=30, deadline=None)
    @given(SHAPES, st.booleans())
    def check(shape: tuple[int, int, int], gated: bool) -> None:
        rows, outputs, inputs = shape
        x, weight, bias = case(rows, outputs * (2 if gated else 1), inputs)
        out = KernelLinear(weight, bias, "int4", kernels, gated)(x).double()
        exact = x.double() @ weight.double().t() + bias.double()
        bound = torch.full_like(exact, 1e-3)
        for begin in range(0, inputs, GROUP):
            part, given = weight[:, begin : begin + GROUP].double(), x[:, begin : begin + GROUP].double()
            steps = (part.amax(1) - part.amin(1)) / 15
            off = 0.5 * steps + 2**-10 * part.abs().amax(1)  # scales are kept in 16 bits
            bound += given.norm(dim=1)[:, None] * off * part.shape[1] ** 0.5
        assert ((out - exact).abs() <= bound).all()

    check()


@pytest.mark.parametrize("lowest", [None, 8])
def test_int4_keeps_groups_that_a_file_had(kernels: Kernels, lowest: int | None) -> None:
    """Q4_1: code · scale + low; Q4_0: (code - 8) · scale. Rounded to bfloat16 in between, as weights of files are."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (40, 4, GROUP), generator=generator).float()
    scales = (torch.rand(40, 4, 1, generator=generator) + 0.1).half().float()
    lows = -scales * lowest if lowest else torch.randn(40, 4, 1, generator=generator).half().float()
    weight = (codes * scales + lows).reshape(40, -1)
    for loaded, steps in ((weight, 0.01), (weight.bfloat16(), 0.06)):
        kept = KernelLinear(loaded, None, "int4", kernels)(torch.eye(4 * GROUP)).t()
        assert ((kept - weight).reshape(codes.shape).abs() <= steps * scales).all()


def test_int4_keeps_what_a_file_had_whatever_its_codes(kernels: Kernels) -> None:
    """Few of them, one far from the others, all the same: no weight gets another code than its own."""
    zero = 8.0  # its code: weights within 16 steps of zero are off by a 32nd of a step at most in bfloat16
    rare = st.lists(st.integers(0, 15), max_size=6)

    @settings(max_examples=300, deadline=None)
    @given(st.integers(0, 15), rare, st.floats(0.003, 1.0), st.booleans(), st.integers(1, GROUP))
    def check(usual: int, others: list[int], scale: float, rounded: bool, inputs: int) -> None:
        codes = torch.tensor(([*others] + [usual] * GROUP)[:inputs]).float()
        step = float(torch.tensor(scale).half())
        weight = (codes[None] - zero) * step
        kept = KernelLinear(weight.bfloat16().float() if rounded else weight, None, "int4", kernels)(torch.eye(inputs))
        assert ((kept.t() - weight).abs() <= 0.2 * step).all(), (codes, kept / step + zero)

    check()


@pytest.mark.parametrize("kind", [*KINDS, "int8", "int4"])
def test_broken_weights_break_their_outputs_and_no_other(kernels: Kernels, kind: str) -> None:
    """However few of them, and wherever in a row: the sampler is to say so."""
    places = st.tuples(st.integers(0, 49), st.integers(0, 69))

    @settings(max_examples=20, deadline=None)
    @given(st.lists(st.tuples(places, st.sampled_from([torch.nan, torch.inf, -torch.inf])), max_size=4))
    def check(broken: list[tuple[tuple[int, int], float]]) -> None:
        x, weight, bias = case(3, 50, 70)
        for (row, column), value in broken:
            weight[row, column] = value
        out = KernelLinear(weight, bias, kind, kernels)(x)
        for row in range(50):
            assert out[:, row].isfinite().any() == weight[row].isfinite().all()

    check()


@pytest.mark.parametrize("kind", [*KINDS, "int8", "int4"])
def test_a_row_is_the_same_alone_and_among_others(kernels: Kernels, kind: str) -> None:
    x, weight, bias = case(65, 200, 130)
    linear = KernelLinear(weight, bias, kind, kernels)
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in (2, 3, 5, 6, 7, 12, 13, 32, 65):
        assert torch.equal(linear(x[:rows]), alone[:rows]), rows


@pytest.mark.parametrize("kind", [*KINDS, "int8", "int4"])
def test_no_tile_changes_a_result(kernels: Kernels, kind: str) -> None:
    """Neither those that are measured nor any other, whatever the steps."""
    x, weight, bias = case(40, 200, 130)
    linear = KernelLinear(weight, bias, kind, kernels)
    steps = (1, 2, 3, 4, 5, 6, 8, 11, 12, 13, 16, 24, 32, 40)
    before = {rows: linear(x[:rows]) for rows in steps}
    measured = linear.matrix.measure()
    assert set(measured) <= {1, 2, 4}
    for tiles in (measured, *([width] * len(measured) for width in (1, 2, 4))):
        linear.matrix.set_tiles(tiles)
        assert all(torch.equal(linear(x[:rows]), before[rows]) for rows in steps)


def test_each_shape_is_measured_once(kernels: Kernels) -> None:
    wide, narrow = (KernelLinear(torch.randn(rows, 64), None, "float32", kernels) for rows in (96, 64))
    again = KernelLinear(torch.randn(96, 64), None, "float32", kernels)
    asked: list[str] = []

    class Watched:
        def __init__(self, name: str) -> None:
            self.name = name

        def measure(self) -> list[int]:
            asked.append(f"measure {self.name}")
            return [1] * 10

        def set_tiles(self, tiles: list[int]) -> None:
            asked.append(f"set {self.name}")

    for name, linear in (("wide", wide), ("narrow", narrow), ("again", again)):
        linear.matrix = Watched(name)
    measure_tiles([wide, narrow, again, DenseLinear(torch.eye(3), None)])
    assert asked == ["measure wide", "measure narrow", "set again"]


def test_broken_rows_stay_broken_and_break_no_other(kernels: Kernels) -> None:
    x, weight, bias = case(4, 50, 40)
    x[1, 3], x[2, 39] = torch.nan, torch.inf
    for kind in (*KINDS, "int8", "int4"):
        out = KernelLinear(weight, bias, kind, kernels)(x)
        assert out[[0, 3]].isfinite().all()
        assert not out[[1, 2]].isfinite().any()


@pytest.mark.parametrize("kind", [*KINDS, "int8", "int4"])
def test_the_likeliest_output_is_the_first_of_the_largest(kernels: Kernels, kind: str) -> None:
    @settings(max_examples=30, deadline=None)
    @given(SHAPES, st.booleans(), st.sampled_from([0.0, 10.0, torch.nan, torch.inf, -torch.inf]), st.data())
    def check(shape: tuple[int, int, int], biased: bool, added: float, data: st.DataObject) -> None:
        torch.set_num_threads(data.draw(st.integers(1, 3)))  # each has a part of the outputs
        rows, outputs, inputs = shape
        x, weight, bias = case(rows, outputs, inputs)
        same = data.draw(st.lists(st.integers(0, outputs - 1), min_size=outputs, max_size=outputs))
        weight, bias = weight[same], bias[same]  # some outputs are equal
        bias[data.draw(st.integers(0, outputs - 1))] += added
        linear = KernelLinear(weight, bias if biased else None, kind, kernels)
        logits = linear(x)
        expected = torch.where(logits.amax(1).isfinite(), torch.from_numpy(logits.numpy().argmax(1)), BAD_LOGITS)
        assert torch.equal(linear.likeliest(x), expected)

    threads = torch.get_num_threads()
    try:
        check()
    finally:
        torch.set_num_threads(threads)


def test_broken_rows_have_no_likeliest_output(kernels: Kernels) -> None:
    x, weight, bias = case(4, 50, 40)
    x[1, 3], x[2, 39] = torch.nan, torch.inf
    for kind in (*KINDS, "int8", "int4"):
        linear = KernelLinear(weight, bias, kind, kernels)
        assert (linear.likeliest(x) == BAD_LOGITS).tolist() == [False, True, True, False]
        linear = KernelLinear(weight, torch.full_like(bias, -torch.inf), kind, kernels)
        assert (linear.likeliest(x) == BAD_LOGITS).all()


def test_zeros_and_sizes(kernels: Kernels) -> None:
    x, weight, bias = case(3, 70, 64)
    weight[5] = 0
    for kind in (*KINDS, "int8", "int4"):
        linear = KernelLinear(weight, bias, kind, kernels)
        torch.testing.assert_close(linear(torch.zeros(2, 64)), bias.expand(2, -1))
        assert torch.equal(linear(x)[:, 5], bias[5].expand(3))
        assert linear(x[:0]).shape == (0, 70)
        assert linear.likeliest(x[:0]).shape == (0,)
    bytes_of = {kind: KernelLinear(weight, None, kind, kernels).nbytes for kind in (*KINDS, "int8", "int4")}
    assert bytes_of["float32"] == 2 * bytes_of["bfloat16"] == 2 * bytes_of["float16"]
    assert bytes_of["int8"] < 0.6 * bytes_of["bfloat16"]
    assert bytes_of["int4"] < 0.65 * bytes_of["int8"]


def test_mistakes_are_errors_not_crashes(kernels: Kernels) -> None:
    x, weight, bias = case(3, 70, 64)
    with pytest.raises(RuntimeError, match="unknown kind int3"):
        KernelLinear(weight, bias, "int3", kernels)
    matrix = KernelLinear(weight, bias, "int4", kernels).matrix
    with pytest.raises(RuntimeError, match="no tile has the width 3"):
        matrix.set_tiles([3] * 10)
    with pytest.raises(RuntimeError, match="tiles must be 10 widths"):
        matrix.set_tiles([1])
    with pytest.raises(RuntimeError, match="bias must have the shape"):
        KernelLinear(weight, bias[1:], "float32", kernels)
    with pytest.raises(RuntimeError, match="x must have the shape"):
        KernelLinear(weight, bias, "float32", kernels)(x[:, 1:])
    with pytest.raises(RuntimeError, match="a gated matrix has no likeliest output"):
        KernelLinear(weight, bias, "float32", kernels, gated=True).likeliest(x)
