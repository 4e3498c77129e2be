"""Which number types a machine gets."""

from __future__ import annotations

import pytest
import torch

from kvpool.formats import FORMATS
from model import precision
from model.errors import ModelError
from model.precision import Precision, choose_device, choose_precision, cpu_computes

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
KV = {getattr(torch, name): FORMATS[name] for name in ("float32", "bfloat16", "float16")}


@pytest.mark.parametrize(
    ("dtype", "kv", "stored", "device", "native", "expected"),
    [
        ("auto", "auto", "bfloat16", CPU, False, Precision(F32, F32, KV[BF16])),
        ("auto", "auto", "float16", CPU, False, Precision(F32, F32, KV[F16])),
        ("auto", "auto", "bfloat16", CPU, True, Precision(BF16, BF16, KV[BF16])),
        ("auto", "auto", "float32", CUDA, False, Precision(BF16, BF16, KV[BF16])),
        ("auto", "auto", "float16", CUDA, False, Precision(F16, F16, KV[F16])),
        ("float32", "auto", "bfloat16", CPU, True, Precision(F32, F32, KV[F32])),
        ("bfloat16", "auto", "bfloat16", CPU, False, Precision(BF16, F32, KV[BF16])),
        ("float16", "auto", "bfloat16", CPU, True, Precision(F16, F32, KV[F16])),
        ("auto", "float32", "bfloat16", CPU, False, Precision(F32, F32, KV[F32])),
        ("float32", "bfloat16", "bfloat16", CPU, False, Precision(F32, F32, KV[BF16])),
        ("auto", "tq4", "bfloat16", CPU, True, Precision(BF16, BF16, FORMATS["tq4"])),
    ],
)
def test_choice(
    dtype: str,
    kv: str,
    stored: str,
    device: torch.device,
    native: bool,
    expected: Precision,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`native`: whether the CPU has 16-bit instructions."""
    monkeypatch.setattr(precision, "cpu_computes", lambda kind: kind == F32 or (native and kind == BF16))
    assert choose_precision(dtype, kv, stored, device) == expected


def test_float32_is_always_native() -> None:
    assert cpu_computes(F32)
    assert not cpu_computes(F16)


def test_bad_names_are_refused_in_one_line() -> None:
    with pytest.raises(ModelError, match=r"--dtype half: must be auto, float32"):
        choose_precision("half", "auto", "bfloat16", CPU)
    with pytest.raises(ModelError, match=r"--kv-cache-dtype fp8: must be auto"):
        choose_precision("auto", "fp8", "bfloat16", CPU)
    with pytest.raises(ModelError, match=r"--device tpu: must be auto, cpu or cuda"):
        choose_device("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    assert choose_device("auto") == CPU
    with pytest.raises(ModelError, match=r"--device cuda: torch sees no GPU"):
        choose_device("cuda")
