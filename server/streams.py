"""RequestStream: what one client has got so far. The text and stream state of a request, of all its sequences.

        EngineClient                 RequestStream                     route
        feed, feed, …, wake  ──▶  Choice: text, stops, logprobs  ──▶  events() or collect()
                      abort  ◀──  stop string found, reader gone

Everything runs on the event loop's thread. A reader that is slow finds one merged event per sequence, so what waits for
it is bounded by the length of the answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from model.params import Logprob
from scheduler.messages import FinishReason, Started, Submit
from server.choice import Choice, StreamOptions, TextEvent
from server.detokenizer import Vocabulary
from server.echo import Echo, scored
from server.errors import EngineError, RequestError
from server.logprobs import TokenEntry
from server.stops import StopStrings

__all__ = ["RequestStream", "SequenceResult", "StreamOptions", "TextEvent", "Timings", "Usage"]


@dataclass(slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
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
    """A whole sequence: its events, added up."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenEntry, ...] | None
    finish_reason: str | None
    stop_reason: str | int | None
    logprob: float = field(default=0.0, compare=False)
    """Sum over its tokens, the one that ended it included; 0 where no logprobs are asked for, save for a beam."""

    @property
    def mean_logprob(self) -> float:
        return self.logprob / max(1, len(self.token_ids))


class RequestStream:
    """Fed by one EngineClient, read by one consumer."""

    def __init__(
        self,
        submit: Submit,
        vocabulary: Vocabulary,
        options: StreamOptions,
        abort: Callable[[int, int | None], None],
        clock: Callable[[], float] = time.monotonic,
        echo: Echo | None = None,
    ) -> None:
        """`abort(id, index)` tells the engine to end a sequence, or with None the whole request.

        `echo`: every sequence begins with it; the reader gets it once the engine's prompt logprobs are there, where
        `params` asks for them.
        """
        self.submit = submit
        self.usage = Usage(len(submit.prompt_ids))
        self.timings = Timings(submit.arrival)
        self.prompt_values: list[Logprob] | None = None
        """What the engine sent for prompt tokens 1, 2, …"""
        self.vector: bytes | None = None
        """The pooled prompt, where `params.pooling` asks for it: little-endian float32, there with the end."""
        self.error: RequestError | None = None
        self.cancelled = False
        """The reader left before the end."""
        self._vocabulary = vocabulary
        self._abort = abort
        self._clock = clock
        self._scored = submit.params.logprobs is not None
        stops = StopStrings(options.stop, options.include_stop)
        self._choices = [Choice(index, vocabulary, options, stops, self._scored) for index in range(submit.n)]
        self._running = submit.n
        self._ready: set[int] = set()
        self._unread_since: float | None = None
        self._fed = False
        self._waiter: asyncio.Future[None] | None = None
        """Of the reader, while it waits."""
        self._bare = [0] * submit.n
        """Per sequence, echoed tokens that the reader has not got: their entries still lack their logprobs."""
        self._echoes = echo is not None
        if echo is not None:
            for choice in self._choices:
                choice.begin(echo.text, echo.entries, echo.detokenizer.copy())
            self._bare = [len(echo.entries)] * submit.n
            if submit.params.prompt_logprobs is None:
                self._show()

    @property
    def tokens(self) -> list[list[int]]:
        """Per sequence, everything generated so far."""
        return [choice.tokens for choice in self._choices]

    @property
    def reasoning_tokens(self) -> int:
        """Of the completion tokens, those that were reasoning."""
        return sum(choice.reasoning_tokens for choice in self._choices)

    @property
    def done(self) -> bool:
        """Nothing more is expected of the engine: every sequence ended, or the request failed or was cancelled."""
        return not self._running or self.error is not None or self.cancelled

    @property
    def finished_indices(self) -> list[int]:
        return [choice.index for choice in self._choices if choice.finish_reason is not None]

    @property
    def pending_chars(self) -> int:
        """Size of the text that waits for the reader."""
        return sum(choice.pending_chars for choice in self._choices)

    def logprob(self, index: int) -> float:
        """Of a sequence so far, as `SequenceResult.logprob`."""
        return self._choices[index].logprob_sum

    def stalled_seconds(self) -> float:
        """How long the oldest unread event has been waiting; 0 where none waits."""
        return 0.0 if self._unread_since is None else self._clock() - self._unread_since

    def resubmit(self) -> Submit:
        """What to send to an engine that knows nothing of the request: with it goes what its reader has."""
        tokens, finished = self.tokens, self.finished_indices
        if not finished and not any(tokens):
            return self.submit
        return msgspec.structs.replace(self.submit, generated=[list(known) for known in tokens], finished=finished)

    def started(self, started: Started) -> None:
        """The engine admitted it. Only the first time counts: after a restart everything is computed again."""
        if self.timings.scheduled is None:
            self.timings.scheduled = started.scheduled
            self.usage.cached_tokens = started.cached_tokens

    def prompt_logprobs(self, values: Sequence[Logprob]) -> None:
        """Comes before the first `feed` of the same step."""
        if self.prompt_values is None:
            self.prompt_values = list(values)
            self._show()

    def feed(
        self, index: int, token: int, finish: int, logprob: Logprob | None = None, message: str | None = None
    ) -> None:
        """One row of a step (`token` -1: only an end). Ignored for a sequence that already ended.

        `message`: why it ended with ERROR, in words for the client.
        """
        choice = self._choices[index]
        if self.done or choice.finish_reason is not None:
            return
        if finish in (FinishReason.ERROR, FinishReason.ABORT):
            self._end_all(EngineError(message or "The engine could not finish this request."))
            return
        if token >= 0:
            self.usage.completion_tokens += 1
            self._fed = True
        choice.feed(token, finish, logprob)
        if choice.finish_reason is not None:
            self._running -= 1
            if not finish:
                self._abort(self.submit.id, index)
        if choice.ready:
            self._ready.add(index)

    def wake(self, now: float | None = None) -> None:
        """Once per step, after its rows: wakes the reader. `now`: when the step ended."""
        now = self._clock() if now is None else now
        if self._fed:
            self._fed = False
            self.timings.last_token = now
            if self.timings.first_token is None:
                self.timings.first_token = now
        if self.done and self.timings.finished is None:
            self.timings.finished = now
        if self._ready and self._unread_since is None:
            self._unread_since = self._clock()
        if self._waiter is not None and (self._ready or self.done):
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None

    def fail(self, error: RequestError) -> None:
        """The reader gets what is already there, then `error` is raised to it. Tells the engine nothing."""
        if not self.done:
            self.error = error
            self._ready.update(choice.index for choice in self._choices if choice.pending)
            self.wake()

    def cancel(self) -> None:
        """The reader is gone: aborts the request, once, unless it has ended. May be called again."""
        if not self.done:
            self.cancelled = True
            self._abort(self.submit.id, None)
            self.wake()

    async def events(self) -> AsyncGenerator[list[TextEvent], None]:
        """Everything since the last time, at most one event per sequence. Raises what `fail` was given.

        Leaving it before its end cancels the request; wrap it in `contextlib.aclosing`, so that leaving is noticed.
        """
        try:
            while True:
                if self._ready:
                    batch = [self._choices[index].take() for index in sorted(self._ready)]
                    self._ready.clear()
                    self._unread_since = None
                    if self._echoes and any(self._bare[event.index] and event.logprobs for event in batch):
                        batch = await asyncio.to_thread(self._full, batch)
                    yield batch
                elif self.error is not None:
                    raise self.error
                elif self.done:
                    return
                else:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        finally:
            self.cancel()

    async def collect(self) -> list[SequenceResult]:
        """The whole answer, one result per sequence in order of index; made of the same events, raises the same."""
        parts: list[list[TextEvent]] = [[] for _ in self._choices]
        async with aclosing(self.events()) as batches:
            async for batch in batches:
                for event in batch:
                    parts[event.index].append(event)
        return [self._result(events) for events in parts]

    def _result(self, events: list[TextEvent]) -> SequenceResult:
        last = events[-1]
        return SequenceResult(
            last.index,
            "".join(event.text for event in events),
            tuple(token for event in events for token in event.token_ids),
            tuple(entry for event in events for entry in event.logprobs or ()) if self._scored else None,
            last.finish_reason,
            last.stop_reason,
            self.logprob(last.index),
        )

    def _end_all(self, error: RequestError) -> None:
        """One sequence failed, so the request did; the engine still runs its other sequences."""
        if self._running > 1:
            self._abort(self.submit.id, None)
        self.fail(error)

    def _show(self) -> None:
        """Let the reader have what the sequences begin with."""
        self._ready.update(choice.index for choice in self._choices if choice.ready)

    def _full(self, batch: list[TextEvent]) -> list[TextEvent]:
        """The events with the logprobs of the echoed tokens in them."""
        full = []
        for event in batch:
            bare, entries = self._bare[event.index], event.logprobs or ()
            values = [None, *(self.prompt_values or ())][-bare:] if bare else []
            echoed = scored(self._vocabulary, entries[:bare], values, self.submit.params.logprobs)
            self._bare[event.index] -= len(echoed)
            full.append(msgspec.structs.replace(event, logprobs=(*echoed, *entries[len(echoed) :])))
        return full
