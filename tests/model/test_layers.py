"""Norms, embedding and activation against transformers' modules, in float32 and in 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from kvpool.formats import FORMATS
from model.layers import Embedding, NormStyle, RMSNorm, gated
from model.precision import Precision

EPS = 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "offset", "style"),
    [
        (LlamaRMSNorm, 0.0, "cast_then_scale"),
        (Olmo2RMSNorm, 0.0, "scale_then_cast"),
        (Gemma2RMSNorm, 1.0, "scale_then_cast"),
    ],
)
def test_norms(kind: Any, offset: float, style: NormStyle, dtype: torch.dtype) -> None:
    module = kind(48, eps=EPS)
    weight = torch.randn(48).to(dtype)
    module.weight.data = weight
    x = (torch.randn(7, 48) * 30).to(dtype)
    ours = RMSNorm(weight, EPS, offset, style, dtype)(x)
    assert ours.dtype == dtype
    with torch.inference_mode():
        expected = module(x)
    if dtype == torch.float32:
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(ours, expected)


def test_a_weight_per_head() -> None:
    weight, x = torch.randn(3, 16), torch.randn(5, 3, 16)
    ours = RMSNorm(weight, EPS, 0.0, "cast_then_scale", torch.float32)(x)
    for head in range(3):
        one = RMSNorm(weight[head], EPS, 0.0, "cast_then_scale", torch.float32)(x[:, head])
        torch.testing.assert_close(ours[:, head], one)


def test_embedding_widens_and_multiplies() -> None:
    table = torch.randn(9, 4).bfloat16()
    embedding = Embedding(table, 3.0, Precision(torch.bfloat16, torch.float32, FORMATS["bfloat16"]))
    out = embedding(torch.tensor([8, 0, 8]))
    assert torch.equal(out, table[[8, 0, 8]].float() * 3.0)
    out.zero_()
    assert table.abs().sum() > 0  # the rows are the caller's own


def test_embedding_without_a_multiplier_is_not_the_table() -> None:
    table = torch.ones(3, 4)
    wide = Precision(torch.float32, torch.float32, FORMATS["float32"])
    Embedding(table, 1.0, wide)(torch.tensor([1])).zero_()
    assert table.eq(1).all()


def test_gated() -> None:
    x = torch.randn(5, 12)
    gate, up = x[:, :6], x[:, 6:]
    torch.testing.assert_close(gated(x.clone(), "silu"), gate * gate.sigmoid() * up)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(gated(x.clone(), "gelu_tanh"), expected)
