"""The ranks of a split model as processes. Rank 0 is the engine's, and begins the others; each runs the scheduler.

    client ──▶ rank 0: Leader ── Order ──▶ rank 1: Follower        the same messages and the same time: the same plan
                    │  step ◀── sums, joins ──▶ step │             the same blocks, each with its own heads in them
                    └ Verdict ◀── Vote ──────────────┘             the same tokens, or the same failure
    client ◀── tokens

They live and die as one: a rank whose leader ends is killed by the kernel, and the leader ends as a rank ended before
it, so whoever looks after the engine's process sees one death, with its true reason.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec

from model.batch import StepResult
from model.parallel import Ranks
from model.runner import LoadedModel
from scheduler.child import python_path
from scheduler.config import EngineConfig
from scheduler.engine import Engine, Message
from scheduler.isolation import out_of_memory
from scheduler.link import Drawn, Link, Order, Setup, Verdict, Vote
from scheduler.messages import StepOutput
from scheduler.ranked import RankedRunner, Stranded
from scheduler.wire import frame

log = logging.getLogger(__name__)

FOLLOWER = (sys.executable, "-P", "-m", "scheduler.follower")
EXIT_LOST = 1
LOST_SECONDS = 5.0
"""Whoever finds another rank gone waits so long to be ended for the true reason."""


class Place(Protocol):
    """What a process is among the ranks."""

    ranks: Ranks

    def engine(self, *args: Any, **kwargs: Any) -> Engine:
        """What `Engine` makes of these arguments, for this place."""
        ...

    def clock(self) -> float:
        """The ranks' common time, in monotonic seconds. It stands still within a step until the step's verdict."""
        ...

    def executor(self, loaded: LoadedModel) -> RankedRunner: ...


class RankFailed(RuntimeError):
    """Another rank could not compute its part of a step."""


class Leader:
    """Rank 0."""

    def __init__(self, config: EngineConfig, path: Path) -> None:
        """Begins the others. `path`: the model's files. OSError where there is no room for a process."""
        size = config.tensor_parallel_size
        self._now = time.monotonic()
        self._store = os.memfd_create("ranks")  # a file without a name: nobody else finds it, nothing has to be removed
        self._links: list[Link] = []
        config = msgspec.structs.replace(config, model=str(path))
        for rank in range(1, size):
            self._begin(Setup(config, rank, f"/proc/self/fd/{self._store}"))
        self.ranks = Ranks(0, size, f"/proc/self/fd/{self._store}", lost)

    def engine(self, *args: Any, **kwargs: Any) -> Engine:
        return LeadingEngine(self, *args, **kwargs)

    def clock(self) -> float:
        return self._now

    def executor(self, loaded: LoadedModel) -> RankedRunner:
        return RankedRunner(loaded.runner, self.ranks, self._settle)

    def order(self, messages: Sequence[Message]) -> None:
        """Begin a step everywhere."""
        self._tell(Order(time.monotonic(), list(messages)))

    def _begin(self, setup: Setup) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [*FOLLOWER, "--fd", str(theirs.fileno()), "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self._store),
                env={**os.environ, "PYTHONPATH": python_path()},
            )
        threading.Thread(target=_follow, args=(setup.rank, process), name=f"rank {setup.rank}", daemon=True).start()
        link = Link(ours, lost)
        link.send(setup)
        self._links.append(link)

    def _settle(self, step: int, error: Exception | None, result: StepResult | None) -> StepResult:
        votes = [Vote(step, said(0, error)), *(link.receive(Vote) for link in self._links)]
        if others := [rank for rank, vote in enumerate(votes) if vote.step != step]:
            raise Stranded(f"ranks {others} planned another step than rank 0")
        failure = next((vote.failure for vote in votes if vote.failure is not None), None)
        drawn = None if failure is not None or result is None else Drawn.of(result)
        self._tell(Verdict(time.monotonic(), failure, drawn))
        if failure is not None or result is None:
            raise error or RankFailed(failure)
        return result

    def _tell(self, message: Order | Verdict) -> None:
        data = frame(message)
        for link in self._links:
            link.write(data)
        self._now = message.now


class LeadingEngine(Engine):
    """An Engine whose steps the other ranks make too."""

    def __init__(self, leader: Leader, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._leader = leader

    def step(self, inbox: Sequence[Message] = ()) -> StepOutput:
        self._leader.order(inbox)
        return super().step(inbox)


class Follower:
    """Any other rank."""

    def __init__(self, link: Link, setup: Setup) -> None:
        self._link = link
        self._rank = setup.rank
        self._now = 0.0
        self.ranks = Ranks(setup.rank, setup.config.tensor_parallel_size, setup.store, lost)

    def engine(self, *args: Any, **kwargs: Any) -> Engine:
        return Engine(*args, **kwargs)

    def clock(self) -> float:
        return self._now

    def executor(self, loaded: LoadedModel) -> RankedRunner:
        return RankedRunner(loaded.runner, self.ranks, self._settle)

    def serve(self, engine: Engine) -> NoReturn:
        """Make every step that the leader makes."""
        while True:
            order = self._link.receive(Order)
            self._now = order.now
            engine.step(order.messages)

    def _settle(self, step: int, error: Exception | None, result: StepResult | None) -> StepResult:
        self._link.send(Vote(step, said(self._rank, error)))
        verdict = self._link.receive(Verdict)
        self._now = verdict.now
        if verdict.drawn is None:
            raise error or RankFailed(verdict.failure)
        return verdict.drawn.result()


def said(rank: int, error: Exception | None) -> str | None:
    """What the others are told of an error: not its words, which may be private, but whether memory was short."""
    if error is None:
        return None
    return f"rank {rank}: {'out of memory' if out_of_memory(error) else type(error).__name__}"


def lost(error: Exception) -> NoReturn:
    """Another rank does not answer. Normally it has died, and this process is ended for that before this returns."""
    time.sleep(LOST_SECONDS)
    log.error("another rank does not answer: %s", error)
    _exit(EXIT_LOST)


def _follow(rank: int, process: subprocess.Popen[bytes]) -> None:
    """End as that rank ends."""
    status = process.wait()
    log.error("rank %d ended (%s); so does the engine", rank, f"signal {-status}" if status < 0 else f"status {status}")
    if status < 0:
        faulthandler.disable()
        os.kill(os.getpid(), -status)
        time.sleep(1.0)
    _exit(max(status, EXIT_LOST))


def _exit(status: int) -> NoReturn:
    """At once, whatever the other threads wait for."""
    sys.stderr.flush()
    os._exit(status)
