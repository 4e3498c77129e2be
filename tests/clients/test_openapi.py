"""schemathesis over /openapi.json: bodies as it describes them and bodies that it forbids."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import ROOT

CASES = 2000
PER_OPERATION = 110
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance", "unsupported_method", "allow_header_conformance"),
)


@pytest.mark.timeout(1200)
def test_every_answer_is_described(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No 5xx, no answer that takes 30 s, no status, type, header or body that the document does not have."""
    words = ["run", f"{url}/openapi.json", "--checks", ",".join(CHECKS), "--mode", "all", "--phases", "fuzzing"]
    words += ["--max-examples", str(PER_OPERATION), "--seed", "1", "--continue-on-failure", "--request-timeout", "30"]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.clients.bounds", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "schemathesis.cli", *words, "--no-color"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (generated,) = re.findall(r"([\d,]+) generated", done.stdout)
    with capsys.disabled():
        sys.stdout.write(f"\n{generated} cases\n")
    assert int(generated.replace(",", "")) >= CASES
