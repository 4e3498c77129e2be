"""The worker over real socket pairs: its loop in a thread, and the whole process with a fake engine or no model."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from model.errors import ModelNotFound
from scheduler import worker
from scheduler.config import EngineConfig
from scheduler.engine import Message
from scheduler.messages import (
    Abort,
    EmbeddingConfig,
    Failed,
    FinishReason,
    FromEngine,
    Progress,
    Ready,
    SamplingParams,
    StepOutput,
    Submit,
    ToEngine,
)
from scheduler.wire import frame, from_engine_frames

if TYPE_CHECKING:
    from tests.scheduler.conftest import World

ROOT = Path(__file__).parents[2]
READY = Ready(
    max_model_len=100,
    vocab_size=40,
    num_blocks=64,
    block_size=4,
    kv_bytes_per_token=1,
    kv_bytes=256,
    device="cpu",
    dtype="float32",
    kv_cache_dtype="float32",
    attention="fake",
    weight_bytes=1,
    load_seconds=0.0,
    embedding=EmbeddingConfig(hidden_size=8),
)
CHILD = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests" / "scheduler")!r}]
from conftest import World
from test_worker import READY
from scheduler import worker
worker._factory = lambda: lambda config, report: (World().engine, READY)
sys.exit(worker.main())
"""


class Client:
    """The API process's end, blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(30)
        self.frames = from_engine_frames()
        self.inbox: list[FromEngine] = []

    def send(self, message: ToEngine | EngineConfig) -> None:
        self.sock.sendall(frame(message))

    def next(self) -> FromEngine:
        while not self.inbox:
            data = self.sock.recv(1 << 16)
            if not data:
                raise EOFError
            self.inbox += self.frames.feed(data)
        return self.inbox.pop(0)

    def until_end(self, request: int) -> tuple[list[int], FinishReason]:
        """Tokens of a request with one sequence."""
        tokens: list[int] = []
        while True:
            message = self.next()
            assert isinstance(message, StepOutput)
            for id, token, finish in zip(message.ids, message.tokens, message.finishes, strict=True):
                if id == request:
                    tokens += [token] if token >= 0 else []
                    if finish:
                        return tokens, FinishReason(finish)


def submit(id: int, max_tokens: int, prompt: int = 10) -> Submit:
    params = SamplingParams(max_tokens=max_tokens, seed=0, top_k=prompt)
    return Submit(id=id, prompt_ids=[i % 40 for i in range(prompt)], params=params)


class Thread:
    """worker.run in a thread."""

    def __init__(self, factory: worker.Factory) -> None:
        ours, theirs = socket.socketpair()
        self.client = Client(ours)
        self.status: int | None = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(theirs, factory))
        self.thread.start()

    def _run(self, sock: socket.socket, factory: worker.Factory) -> None:
        try:
            self.status = worker.run(sock, factory)
        except BaseException as error:
            self.error = error

    def end(self) -> int | None:
        self.client.sock.close()
        self.thread.join(30)
        assert not self.thread.is_alive()
        return self.status


def fake(world: type[World]) -> worker.Factory:
    def factory(config: EngineConfig, report: worker.Report) -> tuple[worker.Steps, Ready]:
        report("weights", f"of {config.model}")
        return world().engine, READY

    return factory


def test_conversation(world: type[World]) -> None:
    it = Thread(fake(world))
    # A byte at a time: the first message must not depend on how it arrives.
    for byte in frame(EngineConfig(model="m")):
        it.client.sock.send(bytes([byte]))
    assert it.client.next() == Progress("weights", "of m")
    assert it.client.next() == READY
    it.client.send(submit(1, 5))
    tokens, finish = it.client.until_end(1)
    oracle = world()
    assert oracle.add([i % 40 for i in range(10)], max_tokens=5) == 1
    assert (tokens, finish) == (oracle.expected(1, 0).tokens, FinishReason.LENGTH)
    it.client.send(submit(2, 10_000))
    assert isinstance(it.client.next(), StepOutput)
    it.client.send(Abort(2))
    assert it.client.until_end(2)[1] is FinishReason.ABORT
    it.client.send(Abort(77))
    output = it.client.next()
    assert isinstance(output, StepOutput)
    assert (output.ids, output.stats.blocks_active) == ([], 0)
    assert it.end() == 0
    assert it.error is None


def test_parent_goes_away_while_it_works(world: type[World]) -> None:
    it = Thread(fake(world))
    it.client.send(EngineConfig())
    it.client.send(submit(1, 10_000))
    it.client.next()
    assert it.end() == 0
    assert it.error is None


def test_parent_goes_away_before_the_configuration(world: type[World]) -> None:
    assert Thread(fake(world)).end() == 0


def test_user_error() -> None:
    def factory(config: EngineConfig, report: worker.Report) -> tuple[worker.Steps, Ready]:
        raise ModelNotFound("model: there is no such file")

    it = Thread(factory)
    it.client.send(EngineConfig())
    assert it.client.next() == Failed("model: there is no such file")
    with pytest.raises(EOFError):
        it.client.next()
    assert it.end() == worker.EXIT_USER_ERROR


def test_slow_reader_stalls_no_step(world: type[World]) -> None:
    """More steps run than the socket holds while nobody reads; then everything arrives, in order."""
    engine = world(blocks=2000).engine
    done = threading.Event()

    class Watched:
        has_work = property(lambda self: engine.has_work)
        tiering = None

        def step(self, inbox: list[Message]) -> StepOutput:
            output = engine.step(inbox)
            if output.finishes and output.finishes[0]:
                done.set()
            return output

    it = Thread(lambda config, report: (Watched(), READY))
    it.client.send(EngineConfig())
    it.client.send(submit(1, 1500))
    assert done.wait(120), "the engine waited for its reader"
    assert it.client.next() == READY
    tokens, finish = it.client.until_end(1)
    assert (len(tokens), finish) == (1500, FinishReason.LENGTH)
    assert it.end() == 0


# ---- the process ----


class Process:
    def __init__(self, *command: str) -> None:
        ours, theirs = socket.socketpair()
        self.client = Client(ours)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *command, "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                stderr=subprocess.PIPE,
                text=True,
            )

    def cpu(self) -> float:
        """Seconds of CPU it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=30)
        self.client.sock.close()
        return self.process.returncode, errors


@pytest.fixture
def child() -> Iterator[Process]:
    it = Process("-c", CHILD)
    it.client.send(EngineConfig())
    assert it.client.next() == READY
    yield it
    if it.process.poll() is None:
        it.process.kill()
        it.end()


def test_idle_uses_no_cpu_and_ends_with_its_parent(child: Process) -> None:
    child.client.send(submit(1, 20))
    child.client.until_end(1)
    before = child.cpu()
    ready, _, _ = select.select([child.client.sock], [], [], 1.0)
    assert not ready, "an idle engine says nothing"
    assert child.cpu() - before <= 0.02
    child.client.sock.close()
    assert child.end() == (0, "")


def test_signals(child: Process) -> None:
    child.process.send_signal(signal.SIGINT)
    child.client.send(submit(1, 20))
    assert child.client.until_end(1)[1] is FinishReason.LENGTH
    child.process.send_signal(signal.SIGTERM)
    assert child.end() == (0, "")


def test_parent_dies() -> None:
    """Killed, not closed: the kernel closes its end of the socket, and the engine ends."""
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests" / "scheduler")!r}]
from test_worker import CHILD, EngineConfig, Process, READY, submit
it = Process("-c", CHILD)
it.client.send(EngineConfig())
assert it.client.next() == READY
it.client.send(submit(1, 10**6))
print(it.process.pid, flush=True)
it.process.wait()
""",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    engine = int(parent.stdout.readline())
    handle = os.pidfd_open(engine)
    try:
        parent.kill()
        parent.wait()
        ended, _, _ = select.select([handle], [], [], 20)
        assert ended, "the engine outlived its parent"
    finally:
        os.close(handle)
        parent.stdout.close()


def test_unknown_model_is_one_line_and_status_2() -> None:
    it = Process("-m", "scheduler.worker")
    it.client.send(EngineConfig(model="/nonexistent/model.gguf", device="cpu"))
    message = it.client.next()
    while isinstance(message, Progress):
        message = it.client.next()
    assert isinstance(message, Failed)
    assert "/nonexistent/model.gguf" in message.message
    assert "\n" not in message.message
    assert it.end() == (2, "")
