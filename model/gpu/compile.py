"""Compile every kernel for GPUs that need not be here, and show what each takes: python -m model.gpu.compile

Registers, bytes that spill to memory, shared memory. It fails where a kernel of the decode path spills, or takes more
shared memory than the GPU has. Nothing is run.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource

from kvpool.formats import FORMATS, KVLayout
from kvpool.storage import KVStorage
from model.batch import Batch, Row
from model.gpu.attention import attention
from model.gpu.launch import INTERPRETED, Launch
from model.gpu.norms import adding, gating
from model.gpu.plan import LARGE, SMALL, Plan, Work, power
from model.gpu.rotation import turning
from model.gpu.write import writing
from model.inputs import InputBuilder
from model.layers import RMSNorm
from model.params import SamplingParams

META = torch.device("meta")
SHARED = {80: 166_912, 90: 232_448, 100: 232_448}
"""Bytes that a program may have, of each kind of GPU."""
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of a model, and what is special about its attention."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    inner: int
    normed: bool = False
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.bfloat16


SHAPES = (
    Shape("llama-8b", 32, 8, 128, 4096, 14336),
    Shape("qwen3-0.6b", 16, 8, 128, 1024, 3072, normed=True),
    Shape("smollm2-135m", 9, 3, 64, 576, 1536),
    Shape("phi3-mini", 32, 32, 96, 3072, 8192, window=2047),
    Shape("gemma2-2b", 8, 4, 256, 2304, 9216, window=4096, softcap=50.0),
)


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one kernel for one GPU."""

    registers: int
    spills: int
    """Bytes stored and loaded."""
    shared: int
    """Bytes."""


def kernels(shape: Shape, kv: str) -> Iterator[tuple[str, bool, Launch]]:
    """(name, whether each decode step waits for it, launch) of what a layer of the shape does over a pool of `kv`."""
    heads, kv_heads, dim, group = shape.heads, shape.kv_heads, shape.dim, shape.heads // shape.kv_heads
    storage = KVStorage(KVLayout(1, kv_heads, dim, FORMATS[kv], 16), 4, META)
    inputs = InputBuilder(2, 16, torch.device("cpu")).build(
        Batch([Row([0, 0], 2, 0, 2, [1], SamplingParams(max_tokens=1, seed=0))])
    )
    make = partial(torch.empty, device=META, dtype=shape.dtype)
    ints = partial(torch.empty, device=META, dtype=torch.int32)
    qkv, query, out = make(2, heads + 2 * kv_heads, dim), make(2, heads, dim), make(2, heads, dim)
    norm = RMSNorm(make(heads + kv_heads, dim), 1e-6, 0.0, "cast_then_scale", shape.dtype) if shape.normed else None
    cos_sin = make(2, 1, dim // 2), make(2, 1, dim // 2)
    yield "write", True, writing(qkv, query, storage, 0, inputs, norm=norm, cos_sin=cos_sin)
    for path, rows in (("decode", power(SMALL, group)), ("chunk", max(LARGE, power(SMALL, group)))):
        work = Work(rows, ints(2, 5), ints(1, 4), 2)
        plan = Plan(ints(2), ints(1), ints(1), ints(1, 1), ints(1), [work])
        launches = attention(query, out, storage, 0, plan, work, scale=1.0, window=shape.window, softcap=shape.softcap)
        for name, launch in zip(("attend", "merge"), launches, strict=True):
            yield f"{name} {path}", path == "decode", launch
    if FORMATS[kv].value_bits == 4:
        back = turning(out.float(), out, launches[0].arguments["DOT"], back=True)
        yield "turn back", True, back


def others(shape: Shape) -> Iterator[tuple[str, bool, Launch]]:
    """What a layer does between its products, whatever the pool is."""
    make = partial(torch.empty, device=META, dtype=shape.dtype)
    norm = RMSNorm(make(shape.hidden), 1e-6, 0.0, "cast_then_scale", shape.dtype)
    x = make(2, shape.hidden)
    yield "residual", True, adding(x, x, x, after=norm, before=norm, alpha=1.0)
    yield "gate", True, gating(make(2, 2 * shape.inner), make(2, shape.inner), "silu")


def source(launch: Launch) -> Any:
    """The kernel with its arguments' types, as a launch would specialise it."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        whole = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
        if parameter.is_constexpr:
            kind, constants[(index,)] = "constexpr", value
        elif isinstance(value, Tensor):
            kind, whole = "*" + TYPES[value.dtype], True
        else:
            kind = "i32" if isinstance(value, int) else "fp32"
        signature[parameter.name] = kind
        if whole and kind != "constexpr":
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def compiled(launch: Launch, arch: int) -> Usage:
    """Compile for compute capability `arch`, 90 for 9.0. Raises what triton raises where it cannot."""
    kernel = triton.compile(source(launch), target=GPUTarget("cuda", arch, 32), options=launch.options)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "kernel.ptx"
        text.write_text(kernel.asm["ptx"])
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}", str(text)]
        done = subprocess.run([*command, "-o", f"{text}.out"], capture_output=True, text=True, check=True)
    registers = re.search(r"Used (\d+) registers", done.stderr)
    assert registers is not None, done.stderr
    spills = sum(int(found) for found in re.findall(r"(\d+) bytes spill", done.stderr))
    return Usage(int(registers[1]), spills, int(kernel.metadata.shared))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m model.gpu.compile", description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=list(SHARED), choices=list(SHARED))
    parser.add_argument("--shape", nargs="+", default=[shape.name for shape in SHAPES])
    parser.add_argument("--kv", nargs="+", default=["bfloat16", "int8", "k8v4", "tq4"], choices=list(FORMATS))
    parser.add_argument("--decode", action="store_true", help="only what a decode step waits for")
    options = parser.parse_args()
    if INTERPRETED:
        sys.exit("TRITON_INTERPRET is set: nothing can be compiled")
    jobs = []
    for shape in SHAPES:
        if shape.name in options.shape:
            cases = [(kv, *case) for kv in options.kv for case in kernels(shape, kv)]
            cases += [("", *case) for case in others(shape)]
            cases = [case for case in cases if case[2] or not options.decode]
            jobs += [(shape.name, *case, arch) for case in cases for arch in options.arch]
    failed = 0
    with ThreadPoolExecutor(2) as pool:
        usages = pool.map(lambda job: compiled(job[-2], job[-1]), jobs)
        sys.stdout.write(
            f"{'model':13} {'pool':9} {'kernel':13} {'GPU':6} {'registers':>9} {'spills':>7} {'shared':>7}\n"
        )
        for (name, kv, kernel, decodes, _, arch), usage in zip(jobs, usages, strict=True):
            bad = (decodes and usage.spills > 0) or usage.shared > SHARED[arch]
            failed += bad
            sys.stdout.write(
                f"{name:13} {kv:9} {kernel:13} sm_{arch:<3} {usage.registers:9} {usage.spills:7} {usage.shared:7}"
                f"{'  <-- too much' * bad}\n"
            )
            sys.stdout.flush()
    if failed:
        sys.exit(f"{failed} kernels spill in the decode path, or take more shared memory than there is")


if __name__ == "__main__":
    main()
