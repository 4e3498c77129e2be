"""Tools that check the set-up files: those of the environment, and promtool, which comes with Prometheus."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Tool = Callable[..., "subprocess.CompletedProcess[str]"]
ROOT = Path(__file__).resolve().parents[2]
MAKE_VARIABLES = {"MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS", "ARGS", "PYTEST_ARGS", "PYTHON"}


def tool(command: str) -> Tool:
    """A runner that starts the command in the repository and collects what it says.

    These tests run under `make test`: a make started by them must not take itself for a part of that one.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in MAKE_VARIABLES}

    def run(*arguments: str, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [command, *arguments],
            cwd=ROOT,
            env={**inherited, **environment},
            input=text,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def hadolint() -> Tool:
    return tool(str(Path(sys.executable).with_name("hadolint")))


@pytest.fixture(scope="session")
def compose() -> Tool:
    return tool(str(Path(sys.executable).with_name("docker-compose")))


@pytest.fixture(scope="session")
def make() -> Tool:
    return tool("make")


@pytest.fixture(scope="session")
def promtool() -> Tool:
    """Not on the package index, so a laptop may lack it; CI installs it and must have it."""
    found = shutil.which("promtool")
    if found is None:
        assert "CI" not in os.environ, "promtool is missing: .ci/run installs it"
        pytest.skip("promtool is not installed (Debian: apt install prometheus)")
    return tool(found)
