"""What the server counts. Values only; `exposition` gives them names when somebody scrapes.

Counting must never fail: it is plain arithmetic on the event loop's thread, and nothing here raises into a request.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from scheduler.messages import StepOutput
from server.engine_process import DEATHS
from server.streams import RequestStream

FINISH_REASONS = ("stop", "length", "abort", "error")
ENDPOINTS = ("completions", "chat", "embeddings", "responses", "messages")
STATUSES = (200, 400, 401, 404, 408, 413, 415, 429, 499, 500, 503)
METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})

# vLLM's buckets, so that dashboards and alerts made for it keep their meaning.
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
    *(640, 2560),
)
TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_SECONDS = (*(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),)
STEP_TOKENS = tuple(float(2**power) for power in (0, *range(3, 15)))
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
COUNTS = (1, 2, 5, 10, 20)
MAX_LENGTH_BUCKET = 2_000_000


def one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … up to `limit`."""
    series = (digit * 10**power for power in range(8) for digit in (1, 2, 5))
    return tuple(float(value) for value in series if value <= limit)


class Histogram:
    """Counts per bucket, and a sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Metrics:
    """Counters and histograms of the API process. What is measured per request is measured once, when it ends."""

    def __init__(self, max_model_len: int = MAX_LENGTH_BUCKET) -> None:
        lengths = one_two_five(max_model_len)
        self.live: set[RequestStream] = set()
        """Streams that are not yet counted below."""
        self.finished: Counter[tuple[str, str]] = Counter({(e, r): 0 for e in ENDPOINTS for r in FINISH_REASONS})
        """By endpoint and finish reason."""
        self.disconnects = 0
        self.engine_restarts: Counter[str] = Counter(dict.fromkeys(DEATHS, 0))
        """By why the engine before had ended."""
        self.http: Counter[tuple[str, str, int]] = Counter()
        """By route template, method and status."""
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generation_tokens = 0
        self.first_token = Histogram(FIRST_TOKEN_SECONDS)
        self.inter_token = Histogram(TOKEN_SECONDS)
        self.per_token = Histogram(TOKEN_SECONDS)
        self.e2e = Histogram(REQUEST_SECONDS)
        self.queue = Histogram(REQUEST_SECONDS)
        self.inference = Histogram(REQUEST_SECONDS)
        self.prefill = Histogram(REQUEST_SECONDS)
        self.decode = Histogram(REQUEST_SECONDS)
        self.request_prompt_tokens = Histogram(lengths)
        self.request_generation_tokens = Histogram(lengths)
        self.request_max_tokens = Histogram(lengths)
        self.request_n = Histogram(COUNTS)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.step_seconds = Histogram(STEP_SECONDS)

    @property
    def prompt_tokens(self) -> int:
        """Of all requests that the engine has started."""
        return self._prompt_tokens + sum(s.usage.prompt_tokens for s in self.live if s.timings.scheduled is not None)

    @property
    def cached_tokens(self) -> int:
        return self._cached_tokens + sum(s.usage.cached_tokens for s in self.live)

    @property
    def generation_tokens(self) -> int:
        """Read off the streams themselves, so that it and the histogram of finished requests always agree."""
        return self._generation_tokens + sum(s.usage.completion_tokens for s in self.live)

    def expect_http(self, route: str, method: str) -> None:
        """Let the series of a route exist before its first request, so that rates see that one too."""
        for status in STATUSES:
            self.http[route, method, status] += 0

    def count_http(self, route: str, method: str, status: int) -> None:
        """`route` is a template of ours and `method` one that a route has, or both say that none matched."""
        self.http[route, method if method in METHODS else "other", status] += 1

    def step(self, step: StepOutput) -> None:
        """One step of the engine; one that only applied aborts computed nothing."""
        if step.stats.step_tokens:
            self.step_tokens.observe(step.stats.step_tokens)
            self.step_seconds.observe(step.stats.step_seconds)

    def end(self, stream: RequestStream, endpoint: str, reason: str) -> None:
        """A request has ended: stop, length, abort or error. Aborted ones count like all others."""
        self.live.discard(stream)
        self.finished[endpoint, reason] += 1
        usage, timings, params = stream.usage, stream.timings, stream.submit.params
        scheduled, first, last = timings.scheduled, timings.first_token, timings.last_token
        finished = timings.finished or time.monotonic()
        self._prompt_tokens += usage.prompt_tokens if scheduled is not None else 0
        self._cached_tokens += usage.cached_tokens
        self._generation_tokens += usage.completion_tokens
        self.request_prompt_tokens.observe(usage.prompt_tokens)
        self.request_generation_tokens.observe(usage.completion_tokens)
        self.request_max_tokens.observe(params.max_tokens)
        self.request_n.observe(stream.submit.n)
        self.e2e.observe(max(0.0, finished - timings.arrival))
        if scheduled is None:
            return
        self.queue.observe(max(0.0, scheduled - timings.arrival))
        if first is None or last is None:
            return
        self.first_token.observe(max(0.0, first - timings.arrival))
        self.prefill.observe(max(0.0, first - scheduled))
        self.decode.observe(max(0.0, last - first))
        self.inference.observe(max(0.0, last - scheduled))
        longest = max(map(len, stream.tokens))
        self.per_token.observe((last - first) / (longest - 1) if longest > 1 else 0.0)
