"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from server.answer import respond
from server.body import read_object
from server.chat_reply import REASONING_FIELDS, ChatReply
from server.conversation import begin, conversation
from server.generation import Generation, best
from server.logprobs import TokenEntry, chat_logprobs, prompt_logprobs
from server.parsing.answer import AnswerFormat, AnswerParser
from server.pieces import joined
from server.protocol.chat import ChatRequest
from server.service import Service, service_of
from server.sse import DONE, TEXT, Frames
from server.streams import SequenceResult, TextEvent
from server.template import Chat

router = APIRouter()
THREAD_TOKENS = 512
"""An answer with the logprobs of more tokens is put together in a thread."""


@router.post("/v1/chat/completions")
async def create_chat_completion(http: Request) -> Response:
    """Answer a conversation."""
    service = service_of(http)
    arrival = service.clock()
    body, chat = await read_object(http, service, lambda value: conversation(ChatRequest, value))
    model = service.check_model(body.model)
    caller = service.caller(http, body.cache_salt, body.user)
    generation = Generation(service, "chat", body.sequences, arrival, caller)
    answer = ChatAnswer(service, generation, body, chat, model)
    return await respond(http, answer, body.stream)


class ChatAnswer:
    def __init__(self, service: Service, generation: Generation, body: ChatRequest, chat: Chat, model: str) -> None:
        self.generation = generation
        self._body = body
        self._chat = chat
        self._format = AnswerFormat()
        last = chat.messages[-1]
        self._echo: str = (last.get("content") or "") if body.echo and last["role"] == "assistant" else ""
        """What the answer's content begins with."""
        self._reply = ChatReply(
            REASONING_FIELDS[service.settings.reasoning_field] if body.include_reasoning else (),
            frozenset(tool.name for tool in body.use.tools if tool.custom),
            body.legacy,
        )
        self._fixed: dict[str, Any] = {
            "id": f"chatcmpl-{generation.id}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": service.fingerprint,
            **body.service_fields,
        }

    async def start(self) -> None:
        self._format = await begin(self.generation, self._body, self._chat)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        body = self._body
        frames = Frames(
            self._fixed, body.include_usage, lambda index: self._delta(TextEvent(index, ""), {"content": TEXT})
        )
        asides = body.usage_in_every_chunk or body.timings_per_token
        plain = not (body.logprobs or body.return_token_ids or asides)

        def framed(choices: list[bytes]) -> bytes:
            if not asides:
                return b"".join(map(frames.chunk, choices))
            fields = self.generation.asides(body)
            return b"".join(frames.beside(choice, fields) for choice in choices)

        yield framed([self._role(index) for index in range(body.n)])
        if self._echo:
            echo = {"content": self._echo}
            yield framed([orjson.dumps(self._delta(TextEvent(index, ""), echo)) for index in range(body.n)])
        choices = [_Streamed(index, AnswerParser(self._format)) for index in range(body.n)]
        async for _, batch in self.generation.batches():
            data = b"".join(
                [
                    frames.text(event.index, event.text)
                    if plain and event.finish_reason is None and self._format.plain
                    else framed(self._chunks(event, choices[event.index]))
                    for event in batch
                ]
            )
            if data:
                yield data
        last = {"usage": self.generation.usage(), **self.generation.timed(body)}
        yield frames.beside(b"", last) + DONE if body.include_usage else DONE

    async def whole(self) -> bytes:
        (results,) = await self.generation.collect()
        usage = self.generation.usage()
        scored = self._body.logprobs or self._body.prompt_logprobs is not None
        if scored and usage["total_tokens"] > THREAD_TOKENS:
            return await asyncio.to_thread(self._whole, results, usage)
        return self._whole(results, usage)

    def _whole(self, results: list[SequenceResult], usage: dict[str, Any]) -> bytes:
        body, stream = self._body, self.generation.streams[0]
        choices = list(map(self._choice, best(results, body.n)))
        whole = {**self._fixed, "choices": choices, "usage": usage, **self.generation.timed(body)}
        if body.return_token_ids:
            whole["prompt_token_ids"] = stream.submit.prompt_ids
        if body.return_prompt_text:
            whole["prompt_text"] = self.generation.texts[0]
        if body.prompt_logprobs is not None:
            tokenizer, values = self.generation.loaded.tokenizer, stream.prompt_values or []
            whole["prompt_logprobs"] = prompt_logprobs(tokenizer, stream.submit.prompt_ids, values)
        return orjson.dumps(whole)

    def _choice(self, result: SequenceResult) -> dict[str, Any]:
        parser = AnswerParser(self._format)
        pieces = parser.feed(result.text) + parser.finish()
        message = self._reply.message(pieces)
        if self._echo:
            message["content"] = self._echo + (message["content"] or "")
        choice: dict[str, Any] = {
            "index": result.index,
            "message": message,
            "logprobs": self._logprobs(result.logprobs or ()) if self._body.logprobs else None,
            "finish_reason": self._finish_reason(parser, result.finish_reason),
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
        if self._body.return_prompt_text:
            choice["prompt_text"] = self.generation.texts[0]
        return orjson.dumps(choice)

    def _finish_reason(self, parser: AnswerParser, reason: str | None) -> str | None:
        return None if reason is None else self._reply.finish_reason(parser.finish_reason(reason))

    def _chunks(self, event: TextEvent, choice: _Streamed) -> list[bytes]:
        """A chunk for every piece that the event brought, and one with the end, where it is one. Logprobs and ids come
        with the first of them, which brings nothing else where there is no piece."""
        pieces = choice.parser.feed(event.text)
        if event.finish_reason is not None:
            pieces += choice.parser.finish()
        deltas = self._reply.deltas(joined(pieces), choice.customs)
        if not deltas and (event.logprobs or (self._body.return_token_ids and event.token_ids)):
            deltas = [{"content": ""} if self._format.plain else {}]
        chunks = []
        for number, delta in enumerate(deltas):
            chunks.append(orjson.dumps(self._delta(event, delta, first=not number)))
        if event.finish_reason is not None:
            reason = self._finish_reason(choice.parser, event.finish_reason)
            end = {"index": event.index, "delta": {}, "logprobs": None, "finish_reason": reason}
            chunks.append(orjson.dumps({**end, "stop_reason": event.stop_reason}))
        return chunks

    def _delta(self, event: TextEvent, delta: dict[str, Any], first: bool = True) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": event.index,
            "delta": delta,
            "logprobs": self._logprobs(event.logprobs) if event.logprobs and first else None,
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = event.token_ids if first else ()
        return choice


@dataclass(slots=True)
class _Streamed:
    """One choice of a stream."""

    index: int
    parser: AnswerParser
    customs: set[int] = field(default_factory=set)
    """Calls of custom tools."""
