"""Which compiler builds the kernels, and what is said of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from model.kernels import build


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
