"""RequestStream: the text and stream state of one request, all its sequences."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from model.params import Logprob
from model.tokenizer import Tokenizer
from scheduler.messages import Started, Submit
from server.errors import RequestError
from server.logprobs import TokenEntry


@dataclass(slots=True, frozen=True)
class TextEvent:
    """What one sequence got since its last event: text, tokens, logprobs, and its end where it ended."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenEntry, ...] | None
    """None where none were asked for. Those of the event's text; `token_ids` may run ahead of held-back text."""
    finish_reason: str | None
    """stop or length; exactly one event per index has it, its last."""
    stop_reason: str | int | None
    """The stop string or the stop token id that ended the sequence; None for an end-of-sequence token."""


@dataclass(slots=True, frozen=True)
class StreamOptions:
    """How a request's tokens become text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """Stop strings count only where they end after so many tokens."""
    echo: bool = False
    """The first event of every sequence is the prompt's text (with its logprobs, where `params.prompt_logprobs`)."""
    token_ids: bool = False
    """Send events for tokens that bring no text yet."""
    new_text: bool = False
    """The output is a text of its own (chat), so that SentencePiece's leading space goes; else it continues the prompt."""


@dataclass(slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    """All generated tokens, the stop token included, over all sequences."""


@dataclass(slots=True)
class Timings:
    """Clock readings in seconds; None where it has not happened."""

    arrival: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None


@dataclass(slots=True, frozen=True)
class SequenceResult:
    """A whole sequence, made of its events."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenEntry, ...] | None
    finish_reason: str
    stop_reason: str | int | None


class RequestStream:
    """Fed by EngineClient on the event loop's thread; read by one consumer."""

    submit: Submit
    usage: Usage
    timings: Timings
    tokens: list[list[int]]
    """Per sequence, everything generated so far."""
    prompt_values: list[Logprob] | None
    """What the engine sent for prompt tokens 1, 2, …"""

    def __init__(
        self,
        submit: Submit,
        tokenizer: Tokenizer,
        options: StreamOptions,
        abort: Callable[[int, int | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`abort(id, index)` tells the engine to end a sequence, or with None the whole request."""
        raise NotImplementedError

    def started(self, started: Started) -> None:
        """The engine admitted it."""

    def prompt_logprobs(self, values: Sequence[Logprob]) -> None:
        """Call it before the first `feed` of the same step."""

    def feed(self, index: int, token: int, finish: int, logprob: Logprob | None) -> None:
        """One row of a step (`token` -1: only an end). Ignored for sequences that already ended."""

    def wake(self, now: float | None = None) -> None:
        """Once per step, after its rows: wakes the reader. `now`: when the step ended."""

    def fail(self, error: RequestError) -> None:
        """The reader gets what is already there, then `error` is raised to it. Tells the engine nothing."""

    def cancel(self) -> None:
        """The reader is gone: abort the request, once, unless it already ended. Idempotent."""

    def resubmit(self) -> Submit:
        """What to send to a restarted engine. Then send Abort(id, index) for every index in `finished_indices`."""
        raise NotImplementedError

    @property
    def finished_indices(self) -> list[int]:
        raise NotImplementedError

    @property
    def done(self) -> bool:
        """Every sequence ended, or the request failed or was cancelled: nothing more is expected of the engine."""
        raise NotImplementedError

    @property
    def pending_chars(self) -> int:
        """Size of the text that waits for the reader."""
        raise NotImplementedError

    def stalled_seconds(self) -> float:
        """How long the oldest unread event has been waiting; 0 where none waits."""
        raise NotImplementedError

    def events(self) -> AsyncIterator[list[TextEvent]]:
        """Everything since the last time, at most one event per sequence. Raises what `fail` was given.

        Leaving it before its end (break, cancellation, aclose) cancels the request; wrap it in contextlib.aclosing.
        """
        raise NotImplementedError

    async def collect(self) -> list[SequenceResult]:
        """Drain to the end: one result per sequence, in order of index. Raises and cancels as `events`."""
        raise NotImplementedError
