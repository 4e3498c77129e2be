"""docs/security.md promises nothing that no test holds."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.setup.conftest import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[f"{file}::{name}" for file, name in NAMED])
def test_every_test_that_is_named_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert name.startswith("test_")
    assert name in found


def test_every_promise_names_a_test() -> None:
    """Of the tables whose head says so, every row; and no test is written in a way that escapes the check above."""
    tables = [block for block in PAGE.split("\n\n") if block.startswith("| promise | held by |")]
    assert len(tables) >= 5
    for table in tables:
        for row in table.splitlines()[2:]:
            _, promise, held, _ = row.split("|")
            assert promise.strip()
            assert re.fullmatch(r"(`tests/[\w/]+\.py::test_\w+`(, )?)+", held.strip()), row


def test_it_is_linked(root: Path) -> None:
    assert "(docs/security.md)" in (root / "README.md").read_text()
    assert "(security.md)" in (root / "docs" / "operations.md").read_text()
