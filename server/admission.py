"""Who may come in: memory for bodies, slots for sequences, and room for prompt tokens that wait.

check ── body: hold_bytes ──▶ reserve(n) ── tokenising ──▶ check_tokens ──▶ engine ── … ──▶ release(n), free_bytes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from server.errors import InvalidRequest, Overloaded

REASONS = ("max_queued_requests", "max_queued_tokens", "max_body_bytes")
MAX_RETRY_SECONDS = 30
MAX_BODY_BYTES = 256 * 2**20
"""Of the bodies of all requests in flight."""


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
        self.body_bytes = 0
        self.rejected: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._queued_tokens = queued_tokens

    @property
    def max_sequences(self) -> int:
        return self.max_running + self.max_queued

    def check(self, sequences: int = 1) -> None:
        """Whether so many sequences would be admitted now. Raises Overloaded."""
        limit = self.max_sequences
        if self.sequences + sequences > limit:
            self._refuse("max_queued_requests", f"{self.sequences} sequences in flight, at most {limit}", sequences)
        if self._queued_tokens() >= self.max_queued_tokens:
            self._refuse("max_queued_tokens", f"at most {self.max_queued_tokens} prompt tokens may wait", sequences)

    def hold_bytes(self, count: int) -> int:
        """Count bytes of a body as they come, until `free_bytes`; the same number. Raises Overloaded."""
        if self.body_bytes + count > MAX_BODY_BYTES:
            self._refuse("max_body_bytes", f"the bodies of all requests have {MAX_BODY_BYTES} bytes at most", 1)
        self.body_bytes += count
        return count

    def free_bytes(self, count: int) -> None:
        """The request is over."""
        self.body_bytes -= count

    def reserve(self, sequences: int) -> None:
        """Room for all sequences of a request, or none. Raises Overloaded; InvalidRequest where it could never be."""
        limit = self.max_sequences
        if sequences > limit:
            raise InvalidRequest(f"n: {sequences} sequences are more than this server takes ({limit})", param="n")
        self.check(sequences)
        self.sequences += sequences
        self.requests += 1

    @contextmanager
    def slot(self) -> Iterator[None]:
        """One sequence's slot, for work that never reaches the engine. Raises Overloaded."""
        self.reserve(1)
        try:
            yield
        finally:
            self.release(1)

    def check_tokens(self, tokens: int) -> None:
        """Whether so many prompt tokens may wait. Where none wait, any one prompt may. Raises Overloaded."""
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
