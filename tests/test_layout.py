"""The architecture as rules over the source: who may import whom, and what may be in no file at all."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("server", "scheduler", "model", "kvpool", "loadtest")
TOP_LEVEL = {
    *ROOMS,
    "tests",
    "docs",
    "pyproject.toml",
    "constraints.txt",
    "Dockerfile",
    "docker-compose.yml",
    "Makefile",
    "README.md",
    "LICENSE",
}
MAX_LINES = 400

# server → scheduler → model → kvpool; a room may skip one, never turn round.
MAY_IMPORT = {
    "server": {"scheduler", "model", "kvpool"},
    "scheduler": {"model", "kvpool"},
    "model": {"kvpool"},
    "kvpool": set(),
    "loadtest": {"scheduler", "model", "kvpool"},
}
WEB = {"fastapi", "starlette", "pydantic", "pydantic_settings", "sse_starlette", "uvicorn", "prometheus_client"}
TENSORS = {"torch", "transformers"}
# Modules that run what a file says. `model.eval()` is a method and fine; the builtin is not.
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "torch.hub.load", "numpy.load", "np.load"}
# Written in halves, or this file would break its own rule.
PLACES = (
    *("pypi" + ".org", "pythonhosted" + ".org", "download.pytorch" + ".org", "registry.npmjs" + ".org"),
    *("deb.debian" + ".org", "docker" + ".io", "ghcr" + ".io", "quay" + ".io", "nvcr" + ".io", "proxy.golang" + ".org"),
    *("/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "/opt/" + "wheels", "/opt/" + "pypi", "/.py" + "env"),
)


def files_of_the_tree() -> list[Path]:
    """Every file that is, or is about to be, in the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        assert "CI" not in os.environ, f"git can't list the tree: {listed.stderr}"
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


every_file = pytest.mark.parametrize("path", python_files(*ROOMS), ids=lambda path: str(path.relative_to(ROOT)))


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Absolute names of imported modules, those inside functions included; `from a import b` gives a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; the house imports absolutely"
            assert node.module is not None
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def top(module: str) -> str:
    return module.split(".")[0]


def test_every_room_has_code() -> None:
    """Without it the rules below would hold for an empty house."""
    assert [room for room in ROOMS if len(python_files(room)) < 3] == []


@every_file
def test_imports_go_one_way(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    allowed = MAY_IMPORT[room] | {room}
    if path == ROOT / "server" / "__main__.py":
        allowed = allowed | {"loadtest"}  # `octavo bench`
    forbidden = TENSORS if room == "server" else WEB if room != "loadtest" else set()
    for module, line in imports(ast.parse(path.read_text())):
        assert top(module) not in ROOMS or top(module) in allowed, f"line {line}: {room} imports {module}"
        assert top(module) not in forbidden, f"line {line}: {room} imports {module}"
        assert top(module) != "tests", f"line {line}: {room} imports {module}"


def import_without(folders: tuple[str, ...], unwanted: set[str]) -> subprocess.CompletedProcess[str]:
    """Import every module of the folders in a fresh process; it fails at the first that brings in an unwanted one."""
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in python_files(*folders)]
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name.removesuffix('.__init__'))\n"
        f"    found = sorted({unwanted!r} & sys.modules.keys())\n"
        "    assert not found, f'{name} brings in {found}'\n"
    )
    return subprocess.run([sys.executable, "-W", "error", "-c", script], cwd=ROOT, capture_output=True, text=True)


def test_server_runs_without_torch() -> None:
    """Neither directly nor through another room."""
    run = import_without(("server",), TENSORS)
    assert run.returncode == 0, run.stderr


def test_engine_runs_without_the_web() -> None:
    """The engine process must start on a machine that has only torch."""
    run = import_without(("kvpool", "scheduler"), WEB)
    assert run.returncode == 0, run.stderr


@every_file
def test_no_file_runs_code_from_data(path: Path) -> None:
    """Checkpoints and messages are data: no pickle in any dress, no torch.load, no trust_remote_code."""
    tree = ast.parse(path.read_text())
    for module, line in imports(tree):
        assert top(module) not in UNSAFE_MODULES, f"line {line}: {module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in UNSAFE_CALLS, f"line {node.lineno}: {ast.unparse(node.func)}"
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            assert ast.unparse(node.value) == "False", f"line {node.value.lineno}: trust_remote_code"


def test_files_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in python_files(*ROOMS, "tests")
        if (count := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}


def test_names_say_what_is_inside() -> None:
    paths = python_files(*ROOMS, "tests")
    assert [str(path) for path in paths if path.stem in {"util", "utils", "helpers", "misc", "common"}] == []
    found = [
        f"{path}: {name}" for path in paths for name in re.findall(r"^\s*class (\w*Manager)\b", path.read_text(), re.M)
    ]
    assert found == []


def test_top_level_is_the_fixed_set() -> None:
    names = {path.relative_to(ROOT).parts[0] for path in files_of_the_tree()}
    assert {name for name in names if not name.startswith(".")} == TOP_LEVEL


def test_no_file_names_a_place() -> None:
    """No registry's host and no path of the machine it was built on."""
    found = [
        f"{path.relative_to(ROOT)}: {place}"
        for path in files_of_the_tree()
        for place in PLACES
        if place.encode() in path.read_bytes()
    ]
    assert found == []
