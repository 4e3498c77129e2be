"""Who may come in: slots for sequences, and room for prompt tokens that wait. A refusal comes
before anything is tokenised, though after the body was read and validated.

reserve(n) ── before tokenising ──▶ check_tokens(k) ── after ──▶ engine ── … ──▶ release(n)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NoReturn

from server.errors import InvalidRequest, Overloaded

REASONS = ("max_queued_requests", "max_queued_tokens")
MAX_RETRY_SECONDS = 30


class Admission:
    """Counts sequences in flight. Used on the event loop's thread only, so that check and count are one."""

    def __init__(
        self, max_running: int, max_queued: int, max_queued_tokens: int, queued_tokens: Callable[[], int]
    ) -> None:
        """`queued_tokens()`: prompt tokens of requests that the engine has not started."""
        self.max_running = max_running
        self.max_queued = max_queued
        self.max_queued_tokens = max_queued_tokens
        self.sequences = 0
        self.requests = 0
        self.rejected: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._queued_tokens = queued_tokens

    def reserve(self, sequences: int) -> None:
        """Room for all sequences of a request, or none. Raises Overloaded; InvalidRequest where it could never be."""
        limit = self.max_running + self.max_queued
        if sequences > limit:
            raise InvalidRequest(f"n: {sequences} sequences are more than this server takes ({limit})", param="n")
        if self.sequences + sequences > limit:
            self._refuse("max_queued_requests", f"{self.sequences} sequences in flight, at most {limit}", sequences)
        if self._queued_tokens() >= self.max_queued_tokens:
            self._refuse("max_queued_tokens", f"at most {self.max_queued_tokens} prompt tokens may wait", sequences)
        self.sequences += sequences
        self.requests += 1

    def check_tokens(self, tokens: int) -> None:
        """Whether so many prompt tokens may wait. Where none wait, any number may. Raises Overloaded."""
        queued = self._queued_tokens()
        if queued and queued + tokens > self.max_queued_tokens:
            self._refuse("max_queued_tokens", f"{queued} prompt tokens wait, at most {self.max_queued_tokens}", 0)

    def release(self, sequences: int) -> None:
        """The request has ended, in whatever way."""
        self.sequences -= sequences
        self.requests -= 1

    def _refuse(self, reason: str, fact: str, sequences: int) -> NoReturn:
        self.rejected[reason] += 1
        waiting = max(0, self.sequences + sequences - self.max_running)
        seconds = min(MAX_RETRY_SECONDS, 1 + waiting // self.max_running)
        raise Overloaded(f"The server is full ({fact}); try again in {seconds} s.", retry_after=seconds)
