"""Which number types a model is stored and computed in, on which device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvpool.formats import FORMATS, KVFormat
from model.errors import ModelError
from model.kernels.loaded import Kernels

QUANTIZATIONS = ("int8", "int4")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` → "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Precision:
    """`weights` is how matrices lie in memory, `compute` the type of activations, `kv` the pool's format.

    They differ with our kernels, and on a CPU without 16-bit instructions: matrices stay in 16 bits and are widened as
    they are read, because arithmetic that is emulated is slower and less exact than float32.
    """

    weights: torch.dtype
    compute: torch.dtype
    kv: KVFormat
    kernels: Kernels | None = None
    """Compiled kernels to compute with; on a CPU only."""
    quantization: str | None = None
    """int8 or int4: matrices in memory, quantised from `weights`; with kernels only."""

    @property
    def stored(self) -> str:
        """What matrices lie in memory as."""
        return self.quantization or dtype_name(self.weights)

    @property
    def head(self) -> Precision:
        """The LM head's: every token hangs on it, so it has eight bits where the layers have four."""
        return replace(self, quantization="int8") if self.quantization == "int4" else self


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


def choose_precision(
    dtype: str,
    kv_dtype: str,
    stored: str,
    device: torch.device,
    kernels: Kernels | None = None,
    quantization: str | None = None,
) -> Precision:
    """Turn `--dtype`, `--kv-cache-dtype`, `--quantization` and the type of the stored weights into a Precision.

    auto on a CPU: float32 where there are neither kernels nor 16-bit instructions; everywhere else float16 where the
    weights are stored so, else bfloat16. The pool's auto is 16 bits wherever `dtype` is auto, so that a budget holds
    the same number of tokens everywhere; else `dtype`.
    Raises ModelError for a name that is not known, and where a quantization is asked for and there are no kernels.
    """
    for flag, value, known in (("--dtype", dtype, [*DTYPES]), ("--kv-cache-dtype", kv_dtype, [*FORMATS])):
        if value != "auto" and value not in known:
            raise ModelError(f"{flag} {value}: must be auto, {', '.join(known)}")
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ModelError(f"--quantization {quantization}: must be {' or '.join(QUANTIZATIONS)}")
    if quantization is not None and kernels is None:
        raise ModelError(f"--quantization {quantization}: needs the compiled kernels, on a CPU")
    sixteen = torch.float16 if stored == "float16" else torch.bfloat16
    if dtype != "auto":
        weights = DTYPES[dtype]
    elif device.type == "cpu" and kernels is None:
        weights = torch.bfloat16 if cpu_computes(torch.bfloat16) else torch.float32
    else:
        weights = sixteen
    wide = device.type == "cpu" and (kernels is not None or not cpu_computes(weights))
    compute = torch.float32 if wide else weights
    if kv_dtype == "auto":
        kv_dtype = dtype_name(sixteen if dtype == "auto" else weights)
    return Precision(weights, compute, FORMATS[kv_dtype], kernels, quantization)
