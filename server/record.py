"""What is known of one HTTP request once it has ended: for its line in the log and for its span.

    middleware.Requests opens it ── routes and Generation add what they learn ──▶ logs, tracing

It holds names, numbers and times; never a prompt, a text or a key.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from model.params import SamplingParams
from server.streams import RequestStream

RECORD: ContextVar[Record | None] = ContextVar("record", default=None)
"""Of the request at hand."""


@dataclass(slots=True)
class Record:
    """Times in milliseconds; None where it has not happened, or does not apply."""

    id: str
    method: str
    path: str
    """Printable and short."""
    began: float = field(default_factory=time.perf_counter)
    began_ns: int = field(default_factory=time.time_ns)
    """By the wall clock."""
    route: str | None = None
    """The template; None where no route took the request."""
    status: int = 0
    duration_ms: float = 0.0
    key: str | None = None
    """The name of the client's key."""
    model: str | None = None
    endpoint: str | None = None
    """As the metrics call it."""
    params: SamplingParams | None = None
    """Of the first prompt."""
    choices: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reasons: list[str] = field(default_factory=list)
    """Of every sequence; "abort" for those whose end the client has not seen."""
    queue_ms: float | None = None
    ttft_ms: float | None = None
    error: str | None = None
    """The code of what a generation failed with."""

    def generated(self, endpoint: str, streams: Sequence[RequestStream], reasons: Sequence[Sequence[str]]) -> None:
        """A generation has ended; `reasons` holds, per stream, the finish reasons that its reader got."""
        self.endpoint = endpoint
        if not streams:
            return
        self.params = streams[0].submit.params
        self.choices = sum(stream.submit.n for stream in streams)
        self.prompt_tokens = sum(stream.usage.prompt_tokens for stream in streams)
        self.cached_tokens = sum(stream.usage.cached_tokens for stream in streams)
        self.completion_tokens = sum(stream.usage.completion_tokens for stream in streams)
        for stream, got in zip(streams, reasons, strict=True):
            missing = "abort" if stream.error is None else "error"
            self.finish_reasons += [*got, *[missing] * (stream.submit.n - len(got))]
        self.error = next((stream.error.code for stream in streams if stream.error is not None), None)
        times = [stream.timings for stream in streams]
        arrival = times[0].arrival
        self.queue_ms = _ms(arrival, [t.scheduled for t in times])
        self.ttft_ms = _ms(arrival, [t.first_token for t in times])

    def ended(self, status: int) -> None:
        self.status = status
        self.duration_ms = round((time.perf_counter() - self.began) * 1000, 1)

    def fields(self) -> dict[str, Any]:
        """What the log says, by name; nothing that is not known."""
        named: dict[str, Any] = {
            "request_id": self.id,
            "method": self.method,
            "path": self.path,
            "route": self.route,
            "status": self.status,
            "duration_ms": self.duration_ms,
            "model": self.model,
            "key": self.key,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reason": ",".join(dict.fromkeys(self.finish_reasons)) or None,
            "queue_ms": self.queue_ms,
            "ttft_ms": self.ttft_ms,
            "error": self.error,
        }
        return {name: value for name, value in named.items() if value is not None}


def _ms(since: float, times: Sequence[float | None]) -> float | None:
    """From `since` to the first of the times."""
    first = min((t for t in times if t is not None), default=None)
    return None if first is None else round(max(0.0, first - since) * 1000, 1)
