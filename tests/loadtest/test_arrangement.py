"""Arrangements of real processes, read back from the operating system."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from loadtest.arrangement import (
    ARRANGEMENTS,
    AS_STARTED,
    Arrangement,
    Place,
    Processes,
    compute_threads,
    may_raise,
    places,
    processor_seconds,
)
from loadtest.running import Died

CHILD = """
import hashlib, os, sys, threading, time
go, done = threading.Event(), threading.Barrier(3)
def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        hashlib.sha256(bytes(1 << 20))  # which lets go of the interpreter
def work(seconds, niceness):
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)
    go.wait()
    burn(seconds)
    done.wait()
    threading.Event().wait()
def begin(target, *args):
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    print(thread.native_id, flush=True)
begin(work, 0.2, 0)
begin(work, 0.4, 3)
begin(threading.Event().wait)
for line in sys.stdin:
    if line == "work\\n":
        go.set()
        burn(0.2)
        done.wait()
        print("done", flush=True)
    else:
        begin(threading.Event().wait)
"""
"""A main thread; a worker; one that is busier and of lower priority; an idle one. Another for each line but `work`."""
raising = pytest.mark.skipif(not may_raise(), reason="needs root or CAP_SYS_NICE")


class Child:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.seen = psutil.Process(process.pid)
        self.main = process.pid
        self.worker, self.niced, self.idle = (int(self._line()) for _ in range(3))

    def work(self) -> None:
        self._say("work")
        assert self._line() == "done"

    def one_more(self) -> int:
        self._say("thread")
        return int(self._line())

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def child() -> Iterator[Child]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield Child(process)
        finally:
            process.kill()


@pytest.fixture
def api() -> Iterator[Child]:
    with child() as made:
        yield made


@pytest.fixture
def engine() -> Iterator[Child]:
    with child() as made:
        yield made


def worked(api: Child, engine: Child) -> Processes:
    before = processor_seconds([engine.seen])
    engine.work()
    return Processes(api.seen, [engine.seen], before)


def test_the_threads_that_compute_are_known_by_their_work(engine: Child) -> None:
    before = processor_seconds([engine.seen])
    assert compute_threads(engine.seen, before) == [engine.main]
    engine.work()
    assert compute_threads(engine.seen, before) == [engine.main, engine.worker]
    assert compute_threads(engine.seen, processor_seconds([engine.seen])) == [engine.main], "what is past is past"


@raising
@pytest.mark.parametrize("arrangement", [*ARRANGEMENTS, Arrangement("all", 5, 2, 0, True)], ids=lambda one: one.name)
def test_every_thread_has_its_place_and_gets_its_old_one_back(
    arrangement: Arrangement, api: Child, engine: Child
) -> None:
    processes = worked(api, engine)
    cores = sorted(os.sched_getaffinity(0))
    usual, anywhere = os.getpriority(os.PRIO_PROCESS, 0), frozenset(cores)

    def expected(given: Arrangement) -> dict[int, Place]:
        a, e = usual + given.api_niceness, usual + given.engine_niceness
        there = anywhere if given.api_core is None else frozenset([cores[given.api_core]])
        first, second = [frozenset([cores[0]]), frozenset([cores[1 % len(cores)]])] if given.pinned else [anywhere] * 2
        return {
            **{api.main: Place(a, there), api.worker: Place(a, there), api.idle: Place(a, there)},
            **{api.niced: Place(min(19, a + 3), there), engine.niced: Place(min(19, e + 3), anywhere)},
            **{engine.main: Place(e, first), engine.worker: Place(e, second), engine.idle: Place(e, anywhere)},
        }

    for given in (arrangement, AS_STARTED, arrangement):
        processes.arrange(given)
        assert places([api.seen, engine.seen]) == expected(given)


@raising
def test_a_thread_made_since_is_arranged_as_the_main_one(api: Child, engine: Child) -> None:
    processes = worked(api, engine)
    started = Place.of(api.main)
    processes.arrange(Arrangement("", api_niceness=4, api_core=-1))
    thread = api.one_more()
    assert Place.of(thread) == Place(min(19, started.niceness + 4), frozenset([processes.cores[-1]])), "it inherits"
    processes.arrange(Arrangement("", api_niceness=2))
    assert Place.of(thread) == Place(min(19, started.niceness + 2), started.cores)


def test_threads_are_dealt_to_the_cores_in_turn(api: Child, engine: Child) -> None:
    """However many there are of either."""
    core = max(os.sched_getaffinity(0))
    for thread in processor_seconds([engine.seen]):
        os.sched_setaffinity(thread, {core})
    processes = worked(api, engine)
    processes.arrange(Arrangement("", pinned=True))
    assert processes.cores == [core]
    assert {where.cores for where in places([engine.seen]).values()} == {frozenset([core])}


def test_a_process_that_has_ended(api: Child) -> None:
    with child() as engine:
        processes = worked(api, engine)
    with pytest.raises(Died, match="has ended"):
        processes.arrange(AS_STARTED)


def test_who_may_not_raise_a_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, real = os.getpriority(os.PRIO_PROCESS, 0), os.setpriority

    def refuse(which: int, who: int, niceness: int) -> None:
        if niceness < os.getpriority(which, who):
            raise PermissionError(13, "Permission denied")
        real(which, who, niceness)

    monkeypatch.setattr(os, "setpriority", refuse)
    assert not may_raise()
    assert os.getpriority(os.PRIO_PROCESS, 0) == usual, "it was tried elsewhere"
