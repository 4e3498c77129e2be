"""The engine process: `python -m scheduler.worker --fd N`, a child of the API process.

      EngineConfig ─▶ load: Progress* ─▶ Ready ─▶ loop: drain inbox, Engine.step, fill outbox ─▶ end of file: exit 0
                                      └▶ Failed, exit 2 (a fault the user can mend)

Its life hangs on the inherited socket: when the parent closes it, or dies however it may, this process ends, busy or
idle. It blocks while nobody has work.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Protocol

from kvpool.budget import BudgetError
from kvpool.disk import TierError
from model.errors import ModelError
from scheduler.channel import Channel, Closed
from scheduler.config import EngineConfig
from scheduler.engine import Message
from scheduler.messages import STACKS, Failed, Progress, Ready, StepOutput
from scheduler.tiering import Tiering

log = logging.getLogger(__name__)

USER_ERRORS = (ModelError, BudgetError, TierError)
"""Their messages are one line that the user can act on."""
EXIT_FAILED = 1
EXIT_USER_ERROR = 2


class Steps(Protocol):
    """What the loop needs of an Engine."""

    @property
    def has_work(self) -> bool: ...

    @property
    def tiering(self) -> Tiering | None: ...

    def step(self, inbox: list[Message]) -> StepOutput: ...


Report = Callable[[str, str], None]
"""Told the stage of the start and a detail."""
Factory = Callable[[EngineConfig, Report], tuple[Steps, Ready]]


def run(sock: socket.socket, factory: Factory) -> int:
    """Serve the other end of `sock` until it closes; the exit status. Owns the socket."""
    channel = Channel(sock)
    tiering: Tiering | None = None
    try:
        try:
            config = channel.config()
            engine, ready = factory(config, lambda stage, detail: channel.send(Progress(stage, detail)))
        except USER_ERRORS as error:
            channel.send(Failed(str(error)))
            channel.drain()
            return EXIT_USER_ERROR
        # What was made so far lives as long as the process: the collector, off until now, need never look at it.
        gc.freeze()
        gc.enable()
        channel.send(ready)
        if config.kv_disk is not None:
            _end_gently(sock)
        tiering = engine.tiering
        while True:
            chores = tiering is not None and tiering.has_chores
            messages = channel.receive(wait=not (engine.has_work or chores))
            if tiering is not None and not messages and not engine.has_work:
                tiering.chore()
            else:
                channel.send(engine.step(messages))
    except Closed:
        if tiering is not None:
            tiering.close()
        return 0
    finally:
        channel.close()


def _factory() -> Factory:
    """Before the configuration comes: this takes seconds, and the parent has much to import itself meanwhile."""
    from scheduler.assembly import assemble

    return assemble


def _end(signum: int, frame: FrameType | None) -> None:
    # Not sys.exit: an exception that meets a destructor is swallowed there, and the process would live on.
    os._exit(0)


def _end_gently(sock: socket.socket) -> None:
    """From now on SIGTERM does what a closed socket does, behind the step that runs: there may be something to save."""

    def end(signum: int, frame: FrameType | None) -> None:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RD)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scheduler.worker", description="The engine process; the server starts it.")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket")
    sock = socket.socket(fileno=parser.parse_args().fd)
    logging.basicConfig(level=logging.WARNING, format="engine: %(levelname)s %(name)s: %(message)s")
    # Ctrl-C reaches the whole process group: the parent decides, and may want to drain first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    faulthandler.enable()  # what a crash leaves behind
    faulthandler.register(STACKS)  # of all threads, whatever they do
    gc.disable()  # imports and loading make little garbage, and collections are a tenth of their time; see run()
    try:
        return run(sock, _factory())
    except Exception:
        log.exception("the engine failed")
        return EXIT_FAILED


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # at once: a thread that compiles would be waited for, and memory given back piece by piece
