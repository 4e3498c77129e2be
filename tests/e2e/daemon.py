"""A real server: the octavo command as a process of its own, the demo model, real sockets."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

MODEL = "SmolLM2-135M-Instruct"
START_SECONDS = 180


@dataclass(slots=True)
class Daemon:
    """One running `octavo serve`."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    client: httpx.Client
    """One for all scrapes: a new one each time would keep a core busy with certificates."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def processes(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def metrics(self) -> dict[tuple[str | tuple[str, str], ...], float]:
        """One scrape: (name, (label, value), …) → value."""
        text = self.client.get(f"{self.url}/metrics").text
        samples = re.findall(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE)
        return {(name, *re.findall(r'(\w+)="([^"]*)"', labels)): float(value) for name, labels, value in samples}

    def metric(self, name: str, *labels: tuple[str, str]) -> float:
        """Sum of a metric's samples that carry these labels."""
        values = [v for key, v in self.metrics().items() if key[0] == name and set(labels) <= set(key)]
        assert values, f"no metric {name} {labels}"
        return sum(values)

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> float:
        """Poll until the condition holds; how long that took."""
        started = time.monotonic()
        while not condition():
            assert time.monotonic() - started < seconds, f"{what}: not within {seconds} s"
            time.sleep(0.02)
        return time.monotonic() - started

    def at_rest(self) -> bool:
        """Nothing runs or waits, and no block is held."""
        return (
            self.metric("octavo_requests_running") == 0
            and self.metric("octavo_requests_waiting") == 0
            and self.metric("octavo_kv_blocks", ("state", "active")) == 0
        )


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def serve(
    *flags: str, loaded: bool = True, program: Sequence[str] = ("-m", "server"), status: int = 0
) -> Iterator[Daemon]:
    """Run `octavo serve FLAGS`, as soon as the model is loaded or, not `loaded`, as soon as it answers at all; ends it
    with SIGTERM, where it has not ended, and asserts its exit status. `program`: what to run in the place of octavo."""
    port = free_port()
    log = Path(tempfile.mkstemp(prefix="octavo-e2e-", suffix=".log")[1])
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *program, "serve", "--port", str(port), *flags],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    daemon = Daemon(process, port, log, httpx.Client(timeout=10))

    def ready() -> bool:
        assert process.poll() is None, f"exit {process.returncode} at start:\n{log.read_text()}"
        with contextlib.suppress(httpx.HTTPError):
            return daemon.client.get(f"{daemon.url}/ready").status_code == 200 or not loaded
        return False

    try:
        daemon.wait(ready, START_SECONDS, "ready")
        yield daemon
    finally:
        daemon.client.close()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert code == status, f"exit {code}:\n{log.read_text()[-2000:]}"
    log.unlink()
