"""Who may come in: memory for bodies, slots for sequences, and room for prompt tokens that wait.

check ── body: hold_bytes ──▶ reserve(n) ── tokenising ──▶ check_tokens ──▶ engine ── … ──▶ release(n), free_bytes

Who is refused is told when there will be room: the rate at which sequences end and prompts are computed, measured while
others wait for just that, gives each of them a place in an imaginary line. So a crowd that is refused at once comes
back one by one.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from server.errors import REFUSALS, InvalidRequest, Overloaded

MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1, 30
MAX_BODY_BYTES = 256 * 2**20
"""Of the bodies of all requests in flight."""
HALF_LIFE = 20.0
"""Busy seconds after which a measurement counts half."""
GUESSED_TOKENS, GUESSED_SECONDS = 256, 0.25
"""Of a prompt that was not read yet, and how long one takes, before any was computed."""


class Rate:
    """How many a second, by what was seen lately and a little that is imagined: enough to begin with, and soon
    outweighed."""

    def __init__(self, count: float, seconds: float) -> None:
        """`count` in `seconds` is what is imagined."""
        self._imagined = count, seconds
        self._count = self._seconds = 0.0

    def see(self, count: float, seconds: float) -> None:
        """So many in as many seconds more."""
        fade = 0.5 ** (seconds / HALF_LIFE)
        self._count = self._count * fade + count
        self._seconds = self._seconds * fade + seconds

    @property
    def per_second(self) -> float:
        count, seconds = self._imagined
        return (self._count + count) / (self._seconds + seconds)


class Admission:
    """Counts sequences in flight. Used on the event loop's thread only, so that check and count are one."""

    def __init__(
        self,
        max_running: int,
        max_queued: int,
        max_queued_tokens: int,
        queued_tokens: Callable[[], int],
        computed_tokens: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`queued_tokens()`: prompt tokens of requests that the engine has not started. `computed_tokens()`: of all
        prompts, those that it has computed so far."""
        self.max_running = max_running
        self.max_queued = max_queued
        self.max_queued_tokens = max_queued_tokens
        self.sequences = 0
        self.requests = 0
        self.body_bytes = 0
        self.rejected: Counter[str] = Counter(dict.fromkeys(REFUSALS, 0))
        """Answers with 429, by reason; whoever answers counts."""
        self._queued_tokens = queued_tokens
        self._computed_tokens = computed_tokens
        self._clock = clock
        self._ends = Rate(1.0, 1.0 / max_running)
        self._prompts = Rate(GUESSED_TOKENS, GUESSED_SECONDS)
        self._seen = clock(), 0, False
        """As of the last change: when it was, tokens computed until then, whether tokens waited."""
        self._line = 0.0
        """When the last of those who were refused gets room, by the clock."""

    @property
    def max_sequences(self) -> int:
        return self.max_running + self.max_queued

    def check(self, sequences: int = 1) -> None:
        """Whether so many sequences would be admitted now. Raises Overloaded."""
        limit = self.max_sequences
        if self.sequences + sequences > limit:
            fact = f"{self.sequences} sequences in flight, at most {limit}"
            self._refuse("max_queued_requests", fact, sequences, self._ends)
        if self._queued_tokens() >= self.max_queued_tokens:
            fact = f"at most {self.max_queued_tokens} prompt tokens may wait"
            self._refuse("max_queued_tokens", fact, GUESSED_TOKENS, self._prompts)

    def hold_bytes(self, count: int) -> int:
        """Count bytes of a body as they come, until `free_bytes`; the same number. Raises Overloaded."""
        if self.body_bytes + count > MAX_BODY_BYTES:
            fact = f"the bodies of all requests have {MAX_BODY_BYTES} bytes at most"
            self._refuse("max_body_bytes", fact, 1, self._ends)
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
        self._measure(0)
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
            fact = f"{queued} prompt tokens wait, at most {self.max_queued_tokens}"
            self._refuse(
                "max_queued_tokens", fact, min(queued, queued + tokens - self.max_queued_tokens), self._prompts
            )

    def release(self, sequences: int) -> None:
        """The request has ended, in whatever way."""
        self._measure(sequences)
        self.sequences -= sequences
        self.requests -= 1

    def _measure(self, ended: int) -> None:
        """What was done since the last change. Quiet times say nothing of what the server can do."""
        before, computed_before, waited = self._seen
        now, computed = self._clock(), self._computed_tokens()
        if self.sequences >= self.max_running:
            self._ends.see(ended, now - before)
        if waited:
            self._prompts.see(max(0, computed - computed_before), now - before)
        self._seen = now, computed, self._queued_tokens() > 0

    def _refuse(self, reason: str, fact: str, missing: int, rate: Rate) -> NoReturn:
        """`missing`: what has to be worked off, at the `rate` at which that is done, to make room for this one."""
        self._measure(0)
        now = self._seen[0]
        self._line = min(max(now, self._line) + missing / rate.per_second, now + MAX_RETRY_SECONDS)
        wait = max(MIN_RETRY_SECONDS, self._line - now)
        raise Overloaded(
            f"The server is full ({fact}); try again in {math.ceil(wait)} s.", retry_after=wait, reason=reason
        )
