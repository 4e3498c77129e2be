"""A request stream fed by a scripted engine, for tests of what its reader gets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from model.params import Logprob, SamplingParams
from scheduler.messages import FinishReason, Submit
from server.echo import make_echo
from server.streams import RequestStream, SequenceResult, StreamOptions, TextEvent

RUNNING, STOP, LENGTH = FinishReason.RUNNING, FinishReason.STOP, FinishReason.LENGTH
END = 0


class Pieces:
    """A vocabulary made to measure: token i + 1 is piece i, token 0 is the special end."""

    strips_leading_space = False
    eos_ids = frozenset({END})

    def __init__(self, pieces: Sequence[str | bytes]) -> None:
        self._bytes = [b"<end>", *(piece.encode() if isinstance(piece, str) else piece for piece in pieces)]

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id == END


class Engine:
    """Feeds a stream the way EngineClient does, and notes what the stream tells it."""

    def __init__(
        self,
        pieces: Sequence[str | bytes],
        n: int = 1,
        prompt: Sequence[int] = (1,),
        logprobs: int | None = None,
        **options: Any,
    ) -> None:
        echoed = options.pop("echo", False)
        prompt_logprobs = logprobs if echoed else None
        params = SamplingParams(max_tokens=100, seed=1, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        submit = Submit(id=7, prompt_ids=list(prompt), params=params, n=n, arrival=10.0)
        self.aborts: list[tuple[int, int | None]] = []
        self.now = 10.0
        self.scored = logprobs is not None
        vocabulary, how = Pieces(pieces), StreamOptions(**options)
        self.stream = RequestStream(
            submit,
            vocabulary,
            how,
            lambda id_, index: self.aborts.append((id_, index)),
            lambda: self.now,
            make_echo(vocabulary, prompt, how.skip_special_tokens, self.scored) if echoed else None,
        )

    def step(self, token: int, finish: int = RUNNING, index: int = 0) -> None:
        self.now += 1
        value = Logprob(-0.5, 1, [token], [-0.5]) if self.scored and token >= 0 else None
        self.stream.feed(index, token, finish, value)
        self.stream.wake(self.now)

    async def play(self, tokens: Sequence[int], finish: int = LENGTH, read_all: bool = True) -> list[TextEvent]:
        """Feed sequence 0, with a reader that keeps up, or one that comes at the end."""
        seen: list[TextEvent] = []

        async def read() -> None:
            async with aclosing(self.stream.events()) as batches:
                async for batch in batches:
                    seen.extend(batch)

        reader = asyncio.create_task(read()) if read_all else None
        for number, token in enumerate(tokens, 1):
            if reader is not None:
                await asyncio.sleep(0)
            self.step(token, finish if number == len(tokens) else RUNNING)
            if reader is not None:
                await asyncio.sleep(0)
        await (reader or read())
        return seen


def play(pieces: Sequence[str | bytes], finish: int = LENGTH, **options: Any) -> list[TextEvent]:
    """All pieces in order, every step read."""
    return asyncio.run(Engine(pieces, **options).play(range(1, len(pieces) + 1), finish))


def collect(pieces: Sequence[str | bytes], finish: int = LENGTH, **options: Any) -> SequenceResult:
    """All pieces in order, as the whole answer."""
    engine = Engine(pieces, **options)
    for token in range(1, len(pieces) + 1):
        engine.step(token, finish if token == len(pieces) else RUNNING)
    return asyncio.run(engine.stream.collect())[0]


def texts(events: list[TextEvent]) -> list[str]:
    return [event.text for event in events if event.text]


def sum_up(events: list[TextEvent]) -> SequenceResult:
    last = events[-1]
    return SequenceResult(
        last.index,
        "".join(event.text for event in events),
        tuple(token for event in events for token in event.token_ids),
        None if last.logprobs is None else tuple(entry for event in events for entry in event.logprobs or ()),
        last.finish_reason,
        last.stop_reason,
    )
