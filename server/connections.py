"""All connections of a server: how many there may be, and who goes first where there are too many.

    opened ──▶ asking ──▶ answered ──▶ asking (idle, or the next request) ──▶ closed
                 │                         └ refused, and may still be sending: ending ──▶ closed
                 │ limit reached: one that is ending is closed, else the one that has asked for longest
                 └ nobody asks: the newcomer is told 503

Whoever holds connections and completes no request loses them to whoever does: slow heads, slow bodies and idle
connections cost others nothing, however many there are. The process has a file for each, and files for itself.
"""

from __future__ import annotations

import resource
from collections import Counter
from typing import Protocol

OWN_FILES = 192
"""Left for the engine's socket, grammars' processes, weights, and connections accepted in one go."""
MOST_FILES = 2**16
"""Asked of the system at most: some keep a table of all that are allowed."""
MOST_REFUSED = 32
"""Newcomers beyond the limit that are read from until they know it."""
REASONS = ("max_connections", "head_timeout", "send_timeout")


class Droppable(Protocol):
    """A connection, as far as this file cares."""

    def drop(self) -> None:
        """Hang up, without what was not sent yet."""


def allow_files() -> int:
    """Raise the process's limit of open files to what the system allows; how many connections that leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = MOST_FILES if hard == unlimited else min(hard, MOST_FILES)
    if soft != unlimited and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return room()


def room() -> int:
    """Connections that the limit of open files leaves room for."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_FILES if soft == resource.RLIM_INFINITY else max(1, soft - OWN_FILES)


class Connections:
    """Used on the event loop's thread only."""

    def __init__(self, limit: int, send_seconds: float) -> None:
        """`limit`: of connections, or fewer where there are not enough files. `send_seconds`: see `connection`."""
        self.limit = min(limit, room())
        self.send_seconds = send_seconds
        self.count = 0
        self.dropped: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        """By reason."""
        self._asking: dict[Droppable, None] = {}
        """Those whose request is not complete, longest first."""
        self._ending: dict[Droppable, None] = {}
        """Those that had their last answer, longest first."""

    def enter(self, connection: Droppable) -> bool:
        """Count a new connection, which asks. False where there is no room for it: then it must be refused."""
        self.count += 1
        if self.count > self.limit:
            self.dropped["max_connections"] += 1
            room = self.count - len(self._ending) <= self.limit
            if room or len(self._ending) > MOST_REFUSED:
                _drop_first(self._ending)
            if not room:
                if not self._asking:
                    return False
                _drop_first(self._asking)
        self._asking[connection] = None
        return True

    def asks(self, connection: Droppable) -> None:
        """It was answered, and is idle or begins its next request."""
        self._asking[connection] = None

    def answered(self, connection: Droppable) -> None:
        """Its request is complete: it keeps its place until the answer is, too."""
        self._asking.pop(connection, None)

    def ends(self, connection: Droppable) -> None:
        """It was refused for good, and stays for a moment."""
        self._asking.pop(connection, None)
        self._ending[connection] = None

    def leave(self, connection: Droppable) -> None:
        """It is closed."""
        self.count -= 1
        self._asking.pop(connection, None)
        self._ending.pop(connection, None)


def _drop_first(connections: dict[Droppable, None]) -> None:
    first = next(iter(connections))
    del connections[first]
    first.drop()
