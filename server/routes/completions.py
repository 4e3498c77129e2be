"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from server.answer import respond
from server.beam import beam_search
from server.body import read_object, validate
from server.echo import Echo, make_echo
from server.generation import Generation, Job, best, stream_options
from server.logprobs import TokenEntry, completion_logprobs, finite, prompt_logprobs
from server.prompts import Prompt, check_values
from server.protocol.completions import CompletionRequest
from server.service import Service, service_of
from server.sse import DONE, TEXT, Frames
from server.streams import SequenceResult, TextEvent

router = APIRouter()
THREAD_TOKENS = 512
"""An answer with the logprobs of more tokens is put together in a thread."""


@router.post("/v1/completions")
async def create_completion(http: Request) -> Response:
    """Continue text."""
    service = service_of(http)
    arrival = service.clock()
    body = await read_object(http, service, lambda value: validate(CompletionRequest, value))
    model = service.check_model(body.model)
    caller = service.caller(http, body.cache_salt, body.user)
    generation = Generation(service, "completions", len(body.prompt) * body.sequences, arrival, caller)
    answer = CompletionAnswer(service, generation, body, model)
    return await respond(http, answer, body.stream)


class CompletionAnswer:
    def __init__(self, service: Service, generation: Generation, body: CompletionRequest, model: str) -> None:
        self.generation = generation
        self._service = service
        self._body = body
        self._fixed = {
            "id": f"cmpl-{generation.id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": service.fingerprint,
            **body.service_fields,
        }
        self._begun: set[int] = set()
        """Choices that have had their first chunk."""

    async def start(self) -> None:
        body = self._body
        prompts, sampling = self.generation.loaded.prompts, self.generation.loaded.sampling
        search = beam_search(body, self._service.settings.max_num_seqs)
        asked = [k for k in (body.logprobs if body.echo else None, body.prompt_logprobs) if k is not None]
        highest = max(asked, default=None)
        grammar = await self.generation.loaded.structures.grammar(body.structure)
        params, built = await asyncio.gather(
            prompts.threaded(
                lambda: sampling.params(
                    body,
                    logprobs=body.logprobs,
                    prompt_logprobs=highest,
                    prompts=len(body.prompt),
                    grammar=grammar,
                )
            ),
            self._built(),
        )
        values = sum(k + 1 for k in asked) + body.echo + body.return_token_ids + body.return_prompt_text
        param = "prompt_logprobs" if body.prompt_logprobs is not None else "logprobs" if asked else "n"
        check_values(sum(len(prompt.ids) for prompt in built), values * body.sequences, param)
        given = body.max_tokens if "max_tokens" in body.model_fields_set else None
        echoes: list[Echo | None] = [None] * len(built)
        if body.echo:
            echoes = await prompts.each(self._echo, [prompt.ids for prompt in built])
        jobs = []
        for prompt, echo in zip(built, echoes, strict=True):
            max_tokens = prompts.max_tokens(len(prompt.ids), given, param="prompt", default=body.max_tokens)
            text = ""
            if body.return_prompt_text:
                text = prompt.text or await prompts.decode(prompt.ids)
            n = body.n if search is not None else body.sequences
            jobs.append(Job(prompt.ids, params(max_tokens), n, body.priority, echo, text, search))
        self.generation.submit(jobs, stream_options(body))

    async def _built(self) -> list[Prompt]:
        body, texts = self._body, self._body.prompt
        if body.truncate_prompt_tokens is not None:
            texts = [await self._truncated(prompt) for prompt in texts]
        limit = self._service.admission.max_queued_tokens
        return await self.generation.loaded.prompts.completion(
            texts, add_special_tokens=body.add_special_tokens, limit=limit
        )

    def _echo(self, ids: list[int]) -> Echo:
        scored = self._body.logprobs is not None
        return make_echo(self.generation.loaded.tokenizer, ids, self._body.skip_special_tokens, scored)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        body = self._body
        frames = Frames(self._fixed, body.include_usage, lambda index: self._shape(0, index, TEXT, None, None))
        asides = body.usage_in_every_chunk or body.timings_per_token
        plain = body.logprobs is None and not (body.return_token_ids or body.return_prompt_text or asides)
        async for number, batch in self.generation.batches():
            if plain and all(event.finish_reason is None for event in batch):
                yield b"".join([frames.text(number * body.n + event.index, event.text) for event in batch])
                continue
            if sum(len(event.logprobs or ()) for event in batch) > THREAD_TOKENS:
                choices = await asyncio.to_thread(self._chunks, number, batch)
            else:
                choices = self._chunks(number, batch)
            if asides:
                fields = self.generation.asides(body)
                yield b"".join(frames.beside(choice, fields) for choice in choices)
            else:
                yield b"".join(map(frames.chunk, choices))
        last = {"usage": self.generation.usage(), **self.generation.timed(body)}
        yield frames.beside(b"", last) + DONE if body.include_usage else DONE

    async def whole(self) -> bytes:
        results = await self.generation.collect()
        usage = self.generation.usage()
        scored = self._body.logprobs is not None or self._body.prompt_logprobs is not None
        if scored and usage["total_tokens"] > THREAD_TOKENS:
            return await asyncio.to_thread(self._whole, results, usage)
        return self._whole(results, usage)

    def _whole(self, results: list[list[SequenceResult]], usage: dict[str, Any]) -> bytes:
        choices = [
            self._choice(number, result)
            for number, prompt in enumerate(results)
            for result in best(prompt, self._body.n)
        ]
        return orjson.dumps({**self._fixed, "choices": choices, "usage": usage, **self.generation.timed(self._body)})

    def _choice(self, number: int, result: SequenceResult) -> dict[str, Any]:
        body = self._body
        choice = self._shape(number, result.index, result.text, result.logprobs, result.finish_reason)
        choice["stop_reason"] = result.stop_reason
        stream = self.generation.streams[number]
        if body.return_token_ids:
            choice |= {"token_ids": self._ids(result), "prompt_token_ids": stream.submit.prompt_ids}
        if body.return_prompt_text:
            choice["prompt_text"] = self.generation.texts[number]
        if body.prompt_logprobs is not None:
            tokenizer, values = self.generation.loaded.tokenizer, stream.prompt_values or []
            choice["prompt_logprobs"] = prompt_logprobs(tokenizer, stream.submit.prompt_ids, values)
        if body.use_beam_search:
            choice["cumulative_logprob"] = finite(result.logprob)
        return choice

    def _ids(self, said: SequenceResult | TextEvent) -> tuple[int, ...]:
        """A beam's end token is none of its text."""
        ended = self._body.use_beam_search and said.finish_reason == "stop"
        return said.token_ids[:-1] if ended else said.token_ids

    def _chunks(self, number: int, batch: list[TextEvent]) -> list[bytes]:
        return [orjson.dumps(self._chunk(number, event)) for event in batch]

    def _chunk(self, number: int, event: TextEvent) -> dict[str, Any]:
        choice = self._shape(number, event.index, event.text, event.logprobs, event.finish_reason)
        if event.finish_reason is not None:
            choice["stop_reason"] = event.stop_reason
            if self._body.use_beam_search:
                choice["cumulative_logprob"] = finite(self.generation.streams[number].logprob(event.index))
        if self._body.return_token_ids:
            choice["token_ids"] = self._ids(event)
        if choice["index"] not in self._begun:
            self._begun.add(choice["index"])
            if self._body.return_token_ids:
                choice["prompt_token_ids"] = self.generation.streams[number].submit.prompt_ids
            if self._body.return_prompt_text:
                choice["prompt_text"] = self.generation.texts[number]
        return choice

    def _shape(
        self, number: int, index: int, text: str, entries: Sequence[TokenEntry] | None, finish: str | None
    ) -> dict[str, Any]:
        by_id = self._body.return_tokens_as_token_ids
        return {
            "index": number * self._body.n + index,
            "text": text,
            "logprobs": None if entries is None or not self._body.scored else completion_logprobs(entries, by_id),
            "finish_reason": finish,
        }

    async def _truncated(self, prompt: str | list[int]) -> list[int]:
        """The last (or first) so many tokens of a prompt."""
        body, prompts = self._body, self.generation.loaded.prompts
        cut = prompts.cut(body.truncate_prompt_tokens, body.truncation_side, body.max_tokens)
        ids = prompt
        if isinstance(ids, str):
            ids = await prompts.encode(ids, add_special_tokens=body.add_special_tokens)
        return ids if cut is None else cut(ids)
