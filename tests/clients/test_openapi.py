"""schemathesis over /openapi.json: bodies as it describes them and bodies that it forbids.

One seed gives every route as many cases as hypothesis finds; of large bodies it soon gives up. So routes that have not
had their share get further seeds. CASES=200 makes a quick run of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from tests.clients.conftest import ROOT

CASES = int(os.environ.get("CASES", "2000"))
SHARE = CASES // 20
"""Cases of every route with a body, at least."""
SEEDS = 40
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance", "unsupported_method", "allow_header_conformance"),
)


def cases(url: str, folder: Path, seed: int, most: int, paths: list[str]) -> Counter[str]:
    """How many each route had; of all of them where no paths are given. Fails where an answer is not described."""
    words = ["run", f"{url}/openapi.json", "--checks", ",".join(CHECKS), "--mode", "all", "--phases", "fuzzing"]
    words += ["--max-examples", str(most), "--seed", str(seed), "--continue-on-failure", "--request-timeout", "90"]
    words += [word for path in paths for word in ("--include-path", path)]
    counted = folder / "cases"
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.clients.bounds", "PYTHONPATH": str(ROOT)}
    environment["COUNTED"] = str(counted)
    command = [sys.executable, "-m", "schemathesis.cli", *words, "--no-color"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return Counter(json.loads(counted.read_text()))


@pytest.mark.timeout(3600)
def test_every_answer_is_described(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No 5xx, no answer that takes 90 s, no status, type, header or body that the document does not have."""
    with urllib.request.urlopen(f"{url}/openapi.json") as reply:
        routes = json.load(reply)["paths"]
    bodies = [path for path, methods in routes.items() if "requestBody" in methods.get("post", {})]
    found, short = Counter[str](), bodies
    for seed in range(1, SEEDS + 1):
        found += cases(url, tmp_path, seed, SHARE, [] if seed == 1 else short)
        short = [path for path in bodies if found[f"POST {path}"] < SHARE]
        if not short and found.total() < CASES:
            short = bodies
        if not short:
            break
    with capsys.disabled():
        sys.stdout.writelines(f"\n{count:5} {route}" for route, count in sorted(found.items()))
        sys.stdout.write(f"\n{found.total():5} cases, {seed} seeds\n")
    assert not short
