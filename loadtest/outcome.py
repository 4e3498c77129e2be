"""What became of one request, as its client saw it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request did not end well."""

    kind: str
    """Short, for counting: "HTTP 429", "connection", "timeout", …"""
    message: str


@dataclass(slots=True)
class Outcome:
    """All times are seconds on one monotonic clock."""

    scheduled: float
    """When it was due. In a closed loop that is when it was sent."""
    sent: float
    input_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    """Input tokens that the server took from a cache, where it says so."""
    counted: bool = False
    """Whether the token counts come from the server's `usage`."""
    arrivals: list[float] = field(default_factory=list)
    """When each piece of content came."""
    beats: list[float] = field(default_factory=list)
    """When each piece with tokens came, text or not, where the server names them (`return_token_ids`)."""
    end: float = 0.0
    failure: Failure | None = None

    @property
    def ttft(self) -> float:
        """From when it was due to its first content; to its end, where no token had any text."""
        return (self.arrivals[0] if self.arrivals else self.end) - self.scheduled

    @property
    def e2el(self) -> float:
        return self.end - self.scheduled

    @property
    def tpot(self) -> float | None:
        """None where there is no second token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itls(self) -> list[float]:
        return [b - a for a, b in pairwise(self.arrivals)]
