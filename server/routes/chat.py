"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, Request, Response

from server.answer import respond
from server.body import read_object, validate
from server.generation import Generation, Job
from server.logprobs import TokenEntry, chat_logprobs, prompt_logprobs
from server.prompts import check_values
from server.protocol.chat import ChatFields, ChatRequest
from server.service import Caller, Service, service_of
from server.sse import DONE, TEXT, Frames
from server.streams import SequenceResult, StreamOptions, TextEvent
from server.template import Chat

router = APIRouter()
C = TypeVar("C", bound=ChatFields)
THREAD_TOKENS = 512
"""An answer with the logprobs of more tokens is put together in a thread."""


@router.post("/v1/chat/completions")
async def create_chat_completion(http: Request) -> Response:
    """Answer a conversation."""
    service = service_of(http)
    arrival = service.clock()
    body, chat = await read_object(http, service, lambda value: conversation(ChatRequest, value))
    model = service.check_model(body.model)
    generation = Generation(service, "chat", body.n, arrival)
    answer = ChatAnswer(service, generation, body, chat, model, service.caller(http, body.cache_salt, body.user))
    return await respond(http, answer, body.stream)


def conversation(model: type[C], value: dict[str, Any]) -> tuple[C, Chat]:
    """The request, and what the template gets of it. Takes its time where there are thousands of messages."""
    body = validate(model, value)
    return body, Chat(
        messages=[message.model_dump(exclude_none=True) for message in body.messages],
        add_generation_prompt=body.generation_prompt,
        continue_final_message=body.continue_final_message,
        kwargs=body.chat_template_kwargs,
    )


class ChatAnswer:
    def __init__(
        self, service: Service, generation: Generation, body: ChatRequest, chat: Chat, model: str, caller: Caller
    ) -> None:
        self.generation = generation
        self._body = body
        self._chat = chat
        self._caller = caller
        self._fixed: dict[str, Any] = {
            "id": f"chatcmpl-{generation.id}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": service.fingerprint,
        }

    async def start(self) -> None:
        body, caller = self._body, self._caller
        prompts, sampling = self.generation.loaded.prompts, self.generation.loaded.sampling
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        grammar = await self.generation.loaded.structures.grammar(body.structure)
        params, prompt = await asyncio.gather(
            prompts.threaded(
                lambda: sampling.params(body, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs, grammar=grammar)
            ),
            prompts.chat(self._chat, add_special_tokens=body.add_special_tokens),
        )
        scored = 0 if body.prompt_logprobs is None else body.prompt_logprobs + 1
        check_values(len(prompt.ids), scored + body.n * body.return_token_ids, "prompt_logprobs" if scored else "n")
        max_tokens = prompts.max_tokens(len(prompt.ids), body.limit, param="messages", field=body.limit_field)
        options = StreamOptions(
            stop=tuple(body.stop),
            include_stop=body.include_stop_str_in_output,
            skip_special_tokens=body.skip_special_tokens,
            min_tokens=body.min_tokens,
            token_ids=body.return_token_ids,
            # A grammar speaks of every character, a first blank included.
            new_text=not body.continue_final_message and grammar is None,
        )
        job = Job(prompt.ids, params(max_tokens), body.n, body.priority, caller.tenant, caller.salt)
        self.generation.submit([job], options)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        body = self._body
        frames = Frames(self._fixed, body.include_usage, lambda index: self._delta(TextEvent(index, TEXT)))
        plain = not (body.logprobs or body.return_token_ids or body.usage_in_every_chunk)

        def framed(choices: list[bytes]) -> bytes:
            if not body.usage_in_every_chunk:
                return b"".join(map(frames.chunk, choices))
            usage = self.generation.usage()
            return b"".join(frames.with_usage(choice, usage) for choice in choices)

        yield framed([self._role(index) for index in range(body.n)])
        async for _, batch in self.generation.batches():
            data = b"".join(
                [
                    frames.text(event.index, event.text)
                    if plain and event.finish_reason is None
                    else framed(self._chunks(event))
                    for event in batch
                ]
            )
            if data:
                yield data
        yield frames.with_usage(b"", self.generation.usage()) + DONE if self._body.include_usage else DONE

    async def whole(self) -> bytes:
        (results,) = await self.generation.collect()
        usage = self.generation.usage()
        scored = self._body.logprobs or self._body.prompt_logprobs is not None
        if scored and usage["total_tokens"] > THREAD_TOKENS:
            return await asyncio.to_thread(self._whole, results, usage)
        return self._whole(results, usage)

    def _whole(self, results: list[SequenceResult], usage: dict[str, Any]) -> bytes:
        body, stream = self._body, self.generation.streams[0]
        whole = {**self._fixed, "choices": list(map(self._choice, results)), "usage": usage}
        if body.return_token_ids:
            whole["prompt_token_ids"] = stream.submit.prompt_ids
        if body.prompt_logprobs is not None:
            tokenizer, values = self.generation.loaded.tokenizer, stream.prompt_values or []
            whole["prompt_logprobs"] = prompt_logprobs(tokenizer, stream.submit.prompt_ids, values)
        return orjson.dumps(whole)

    def _choice(self, result: SequenceResult) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": result.index,
            "message": {"role": "assistant", "content": result.text, "refusal": None},
            "logprobs": None if result.logprobs is None else self._logprobs(result.logprobs),
            "finish_reason": result.finish_reason,
            "stop_reason": result.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = result.token_ids
        return choice

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        return {"content": chat_logprobs(entries, self._body.return_tokens_as_token_ids), "refusal": None}

    def _role(self, index: int) -> bytes:
        """The first chunk of a choice."""
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = self.generation.streams[0].submit.prompt_ids
        return orjson.dumps(choice)

    def _chunks(self, event: TextEvent) -> list[bytes]:
        """A chunk with what the event brought, where it brought anything, and one with the end, where it is one."""
        chunks = []
        if event.text or event.logprobs or (self._body.return_token_ids and event.token_ids):
            chunks.append(orjson.dumps(self._delta(event)))
        if event.finish_reason is not None:
            end = {"index": event.index, "delta": {}, "logprobs": None, "finish_reason": event.finish_reason}
            chunks.append(orjson.dumps({**end, "stop_reason": event.stop_reason}))
        return chunks

    def _delta(self, event: TextEvent) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": event.index,
            "delta": {"content": event.text},
            "logprobs": self._logprobs(event.logprobs) if event.logprobs else None,
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = event.token_ids
        return choice
