"""What each key has used, since the server began and on each of the last days. Names, never keys.

A request counts when it ends, a refusal when it is answered. Everything is in memory, and gone with the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

DAYS = 31
"""That are kept, today included."""


@dataclass(slots=True)
class Account:
    """What was used."""

    requests: int = 0
    """That generated something, and have ended."""
    rejected: int = 0
    """Requests answered with 429."""
    aborted: int = 0
    """Of `requests`, those whose client left before the end."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt tokens, those that came from the prefix cache."""
    completion_tokens: int = 0

    def add(self, counts: dict[str, int]) -> None:
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)


class Ledger:
    """Accounts by name. On the event loop's thread only."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since 1970."""
        self.since = int(clock())
        self._clock = clock
        self._total: dict[str, Account] = {}
        self._days: dict[str, dict[str, Account]] = {}
        """By UTC date, oldest first."""

    def add(self, name: str, **counts: int) -> None:
        """Count for `name`, by fields of Account."""
        today = time.strftime("%Y-%m-%d", time.gmtime(self._clock()))
        if today not in self._days:
            self._days[today] = {}
            for date in sorted(self._days)[:-DAYS]:
                del self._days[date]
        for accounts in (self._total, self._days[today]):
            accounts.setdefault(name, Account()).add(counts)

    @property
    def names(self) -> set[str]:
        """Who has used anything."""
        return set(self._total)

    def line(self, name: str) -> dict[str, Any]:
        """Everything about one name; zeros where it has used nothing."""
        days = [
            {"date": date, **asdict(self._days[date][name])} for date in sorted(self._days) if name in self._days[date]
        ]
        return {"name": name or None, **asdict(self._total.get(name, Account())), "days": days}
