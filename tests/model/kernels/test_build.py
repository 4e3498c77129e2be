"""Which compiler builds the kernels, and what is said of it."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

from model.attention.reference import ReferenceAttention
from model.kernels import build
from model.kernels.loaded import load_kernels
from model.runner import choose_attention


def compile_nothing(compiler: str, isa: str, path: Path) -> None:
    path.touch()


@pytest.mark.parametrize(
    ("named", "words"),
    [
        (None, "with here, once"),
        ("here", "with here, once"),
        ("nowhere", "with here (CXX is 'nowhere', which is no program), once"),
    ],
)
def test_a_cxx_that_is_passed_over_is_named(
    named: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_KERNEL_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if named is not None:
        monkeypatch.setenv("CXX", named)
    monkeypatch.setattr(build, "COMPILERS", ("here",))
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "here" else None)
    monkeypatch.setattr(build, "_compile", compile_nothing)
    lines: list[str] = []
    built = build.library("avx2", lines.append)
    assert built.exists()
    assert words in lines[0]
    assert build.library("avx2", lines.append) == built
    assert len(lines) == 2


def test_no_compiler_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.BuildError, match=r"^no C\+\+ compiler: install g\+\+, or name one in CXX$"):
        build.library("avx2")


def test_no_compiler_is_one_warning_and_plain_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OCTAVO_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    kernels = load_kernels()
    assert kernels is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "plain torch instead" in record.message
    attention = choose_attention(torch.device("cpu"), kernels, lambda *_: pytest.fail("said already"))
    assert isinstance(attention, ReferenceAttention)


def test_a_library_is_of_its_sources_torch_and_instruction_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_KERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "compiler", lambda: "here")
    monkeypatch.setattr(build, "_compile", compile_nothing)
    sources = tmp_path / "sources"
    shutil.copytree(build.HERE, sources)
    monkeypatch.setattr(build, "HERE", sources)
    found = [build.library("avx2"), build.library("portable")]
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "0.0")
        found.append(build.library("avx2"))
    assert build.library("avx2") == found[0]
    with (sources / "gemm.h").open("a") as file:
        file.write("//")
    found.append(build.library("avx2"))
    assert len(set(found)) == 4
