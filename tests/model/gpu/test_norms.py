"""The residual stream's kernel and the gate's against the layers in torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels for a GPU need triton: make triton")

from model.gpu.norms import adding, gating
from model.layers import RMSNorm, gated

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def norm(width: int, offset: float) -> RMSNorm:
    return RMSNorm(torch.randn(width) * 0.1, 1e-5, offset, "scale_then_cast", torch.float32)


@pytest.mark.parametrize("width", [48, 576, 1000])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_the_residual_stream(width: int, adds: bool, after: bool, before: bool) -> None:
    x, y = torch.randn(3, width), torch.randn(3, width)
    last, following = norm(width, 1.0) if after else None, norm(width, 0.0) if before else None
    expected = x + 0.25 * (last(y) if last else y) if adds else x.clone()
    out = torch.full_like(x, torch.nan)
    adding(x, y if adds else None, out, after=last, before=following, alpha=0.25).run()
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)
    if following is not None:
        torch.testing.assert_close(out, following(expected), rtol=1e-5, atol=1e-6)
    else:
        assert out.isnan().all()


@pytest.mark.parametrize("width", [24, 96, 1500])
def test_the_gate(width: int) -> None:
    x = torch.randn(3, 2 * width) * 4
    for activation in ("silu", "gelu_tanh"):
        out = torch.empty(3, width)
        gating(x, out, activation).run()
        torch.testing.assert_close(out, gated(x.clone(), activation), rtol=1e-5, atol=1e-5)
    extreme = torch.tensor([[-200.0, 200.0, 3.0, 5.0]])
    out = torch.empty(1, 2)
    gating(extreme, out, "silu").run()
    assert out.tolist() == [[0.0, 1000.0]]
