"""Which number types a model is stored and computed in, on which device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` → "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Precision:
    """`weights` is how matrices lie in memory, `compute` the type of activations, `kv` that of the pool.

    They differ on a CPU without 16-bit instructions: matrices stay in 16 bits and are widened tile by tile, because
    arithmetic that is emulated is slower and less exact than float32.
    """

    weights: torch.dtype
    compute: torch.dtype
    kv: torch.dtype


def choose_device(name: str) -> torch.device:
    """The device of `--device`: auto, cpu or cuda. Raises ModelError where torch sees no GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ModelError(f"--device {name}: must be auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: torch sees no GPU")
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def cpu_computes(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of `dtype` natively (float32 always; bfloat16 with AVX-512 or AMX)."""
    if dtype == torch.float32:
        return True
    probe = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return dtype == torch.bfloat16 and probe is not None and bool(probe())


def choose_precision(dtype: str, kv_dtype: str, stored: str, device: torch.device) -> Precision:
    """Turn `--dtype`, `--kv-cache-dtype` and the type of the stored weights into a Precision.

    auto on a CPU: bfloat16 where it has the instructions, else float32; auto on a GPU: float16 where the weights are
    stored so, else bfloat16. The pool's auto is 16 bits wherever `dtype` is auto, so that a budget holds the same
    number of tokens everywhere; else `dtype`.
    Raises ModelError for a name that is not known.
    """
    for flag, value in (("--dtype", dtype), ("--kv-cache-dtype", kv_dtype)):
        if value != "auto" and value not in DTYPES:
            raise ModelError(f"{flag} {value}: must be auto, {', '.join(DTYPES)}")
    sixteen = torch.float16 if stored == "float16" else torch.bfloat16
    if dtype != "auto":
        weights = DTYPES[dtype]
    elif device.type == "cpu":
        weights = torch.bfloat16 if cpu_computes(torch.bfloat16) else torch.float32
    else:
        weights = sixteen
    compute = torch.float32 if device.type == "cpu" and not cpu_computes(weights) else weights
    kv = sixteen if dtype == "auto" else weights
    if kv_dtype != "auto":
        kv = DTYPES[kv_dtype]
    return Precision(weights, compute, kv)
