"""Every kind of matrix multiplication against float64, and which one a weight gets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpool.formats import FORMATS
from model.linear import DenseLinear, Head, PackedLinear, WideningLinear, make_linear
from model.precision import Precision

WIDE = Precision(torch.float32, torch.float32, FORMATS["float32"])


def case(rows: int, outputs: int = 130, inputs: int = 72) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias and the exact result."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    bias = torch.randn(outputs, generator=generator)
    return x, weight, bias, x.double() @ weight.double().t() + bias.double()


@pytest.mark.parametrize("rows", [1, 3, 8, 33, 128])
@pytest.mark.parametrize("kind", [DenseLinear, PackedLinear])
def test_float32_kinds(kind: type[DenseLinear | PackedLinear], rows: int) -> None:
    x, weight, bias, exact = case(rows)
    with torch.inference_mode():
        torch.testing.assert_close(kind(weight, bias)(x).double(), exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(kind(weight, None)(x).double(), exact - bias.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_widening_multiplies_in_float32(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.linear.TILE_ELEMENTS", 72 * 64)
    x, weight, bias, _ = case(rows)
    linear = WideningLinear(weight.to(dtype), bias.to(dtype))
    assert linear.tile == 64 < len(weight)
    exact = x.double() @ weight.to(dtype).double().t() + bias.to(dtype).double()
    out = linear(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    assert linear.nbytes == weight.numel() * 2 + bias.numel() * 4


def test_the_choice() -> None:
    _, weight, bias, _ = case(1)
    assert isinstance(make_linear(weight, bias, WIDE), PackedLinear)
    for dtype in (torch.bfloat16, torch.float16):
        linear = make_linear(weight, bias, Precision(dtype, torch.float32, FORMATS["float32"]))
        assert isinstance(linear, WideningLinear)
        assert linear.weight.dtype == dtype


def test_without_the_operators_the_plain_kind_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedLinear, "available", staticmethod(lambda: False))
    x, weight, bias, exact = case(4)
    linear = make_linear(weight, bias, WIDE)
    assert isinstance(linear, DenseLinear)
    torch.testing.assert_close(linear(x).double(), exact, rtol=1e-5, atol=1e-5)


def test_the_head_never_rounds_logits_to_sixteen_bits() -> None:
    x, weight, _, _ = case(3)
    narrow = weight.bfloat16()
    for compute in (torch.float32, torch.bfloat16):
        head = Head(narrow, None, Precision(torch.bfloat16, compute, FORMATS["bfloat16"]))
        given = x.to(compute)
        logits = head(given)
        assert logits.dtype == torch.float32
        exact = given.double() @ narrow.double().t()
        torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
        assert not torch.equal(logits, logits.bfloat16().float())


def test_a_sixteen_bit_head_uses_the_embedding_table_where_it_lies() -> None:
    table = torch.randn(50, 16).bfloat16()
    head = Head(table, None, Precision(torch.bfloat16, torch.float32, FORMATS["bfloat16"]))
    assert isinstance(head.linear, WideningLinear)
    assert head.linear.weight.data_ptr() == table.data_ptr()
