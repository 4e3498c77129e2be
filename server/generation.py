"""One HTTP request's generation: its slot, its streams (one per prompt), its deadlines, and its single end.

begin ── slot ──▶ submit ── streams ──▶ collect() or batches() ──▶ close ── slot, streams, metrics
                                                                    ▲
                        done, failed, disconnected, timed out ──────┘
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from model.params import SamplingParams
from scheduler.messages import BeamSearch, Submit
from server.echo import Echo
from server.errors import DeadlineExceeded
from server.lease import ASSUMED_TOKENS
from server.protocol.sampling import GenerationRequest
from server.record import RECORD
from server.service import Caller, Service
from server.streams import RequestStream, SequenceResult, StreamOptions, TextEvent


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt, ready to run."""

    prompt_ids: list[int]
    params: SamplingParams
    n: int
    priority: int
    echo: Echo | None = None
    text: str = ""
    """The prompt's, where the answer has it."""
    search: BeamSearch | None = None


def stream_options(body: GenerationRequest) -> StreamOptions:
    """How the tokens of a request become text, as far as every endpoint says it."""
    return StreamOptions(
        stop=tuple(body.stop),
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        min_tokens=body.min_tokens,
        token_ids=body.return_token_ids,
        interval=body.stream_interval,
    )


class Generation:
    """Made before anything is tokenised; whoever makes it calls `close`, in whatever way the request ends."""

    def __init__(self, service: Service, endpoint: str, sequences: int, arrival: float, caller: Caller) -> None:
        """Takes the slots. Raises Unavailable or Overloaded; from then on the request is served, drain or not."""
        self.loaded = service.require()
        caller.lease.widen(sequences)
        service.admission.reserve(sequences)
        self.id = secrets.token_hex(16)
        self.streams: list[RequestStream] = []
        self.texts: list[str] = []
        """Of the prompts, where the answer has them."""
        self._service = service
        self._caller = caller
        self._endpoint = endpoint
        self._sequences = sequences
        self._arrival = arrival
        self._reasons: list[list[str]] = []
        """Per stream, the finish reasons that its reader got."""
        self._collected = 0
        """Streams whose answers `collect` has given."""
        self._timers: list[asyncio.TimerHandle] = []
        self._record = RECORD.get()
        self._closed = False

    def submit(self, jobs: Sequence[Job], options: StreamOptions) -> None:
        """Send everything to the engine. Raises Overloaded, or Unavailable where the engine is gone.

        May be called again: what has been let in with its first prompts is not refused with its later ones.
        """
        service, tokenizer = self._service, self.loaded.tokenizer
        first = not self.streams
        prompt = sum(len(job.prompt_ids) for job in jobs)
        answers = sum(job.n * min(job.params.max_tokens, ASSUMED_TOKENS) for job in jobs)
        if first:
            service.admission.check_tokens(prompt)
        self._caller.lease.reserve(prompt, answers, first)
        for job in jobs:

            def stream(id: int, job: Job = job) -> RequestStream:
                submit = Submit(
                    id=id,
                    prompt_ids=job.prompt_ids,
                    params=job.params,
                    n=job.n,
                    search=job.search,
                    priority=max(job.priority, self._caller.priority),
                    tenant=self._caller.tenant,
                    weight=self._caller.weight,
                    salt=self._caller.salt,
                    arrival=self._arrival,
                )
                return RequestStream(submit, tokenizer, options, service.client.abort, service.clock, job.echo)

            opened = service.client.open(stream)
            self.streams.append(opened)
            self.texts.append(job.text)
            self._reasons.append([])
            service.metrics.live.add(opened)
            self._watch(opened, first)

    async def collect(self) -> list[list[SequenceResult]]:
        """The whole answers of the prompts submitted since the last time. Raises what a stream failed with."""
        results: list[list[SequenceResult]] = []
        for stream, reasons in zip(self.streams[self._collected :], self._reasons[self._collected :], strict=True):
            results.append(await stream.collect())
            reasons += [str(result.finish_reason) for result in results[-1]]
        self._collected = len(self.streams)
        return results

    async def batches(self) -> AsyncGenerator[tuple[int, list[TextEvent]], None]:
        """(prompt, events) as they come. Raises what a stream failed with."""
        if len(self.streams) > 1:
            async with aclosing(self._merged()) as merged:
                async for number, batch in merged:
                    self._note(number, batch)
                    yield number, batch
            return
        async with aclosing(self.streams[0].events()) as batches:
            async for batch in batches:
                self._note(0, batch)
                yield 0, batch

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object: each prompt counted once, whatever n."""
        prompt = sum(stream.usage.prompt_tokens for stream in self.streams)
        completion = sum(stream.usage.completion_tokens for stream in self.streams)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(stream.usage.cached_tokens for stream in self.streams)},
            "completion_tokens_details": {"reasoning_tokens": sum(stream.reasoning_tokens for stream in self.streams)},
        }

    def timings(self) -> dict[str, float]:
        """llama.cpp's `timings`, and how long it waited: from the first step to the last token of all its prompts and
        sequences."""
        usage, times = self.usage(), [stream.timings for stream in self.streams]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        scheduled = min((t.scheduled for t in times if t.scheduled is not None), default=self._arrival)
        first = min((t.first_token for t in times if t.first_token is not None), default=scheduled)
        last = max((t.last_token for t in times if t.last_token is not None), default=first)
        return {
            "queue_ms": _ms(scheduled - self._arrival),
            "cache_n": cached,
            **_rates("prompt", usage["prompt_tokens"] - cached, _ms(first - scheduled)),
            **_rates("predicted", usage["completion_tokens"], _ms(last - first)),
        }

    def asides(self, body: GenerationRequest) -> dict[str, Any]:
        """What every chunk says beside its choice."""
        fields: dict[str, Any] = {}
        if body.include_usage or body.usage_in_every_chunk:
            fields["usage"] = self.usage() if body.usage_in_every_chunk else None
        return fields | self.timed(body)

    def timed(self, body: GenerationRequest) -> dict[str, Any]:
        """The timings, where they are asked for."""
        return {"timings": self.timings()} if body.timings_per_token else {}

    def close(self) -> None:
        """The one way out: what still runs is aborted, the slots are free, everything is counted. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._record is not None:
            self._record.generated(self._endpoint, self.streams, self._reasons)
        for timer in self._timers:
            timer.cancel()
        outcomes = []
        for stream, reasons in zip(self.streams, self._reasons, strict=True):
            stream.cancel()
            outcomes.append(_outcome(stream, reasons))
            self._service.metrics.end(stream, self._endpoint, outcomes[-1])
        if self.streams:
            started = [stream.usage for stream in self.streams if stream.timings.scheduled is not None]
            self._caller.lease.settle(
                sum(usage.prompt_tokens for usage in started),
                sum(usage.cached_tokens for usage in started),
                sum(usage.completion_tokens for usage in started),
                aborted="abort" in outcomes,
            )
        self._service.admission.release(self._sequences)

    def _watch(self, stream: RequestStream, first: bool) -> None:
        """Arm the deadlines of --request-timeout and, for the `first` prompts of a request, of --queue-timeout."""
        settings, client = self._service.settings, self._service.client
        loop = asyncio.get_running_loop()
        spent = self._service.clock() - self._arrival

        def late(limit: float, what: str, queued_only: bool) -> None:
            if not queued_only or stream.timings.scheduled is None:
                client.fail(stream, DeadlineExceeded(f"The request {what} within {limit:g} s."))

        if settings.queue_timeout and first:
            seconds = settings.queue_timeout
            self._timers.append(loop.call_later(seconds - spent, late, seconds, "did not start", True))
        if settings.request_timeout:
            seconds = settings.request_timeout
            self._timers.append(loop.call_later(seconds - spent, late, seconds, "was not finished", False))

    def _note(self, number: int, batch: list[TextEvent]) -> None:
        for event in batch:
            if event.finish_reason is not None:
                self._reasons[number].append(event.finish_reason)

    async def _merged(self) -> AsyncGenerator[tuple[int, list[TextEvent]], None]:
        """All streams at once. The queue holds one batch: what waits longer waits, merged, in its stream."""
        queue: asyncio.Queue[tuple[int, list[TextEvent] | Exception | None]] = asyncio.Queue(1)

        async def pump(number: int, stream: RequestStream) -> None:
            last: Exception | None = None
            try:
                async with aclosing(stream.events()) as batches:
                    async for batch in batches:
                        await queue.put((number, batch))
            except Exception as error:  # whatever it is, the reader must not wait for a stream that has ended
                last = error
            await queue.put((number, last))

        tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(self.streams)]
        try:
            running = len(tasks)
            while running:
                number, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield number, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def best(results: list[SequenceResult], n: int) -> list[SequenceResult]:
    """The `n` whose tokens are likeliest in the mean, best first, numbered anew; all as they are, of `n`."""
    if len(results) == n:
        return results
    ranked = sorted(results, key=lambda result: -result.mean_logprob)
    return [replace(result, index=index) for index, result in enumerate(ranked[:n])]


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 3)


def _rates(name: str, count: int, ms: float) -> dict[str, float]:
    return {
        f"{name}_n": count,
        f"{name}_ms": ms,
        f"{name}_per_token_ms": round(ms / count, 3) if count else 0.0,
        f"{name}_per_second": round(count / ms * 1000, 3) if ms else 0.0,
    }


def _outcome(stream: RequestStream, reasons: list[str]) -> str:
    """What the metrics call its end."""
    if stream.error is not None:
        return "error"
    if len(reasons) < stream.submit.n:
        return "abort"
    return "length" if "length" in reasons else "stop"
