"""A token bucket: so much a minute, and never more than a minute's worth at once.

    refill, limit/60 a second ──▶ │ level ≤ limit │ ──▶ take(amount), where wait(amount) is 0

In any span of t seconds no more than limit + limit · t/60 is taken, what is given back aside. The level may fall below
zero, by what was charged without asking (`charge`); such a debt is paid off before anything is taken again.
"""

from __future__ import annotations

SLACK = 1e-6
"""What rounding may make of a level that is reached exactly."""


class Bucket:
    """Full at first. Time is passed in, in seconds, and never runs backwards."""

    __slots__ = ("_at", "_level", "limit")

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self._level = float(limit)
        self._at = now

    def resize(self, limit: int, now: float) -> None:
        """Another limit from now on; it is as full, or as deep in debt, as it was before, in parts of a minute."""
        self._level = self._refilled(now) * limit / self.limit
        self.limit = limit

    def wait(self, amount: float, now: float) -> float:
        """Seconds until so much may be taken, 0 where it may be at once. More than the limit never may."""
        missing = amount - self._refilled(now)
        return missing * 60 / self.limit if missing > SLACK else 0.0

    def charge(self, amount: float, now: float) -> None:
        """Take so much, whether it is there or not; a negative amount is given back."""
        self._level = self._refilled(now) - amount

    def remaining(self, now: float) -> int:
        """What may be taken at once, in whole units."""
        return max(0, int(self._refilled(now) + SLACK))

    def reset(self, now: float) -> float:
        """Seconds until it is full."""
        return self.wait(self.limit, now)

    def _refilled(self, now: float) -> float:
        self._level = min(float(self.limit), self._level + max(0.0, now - self._at) * self.limit / 60)
        self._at = max(self._at, now)
        return self._level
