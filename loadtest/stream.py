"""One streamed answer, read from bytes as they come.

Most events carry a piece of text and nothing else, and all that matters of them is when they came. So only events that
may carry more (those without text, and usage) are parsed as JSON; the others are only searched, which keeps the client
small beside the server on the same cores.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from loadtest.outcome import Failure, Outcome

# A key in front of a string that is not empty. Within a string the quotes would be escaped, so text can't fake it.
_CONTENT = re.compile(rb'"(?:text|content|reasoning|reasoning_content|refusal|arguments)"\s*:\s*"[^"]')
_TOKENS = re.compile(rb'"token_ids"\s*:\s*\[\s*[0-9]')
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_SEPARATOR = re.compile(rb"\r?\n\r?\n")
_DONE = b"[DONE]"


class AnswerStream:
    """Fed with bytes and times, it fills in an Outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._rest = b""
        self._last = b""
        self._done = False

    def feed(self, data: bytes, now: float) -> None:
        """Bytes that came at `now`, cut anywhere."""
        *events, self._rest = _SEPARATOR.split(self._rest + data)
        for event in events:
            # A comment or an event's name may stand before the data; nobody sends an event in more than one data line.
            at = 0 if event.startswith(b"data:") else event.find(b"\ndata:") + 1
            if event.startswith(b"data:", at):
                self._event(event[at + 5 :].strip(), now)

    def finish(self, now: float) -> None:
        """The connection ended."""
        outcome = self._outcome
        outcome.end = now if outcome.end == 0 else outcome.end
        if outcome.failure is None and not self._done and not self._finished():
            outcome.failure = Failure("stream cut", "the stream ended without [DONE] and without a finish reason")
        if not outcome.counted:
            outcome.output_tokens = len(outcome.arrivals)

    def _event(self, data: bytes, now: float) -> None:
        if data == _DONE:
            self._done = True
            return
        self._outcome.end = now
        self._last = data
        has_content = _CONTENT.search(data) is not None
        if not has_content or _USAGE.search(data):
            self._parse(data)
        if has_content and self._outcome.failure is None:
            self._outcome.arrivals.append(now)
        if _TOKENS.search(data) is not None:
            self._outcome.beats.append(now)

    def _parse(self, data: bytes) -> None:
        outcome = self._outcome
        chunk = _object(data)
        if chunk is None:
            outcome.failure = outcome.failure or Failure("bad event", f"not a JSON object: {data[:80]!r}")
        elif chunk.get("error"):
            outcome.failure = outcome.failure or Failure("error event", error_message(chunk))
        elif isinstance(usage := chunk.get("usage"), dict):
            outcome.counted = True
            outcome.output_tokens = usage.get("completion_tokens") or 0
            outcome.input_tokens = usage.get("prompt_tokens") or outcome.input_tokens
            details = usage.get("prompt_tokens_details")
            outcome.cached_tokens = (details.get("cached_tokens") or 0) if isinstance(details, dict) else 0

    def _finished(self) -> bool:
        choices = (_object(self._last) or {}).get("choices") or [{}]
        return self._outcome.counted or choices[0].get("finish_reason") is not None


def error_message(body: Any) -> str:
    """The message of an error body in any of the usual shapes, on one line."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") or error.get("detail") or error if isinstance(error, dict) else error
    return " ".join(str(message).split())[:300]


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return chunk if isinstance(chunk, dict) else None
