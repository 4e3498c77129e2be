"""The octavo command as a process, with a fake engine as its child: start, signals, drain, exit status, orphans."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.running import COMPLETIONS, events

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = """
import sys
from server import engine_process
engine_process.WORKER = (sys.executable, "-m", "tests.server.fake_engine", "--interval", "0.02")
from server.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@dataclass
class Process:
    process: subprocess.Popen[str]
    url: str

    def engine(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def wait(self, seconds: float = 10) -> int:
        return self.process.wait(seconds)

    def log(self) -> str:
        """All it wrote; after its end."""
        assert self.process.stderr is not None
        return self.process.stderr.read()


@contextmanager
def daemon(*flags: str) -> Iterator[Process]:
    """A server on a free port, ready. Killed at the end where it still runs."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, "serve", "--port", str(port), *flags],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    running = Process(process, f"http://127.0.0.1:{port}")
    try:
        until(lambda: status(running, "/ready") == 200, 60)
        yield running
    finally:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children():
                child.kill()
            process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def status(process: Process, path: str) -> int:
    """0 where nobody answers."""
    try:
        return httpx.get(process.url + path, timeout=5).status_code
    except httpx.TransportError:
        return 0


def until(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.01)


def stream(process: Process, max_tokens: int) -> list[Any]:
    body = {"prompt": "x", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    return events(httpx.post(process.url + COMPLETIONS, json=body, timeout=30).text)


def in_flight(process: Process) -> float:
    text = httpx.get(process.url + "/metrics").text
    found = re.search(r"^octavo_requests_running (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def port_is_free(process: Process) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", int(process.url.rpartition(":")[2])))
        except OSError:
            return False
    return True


def test_sigterm_lets_streams_finish() -> None:
    """Not ready at once, new requests refused with 503, running ones whole, exit status 0, nothing left behind."""
    with daemon("--drain-timeout", "20") as process, ThreadPoolExecutor(8) as pool:
        engine = process.engine()
        streams = [pool.submit(stream, process, 100) for _ in range(5)]
        until(lambda: in_flight(process) == 5, 10)
        process.process.send_signal(signal.SIGTERM)
        until(lambda: status(process, "/ready") == 503, 1)
        assert status(process, "/health") == 200
        refused = httpx.post(process.url + COMPLETIONS, json={"prompt": "x"})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert refused.headers["connection"] == "close"
        for done in streams:
            chunks = done.result(20)
            assert chunks[-1] == "[DONE]"
            assert chunks[-2]["choices"][0]["finish_reason"] == "length"
        assert process.wait() == 0
        assert not engine.is_running()
        assert port_is_free(process)
        log = process.log()
    for stage in ("model", "weights", "ready", "drain"):
        assert re.search(rf"INFO +octavo +{stage} ", log), log
    assert process.url in log
    assert "Traceback" not in log


def test_sigterm_ends_what_takes_too_long() -> None:
    """With an error event and [DONE], a clean end of the body, and status 0."""
    with daemon("--drain-timeout", "0.3") as process, ThreadPoolExecutor(2) as pool:
        running = pool.submit(stream, process, 900)
        body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}
        whole = pool.submit(httpx.post, process.url + COMPLETIONS, json=body, timeout=30)
        until(lambda: in_flight(process) == 2, 10)
        process.process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        chunks = running.result(10)
        assert chunks[-1] == "[DONE]"
        assert chunks[-2]["error"]["code"] == "unavailable"
        assert whole.result(10).status_code == 503
        assert process.wait() == 0
        assert time.monotonic() - started < 5
        assert "Traceback" not in process.log()


def test_a_second_signal_ends_at_once() -> None:
    with daemon("--drain-timeout", "60") as process, ThreadPoolExecutor(1) as pool:
        engine = process.engine()
        running = pool.submit(stream, process, 900)
        until(lambda: in_flight(process) == 1, 10)
        process.process.send_signal(signal.SIGINT)
        until(lambda: status(process, "/ready") == 503, 2)
        process.process.send_signal(signal.SIGTERM)
        process.wait(3)
        until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, 3)
        assert port_is_free(process)
        assert running.exception(10) is not None


def test_an_engine_that_dies() -> None:
    """Where no other may follow: clients are told, the probes say so, and the server ends with an error status."""
    with daemon("--max-engine-restarts", "0") as process, ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, process, 900)
        until(lambda: in_flight(process) == 1, 10)
        process.engine().kill()
        until(lambda: status(process, "/health") == 503, 1)
        chunks = running.result(10)
        assert chunks[-2]["error"]["code"] == "engine_error"
        assert chunks[-1] == "[DONE]"
        assert process.wait() == 1
        assert "the engine process ended" in process.log()


def test_an_engine_that_is_replaced() -> None:
    """The stream goes on in the next one, token by token as if nothing had been; who comes meanwhile waits for it."""
    with daemon() as process, ThreadPoolExecutor(2) as pool:
        whole = stream(process, 200)
        running = pool.submit(stream, process, 200)
        until(lambda: in_flight(process) == 1, 10)
        process.engine().kill()
        until(lambda: status(process, "/ready") == 503, 2)
        late = pool.submit(stream, process, 20)
        assert status(process, "/health") == 200
        assert text(running.result(60)) == text(whole)
        assert text(whole).startswith(text(late.result(60)))
        assert status(process, "/ready") == 200
        process.process.terminate()
        assert process.wait() == 0
        assert "the engine serves again" in process.log()


def text(chunks: list[Any]) -> str:
    return "".join(choice["text"] for chunk in chunks[:-1] for choice in chunk["choices"])


def test_the_engine_does_not_outlive_the_server() -> None:
    with daemon() as process:
        engine = process.engine()
        process.process.kill()
        process.wait()
        until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, 5)


def test_sigterm_while_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, "serve", "--port", str(port)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        until(lambda: status(Process(process, f"http://127.0.0.1:{port}"), "/health") == 503, 60)
        process.terminate()
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


FAULTS: list[tuple[list[str], str]] = [
    (["./no-such-folder"], "no-such-folder"),
    (["/no/such/model.gguf"], "model.gguf"),
    (["--kv-cache-memory", "lots"], "--kv-cache-memory"),
    (["--port", "70000"], "--port"),
    (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
    (["--no-such-flag"], "no-such-flag"),
    (["--config", "/nowhere.yaml"], "/nowhere.yaml"),
]


@pytest.mark.parametrize(("flags", "named"), FAULTS)
def test_a_fault_at_the_start_is_one_line(flags: list[str], named: str) -> None:
    port = [] if "--port" in flags else ["--port", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "server", "serve", *port, *flags], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert named in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "server", "serve", "--port", port],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert port in line


def test_an_engine_that_cannot_start(tmp_path: Path) -> None:
    """Its one line becomes ours. The real worker, and a file that is no model."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 64)
    done = subprocess.run(
        [sys.executable, "-m", "server", "serve", "--port", "0", str(broken)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 2, done.stderr
    assert "broken.gguf" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_modules_are_imported() -> None:
    program = """
import sys

class Impatient:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Impatient())
from server.__main__ import main
sys.exit(main(["serve", "--port", "0"]))
"""
    for module in ("server.cli", "server.settings", "pydantic", "server.daemon", "uvicorn"):
        done = subprocess.run(
            [sys.executable, "-c", program, module], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (130, ""), module


def test_version_and_help() -> None:
    def octavo(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "server", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout

    assert octavo("--version").startswith("octavo ")
    assert "serve" in octavo("--help")
    assert "--kv-cache-memory" in octavo("serve", "--help")
