"""The server of the clients' tests: the `octavo` command of the project's own environment, as a process of its own."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
START_SECONDS = 180
NAMES = ("SmolLM2-135M-Instruct", "another-name")
"""Of the model."""


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


@pytest.fixture(scope="session", autouse=True)
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address, also in the variables in which the SDKs look for it. `OCTAVO` is the command, if it is another."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log = tmp_path_factory.mktemp("server") / "log"
    command = [*shlex.split(os.environ.get("OCTAVO", ".venv/bin/octavo")), "serve", "--port", str(port)]
    command += ["--served-model-name", ",".join(NAMES)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=ROOT)
    try:
        began = time.monotonic()
        while not _ready(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() - began < START_SECONDS, log.read_text()
            time.sleep(0.1)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("OPENAI", "ANTHROPIC"):
                patch.setenv(f"{name}_API_KEY", "none")
            patch.setenv("OPENAI_BASE_URL", f"{url}/v1")
            patch.setenv("ANTHROPIC_BASE_URL", url)
            yield url
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(40)
    assert code == 0, log.read_text()
    assert "Traceback" not in log.read_text(), log.read_text()
