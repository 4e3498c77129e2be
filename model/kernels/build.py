"""Compiles the kernels once, for the instruction set at hand, and loads them.

A library is cached under a hash of what it depends on: sources, flags, torch. The compiler is not part of it, for where
the image runs there is none. The directory is `OCTAVO_KERNEL_CACHE`, else `$XDG_CACHE_HOME/octavo/kernels`.
`python -m model.kernels.build` fills it ahead of time, for every instruction set, as the image does.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

HERE = Path(__file__).parent
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
ISAS: dict[str, tuple[str, ...]] = {
    "avx512bf16": (*AVX512, "-mavx512bf16"),
    "avx512": AVX512,
    "avx2": AVX2,
    "portable": (),
    "emulated": (*AVX2, "-DOCTAVO_EMULATED", "-O1"),
}
"""Instruction sets, best first, and what the compiler is told. A flag has the processor's own name for it. emulated is
for tests: the layouts and widths of avx512bf16, without its instructions; to optimise it would take minutes."""
COMPILERS = ("g++", "c++", "clang++")
FLAGS = ("-std=gnu++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wno-psabi", "-Wno-maybe-uninitialized")
"""gnu, not c++: products and sums may then become one instruction, as the kernels mean them to."""


class BuildError(Exception):
    """One line: why there are no kernels."""


def available() -> list[str]:
    """The instruction sets that this processor has, best first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ["portable"]
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ["portable"]
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    have = {flag.replace("_", "") for flag in line.split()}
    return [isa for isa, flags in ISAS.items() if all(flag.removeprefix("-m") in have for flag in flags)]


def directory() -> Path:
    """Where libraries are cached."""
    if given := os.environ.get("OCTAVO_KERNEL_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo" / "kernels"


def compiler() -> str:
    """The C++ compiler: CXX, else g++, c++ or clang++. Raises BuildError where there is none."""
    for name in (os.environ.get("CXX"), *COMPILERS):
        if name and shutil.which(name):
            return name
    raise BuildError("no C++ compiler: install g++, or name one in CXX")


def _instead(name: str) -> str:
    """Words for a CXX that was passed over."""
    named = os.environ.get("CXX")
    return f" (CXX is {named!r}, which is no program)" if named and named != name else ""


def library(isa: str, progress: Callable[[str], None] = lambda detail: None) -> Path:
    """The library of an instruction set, compiled first where it is not cached. Raises BuildError."""
    sources = sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")])
    key = hashlib.blake2b(repr((isa, ISAS[isa], _flags(), torch.__version__)).encode(), digest_size=8)
    for source in sources:
        key.update(source.read_bytes())
    path = directory() / f"{isa}-{key.hexdigest()}.so"
    if path.exists():
        return path
    name = compiler()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                start = time.monotonic()
                progress(f"compiling for {isa} with {name}{_instead(name)}, once: under a minute on two cores")
                _compile(name, isa, path)
                progress(f"compiled in {time.monotonic() - start:.0f} s, kept in {path.parent}")
    except OSError as error:
        raise BuildError(f"cannot write the kernels to {path.parent}: {error.strerror}") from None
    return path


def load(isa: str | None = None, progress: Callable[[str], None] = lambda detail: None) -> str:
    """Load the kernels of `isa`, by default the best one; returns its name. Raises BuildError."""
    isa = isa or available()[0]
    path = library(isa, progress)
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]  # a second time does nothing
    except OSError as error:
        raise BuildError(f"cannot load {path}: {error}") from None
    return isa


def _flags() -> tuple[str, ...]:
    """FLAGS and those of OCTAVO_KERNEL_FLAGS: `make sanitize` compiles and links with the sanitizers that way."""
    return (*FLAGS, *os.environ.get("OCTAVO_KERNEL_FLAGS", "").split())


def namespace(isa: str) -> str:
    """Of an instruction set's operators and classes."""
    return f"octavo_{isa}"


def _compile(compiler: str, isa: str, path: Path) -> None:
    home = Path(torch.__file__).parent
    names = (f"-DOCTAVO_ISA={isa}", f"-DOCTAVO_LIBRARY={namespace(isa)}")
    torch_abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        jobs = []
        for source, more in (
            (
                "library.cpp",
                (
                    "-O1",
                    torch_abi,
                    "-isystem",
                    str(home / "include"),
                    "-isystem",
                    str(home / "include/torch/csrc/api/include"),
                ),
            ),
            ("isa.cpp", ISAS[isa]),
        ):
            out = str(Path(folder) / (source + ".o"))
            jobs.append([compiler, *_flags(), *names, *more, "-c", str(HERE / source), "-o", out])
        with ThreadPoolExecutor(len(jobs)) as pool:
            list(pool.map(_run, jobs))
        built = Path(folder) / path.name
        # torch brings its own OpenMP; it is loaded already, under the name that the linker writes down here.
        libraries = (f"-L{home / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10")
        _run([compiler, "-shared", *_flags(), *(job[-1] for job in jobs), *libraries, "-o", str(built)])
        built.replace(path)


def _run(command: list[str]) -> None:
    # What is preloaded into this process (a sanitizer's library) is not meant for the compiler.
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
        raise BuildError(f"{command[0]} failed: {first}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Several processes may start at once: one compiles, the others wait for it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Compile for every instruction set of this kind of processor."""
    try:
        for isa in ("avx512bf16", "avx512", "avx2", "portable") if available() != ["portable"] else ["portable"]:
            sys.stdout.write(f"{library(isa)}\n")
    except BuildError as error:
        sys.exit(f"octavo: {error}")


if __name__ == "__main__":
    main()
