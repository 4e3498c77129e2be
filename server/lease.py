"""What each key may do: requests and tokens a minute, sequences at a time. A request's way through them:

    POST ── Lease.enter ──────▶ body ── Lease.widen ──▶ slots ── Lease.reserve ──▶ engine ── Lease.settle ──▶ close
            a request, a sequence       n counts n              tokens, by guess             tokens, truly

A lease is one request's share of its key's limits. Whatever becomes of the request, `close` gives back what was only
lent. A request that the server refuses (429, 503) does not count as one.

At its start a request reserves its prompt and ASSUMED_TOKENS for each answer, or max_tokens where that is less; at its
end the true number counts. So what a client states or leaves out makes no difference; an answer longer than that leaves
a debt, and the key waits until it is paid off.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NoReturn

from server.bucket import Bucket
from server.errors import InvalidRequest, RateLimited
from server.key_file import ApiKey
from server.ledger import Ledger

ASSUMED_TOKENS = 1024
"""Of an answer that has not been written yet."""
BUSY_SECONDS = 1.0
"""After so long a key that has all its sequences running should ask again: nobody knows when one ends."""
SLACK = 1e-6
"""What rounding may make of a whole number of milliseconds."""


class Limits:
    """The state of one key's limits, kept by its name as long as the server runs."""

    def __init__(self) -> None:
        self.key: ApiKey | None = None
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.running = 0
        """Sequences, and requests that have none yet."""

    def adopt(self, key: ApiKey, now: float) -> None:
        """The key as the file has it now. What was used up stays so."""
        if key is not self.key:
            self.key = key
            self.requests = _bucket(self.requests, key.requests_per_minute, now)
            self.tokens = _bucket(self.tokens, key.tokens_per_minute, now)

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """OpenAI's, of every bucket there is."""
        return [
            (f"x-ratelimit-{name}-{kind}".encode(), value.encode())
            for kind, bucket in (("requests", self.requests), ("tokens", self.tokens))
            if bucket is not None
            for name, value in (
                ("limit", str(bucket.limit)),
                ("remaining", str(bucket.remaining(now))),
                ("reset", duration(bucket.reset(now))),
            )
        ]


def _bucket(old: Bucket | None, limit: int | None, now: float) -> Bucket | None:
    if limit is None:
        return None
    if old is None:
        return Bucket(limit, now)
    old.resize(limit, now)
    return old


class Lease:
    """One request's share of its key's limits; without a key, nothing but a line in the ledger."""

    def __init__(
        self,
        limits: Limits | None,
        ledger: Ledger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.key = limits.key if limits is not None else None
        self._limits = limits if limits is not None else Limits()
        self._ledger = ledger
        self._clock = clock
        self._sequences = 0
        self._counted = 0
        self._reserved = 0

    @property
    def name(self) -> str:
        """The key's; without keys, empty."""
        return self.key.name if self.key is not None else ""

    @property
    def max_sequences(self) -> int | None:
        """That one request may have."""
        return self.key.max_concurrency if self.key is not None else None

    def enter(self) -> None:
        """A request, before its body is read. Raises RateLimited."""
        limits, now = self._limits, self._clock()
        self._check_room(1)
        if limits.tokens is not None and (wait := limits.tokens.wait(1, now)):
            self._refuse("tokens_per_minute", f"{limits.tokens.limit} tokens a minute", wait)
        if limits.requests is not None:
            if wait := limits.requests.wait(1, now):
                self._refuse("requests_per_minute", f"{limits.requests.limit} requests a minute", wait)
            limits.requests.charge(1, now)
            self._counted = 1
        self._sequences = 1
        limits.running += 1

    def widen(self, sequences: int) -> None:
        """The request has so many sequences. Raises RateLimited; InvalidRequest where it could never have them."""
        most = self.max_sequences
        if most is not None and sequences > most:
            text = f"n: {sequences} sequences are more than this key may run at once ({most})"
            raise InvalidRequest(text, param="n", headers={"x-should-retry": "false"})
        self._check_room(sequences - self._sequences)
        self._limits.running += sequences - self._sequences
        self._sequences = sequences

    def reserve(self, prompt: int, answers: int, first: bool) -> None:
        """Tokens of prompts and of their answers at most. What comes after the `first` prompts of a request is taken
        unasked. Raises RateLimited; InvalidRequest where the prompts alone are more than a minute's worth."""
        bucket, now = self._limits.tokens, self._clock()
        if bucket is None:
            return
        if first and prompt > bucket.limit:
            raise InvalidRequest(
                f"The prompt has {prompt} tokens, more than the {bucket.limit} that this key may use in a minute.",
                code="tokens_per_minute_exceeded",
                headers={"x-should-retry": "false"},
                numbers={"prompt_tokens": prompt, "tokens_per_minute": bucket.limit},
            )
        amount = min(prompt + answers, bucket.limit)
        if first and (wait := bucket.wait(amount, now)):
            self._refuse("tokens_per_minute", f"{bucket.limit} tokens a minute", wait)
        bucket.charge(amount, now)
        self._reserved += amount

    def settle(self, prompt: int, cached: int, completion: int, aborted: bool) -> None:
        """The request has ended, having used so many tokens; of the prompt's, `cached` were not computed."""
        self._repay(prompt + completion)
        self._ledger.add(
            self.name,
            requests=1,
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=completion,
            aborted=int(aborted),
        )

    def answered(self, status: int) -> list[tuple[bytes, bytes]]:
        """The head of the answer is due; what it says of the limits."""
        now = self._clock()
        if status in (429, 503) and self._limits.requests is not None:
            self._limits.requests.charge(-self._counted, now)
            self._counted = 0
        if status == 429:
            self._ledger.add(self.name, rejected=1)
        return self._limits.headers(now)

    def close(self) -> None:
        """The request is over, in whatever way. Idempotent."""
        self._repay(0)
        self._limits.running -= self._sequences
        self._sequences = 0

    def _repay(self, used: int) -> None:
        """Reserved tokens become used ones."""
        if self._limits.tokens is not None:
            self._limits.tokens.charge(used - self._reserved, self._clock())
        self._reserved = 0

    def _check_room(self, sequences: int) -> None:
        most = self.max_sequences
        if most is not None and self._limits.running + sequences > most:
            self._refuse("max_concurrency", f"{most} sequences at a time", BUSY_SECONDS)

    def _refuse(self, reason: str, limit: str, seconds: float) -> NoReturn:
        text = f"This key may have {limit}; try again in {duration(seconds)}."
        raise RateLimited(text, retry_after=seconds, reason=reason)


def duration(seconds: float) -> str:
    """As OpenAI writes it, and Go: 20ms, 1s, 6m0s, 1m30.951s."""
    milliseconds = max(0, math.ceil(seconds * 1000 - SLACK))
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{milliseconds / 1000:g}s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return f"{hours}h{text}" if hours else text
