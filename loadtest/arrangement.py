"""How a server's processes share the cores: priorities and places of their threads, given from outside while they run.

A parallel region is as fast as its slowest thread, which is the one whose core another process takes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from loadtest.extras import extra
from loadtest.running import Died

BUSY = 0.25
"""Of the processor time of an engine's busiest thread: what each thread of its parallel regions takes at least."""
LEAST_SECONDS = 0.05
"""Of it, too: this clock ticks by hundredths."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What is different from how the processes started."""

    name: str
    api_niceness: int = 0
    """Added to what each thread had."""
    engine_niceness: int = 0
    api_core: int | None = None
    """Which of the engine's cores, -1 the last; None: as started."""
    pinned: bool = False
    """Whether each compute thread of the engine has one core, the main thread the first."""

    @property
    def niced(self) -> bool:
        return bool(self.api_niceness or self.engine_niceness)


AS_STARTED = Arrangement("as started")
ARRANGEMENTS = (
    AS_STARTED,
    Arrangement("API niced by 5", api_niceness=5),
    Arrangement("API niced by 10", api_niceness=10),
    Arrangement("API on the last core", api_core=-1),
    Arrangement("engine one to a core", pinned=True),
    Arrangement("engine one to a core, API niced by 5", api_niceness=5, pinned=True),
)


@dataclass(frozen=True, slots=True)
class Place:
    """Of one thread."""

    niceness: int
    cores: frozenset[int]

    @classmethod
    def of(cls, thread: int) -> Place:
        """Raises ProcessLookupError."""
        return cls(os.getpriority(os.PRIO_PROCESS, thread), frozenset(os.sched_getaffinity(thread)))

    def give(self, thread: int) -> None:
        """Raises ProcessLookupError; PermissionError where this user may not raise a priority."""
        os.setpriority(os.PRIO_PROCESS, thread, self.niceness)
        os.sched_setaffinity(thread, self.cores)


class Processes:
    """Of a running server, as psutil knows them. They started as they are when this is made."""

    def __init__(self, api: Any, engines: Sequence[Any], before: Mapping[int, float]) -> None:
        """before: `processor_seconds` of the engines before they worked, which tells whose work it is. Raises Died."""
        self._api, self._engines = api, engines
        self._started = places([api, *engines])
        self.cores = sorted(self._started[engines[0].pid].cores)
        self.compute = [thread for engine in engines for thread in compute_threads(engine, before)]

    def arrange(self, arrangement: Arrangement) -> None:
        """All threads that there are. Raises Died; PermissionError where this user may not raise a priority."""
        cores: dict[int, int] = {}
        if arrangement.pinned:
            cores |= {thread: self.cores[n % len(self.cores)] for n, thread in enumerate(self.compute)}
        if arrangement.api_core is not None:
            cores |= dict.fromkeys(processor_seconds([self._api]), self.cores[arrangement.api_core])
        self._add(self._api, arrangement.api_niceness, cores)
        for engine in self._engines:
            self._add(engine, arrangement.engine_niceness, cores)

    def _add(self, process: Any, niceness: int, cores: Mapping[int, int]) -> None:
        for thread in processor_seconds([process]):
            # One that was made since has the place that its maker had at that moment.
            started = self._started.get(thread, self._started[process.pid])
            place = Place(started.niceness + niceness, frozenset([cores[thread]]) if thread in cores else started.cores)
            with suppress(ProcessLookupError):
                place.give(thread)


def processor_seconds(processes: Sequence[Any]) -> dict[int, float]:
    """By thread. Raises Died."""
    try:
        return {one.id: one.user_time + one.system_time for process in processes for one in process.threads()}
    except extra("psutil").Error as error:
        raise Died(f"a process of the server has ended: {error}") from None


def places(processes: Sequence[Any]) -> dict[int, Place]:
    """By thread. Raises Died."""
    found = {}
    for thread in processor_seconds(processes):
        with suppress(ProcessLookupError):
            found[thread] = Place.of(thread)
    return found


def compute_threads(engine: Any, before: Mapping[int, float]) -> list[int]:
    """Those that share its parallel regions, the main one first. They have no names, so it is those that worked since
    `before`; one of lower priority compiles grammars, or the like. Raises Died."""
    where, main = places([engine]), engine.pid
    spent = {
        thread: seconds - before.get(thread, 0.0)
        for thread, seconds in processor_seconds([engine]).items()
        if thread in where and where[thread].niceness == where[main].niceness
    }
    least = max(BUSY * max(spent.values()), LEAST_SECONDS)
    return [main, *sorted(thread for thread in spent if thread != main and spent[thread] >= least)]


def may_raise() -> bool:
    """Whether this user may take back that a thread was niced; tried on a thread made for it."""

    def attempt() -> bool:
        thread = threading.get_native_id()
        started = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, started + 1)
        try:
            os.setpriority(os.PRIO_PROCESS, thread, started)
        except PermissionError:
            return False
        return True

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(attempt).result()
