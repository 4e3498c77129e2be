"""Probation: who may be sent to the engine, and who is to blame when it dies.

All that was in a dead engine goes into the next one, together. If that dies too, those of whom it has brought nothing
are suspects, and go in one by one: the next only once something came of the one before.

    in an engine that dies ──▶ one death ── in the next, and nothing came of it ──▶ two: a suspect, sent alone
              ▲                    │                                                  │        │ and the engine dies
              └──── a token, or an end: no deaths, whatever there was before ─────────┘        ▼
                      it fell by itself: guilty     it was killed from outside: last in line, guilty the third time

A kill from outside may hit at any time, several times. It makes somebody guilty only where it finds the same request
alone three times, with nothing come of it in between; and in between every other suspect has had its turn. Twice may be
chance: a search says nothing until its end, which lets the next search go in alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

SUSPECT = 2
"""Deaths in a row, with nothing come of the request in between."""
CHANCE = 2
"""So often a kill from outside may find a request alone by chance."""
TRIAL_SECONDS = 5.0
"""Whoever was in an engine for so long, and it still talks, holds up nobody any more: it may be a long prompt."""


class Probation:
    """Knows requests by their ids. What is not in line has been sent; its length is that of the line."""

    def __init__(self, width: int) -> None:
        """`width`: after a death, requests in the engine of which nothing has come yet; more would only be suspects."""
        self._width = width
        self._line: deque[int] = deque()
        self._silent: dict[int, float] = {}
        """Sent to this engine, and nothing came yet: when they were sent."""
        self._deaths: dict[int, int] = {}
        """Only those that have some."""
        self._alone: dict[int, int] = {}
        """Of those, how often one was the only silent request in an engine that died."""

    def __len__(self) -> int:
        return len(self._line)

    @property
    def line(self) -> Iterable[int]:
        return self._line

    def begin(self, live: Iterable[int]) -> None:
        """There is an engine, and nothing in it: everybody stands in line, suspects first."""
        order = list(live)
        suspects = [id for id in order if self._suspect(id)]
        suspects.sort(key=lambda id: self._alone.get(id, 0))
        self._line = deque(suspects + [id for id in order if not self._suspect(id)])

    def add(self, id: int) -> None:
        """A new request."""
        self._line.append(id)

    def next(self, now: float, heard: float) -> list[int]:
        """Who is to be sent now. `heard`: when the engine last spoke; while it is silent no trial ends."""
        going = []
        while self._line and (not self._deaths or self._room(self._line[0], heard)):
            id = self._line.popleft()
            self._silent[id] = now
            going.append(id)
        return going

    def progress(self, id: int) -> None:
        """A token or an end came of a request."""
        if self._silent.pop(id, None) is not None:
            self._acquit(id)

    def forget(self, id: int) -> None:
        """The request has ended, in whatever way."""
        self._silent.pop(id, None)
        self._acquit(id)
        if id in self._line:
            self._line.remove(id)

    def end(self, live: Iterable[int], outside: bool) -> int | None:
        """The engine died; `outside`: perhaps by no fault of its own. The request that is guilty, where one is."""
        held = set(self._line)
        for id in live:
            if id not in held:
                self._deaths[id] = self._deaths.get(id, 0) + 1
        guilty = None
        if len(self._silent) == 1:
            (id,) = self._silent
            if self._suspect(id) and (self._alone.get(id, 0) >= CHANCE or not outside):
                guilty = id
            self._alone[id] = self._alone.get(id, 0) + 1
        self._silent.clear()
        return guilty

    def _room(self, id: int, heard: float) -> bool:
        """Whether the head of the line may go."""
        silent = [other for other, sent in self._silent.items() if heard - sent < TRIAL_SECONDS]
        trial = self._suspect(id) or any(map(self._suspect, silent))
        return len(silent) < (1 if trial else self._width)

    def _suspect(self, id: int) -> bool:
        return self._deaths.get(id, 0) >= SUSPECT

    def _acquit(self, id: int) -> None:
        if self._deaths.pop(id, None) is not None:
            self._alone.pop(id, None)
