"""POST /v1/messages: Anthropic's protocol, over the same conversations as chat.

message_start ─ content_block_* … ─ message_delta (stop_reason, usage) ─ message_stop
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, Request, Response

from server.answer import respond
from server.block_messages import CHAT_NAMES, MessageChat, chat_fields
from server.body import read_object, validate
from server.conversation import Turn, begin, conversation, renamed, turns
from server.errors import RequestError
from server.generation import Generation
from server.message_content import Event, MessageContent
from server.parsing.answer import AnswerFormat
from server.protocol.chat import ChatRequest
from server.protocol.messages import CountRequest, MessagesRequest
from server.service import service_of
from server.sse import dumps, typed
from server.template import Chat

router = APIRouter()
B = TypeVar("B", bound=CountRequest)
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@router.post("/v1/messages")
async def create_message(http: Request) -> Response:
    """Answer a conversation, in Anthropic's words."""
    service = service_of(http)
    arrival = service.clock()
    body, chat_body, chat = await read_object(http, service, lambda value: _read(MessagesRequest, value))
    model = service.check_model(body.model)
    caller = service.caller(http, body.cache_salt, body.metadata.user_id)
    generation = Generation(service, "messages", 1, arrival, caller)
    answer = MessageAnswer(generation, body, chat_body, chat, model)
    return await respond(http, answer, body.stream, answer.failed)


@router.post("/v1/messages/count_tokens")
async def count_message_tokens(http: Request) -> Response:
    """How many tokens a request's prompt has."""
    service = service_of(http)
    body, chat_body, chat = await read_object(http, service, lambda value: _read(CountRequest, value))
    service.check_model(body.model)
    with service.admission.slot():
        prompt = await service.require().prompts.chat(chat, add_special_tokens=chat_body.add_special_tokens)
    return Response(orjson.dumps({"input_tokens": len(prompt.ids)}), media_type="application/json")


def _read(kind: type[B], value: dict[str, Any]) -> tuple[B, ChatRequest, Chat]:
    """The request, and the same in the words of chat. Raises what is wrong with it, by its names here."""
    body = validate(kind, value)
    try:
        return body, *conversation(MessageChat, chat_fields(body))
    except RequestError as error:
        raise renamed(error, CHAT_NAMES) from None


class MessageAnswer:
    def __init__(
        self,
        generation: Generation,
        body: MessagesRequest,
        chat_body: ChatRequest,
        chat: Chat,
        model: str,
    ) -> None:
        """`chat_body` and `chat`: the request in the words of chat."""
        self.generation = generation
        self._body = body
        self._chat_body = chat_body
        self._chat = chat
        self._model = model
        self._format = AnswerFormat()
        self._content = MessageContent()

    async def start(self) -> None:
        self._format = await begin(self.generation, self._chat_body, self._chat, CHAT_NAMES)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        yield _framed(
            [{"type": "message_start", "message": self._message({"stop_reason": None, "stop_sequence": None})}]
        )
        async for turn in turns(self.generation, self._format):
            events = self._content.feed(turn.pieces)
            if turn.finish_reason is not None:
                events += self._content.finish()
                events.append({"type": "message_delta", "delta": _end(turn), "usage": self._usage()})
                events.append({"type": "message_stop"})
            if events:
                yield _framed(events)

    async def whole(self) -> bytes:
        message: dict[str, Any] = {}
        async for turn in turns(self.generation, self._format):
            self._content.feed(turn.pieces)
            if turn.finish_reason is not None:
                self._content.finish()
                message = self._message(_end(turn))
        return dumps(message)

    def failed(self, error: RequestError) -> bytes:
        """The end of a stream that cannot go on."""
        return _framed([error.anthropic()])

    def _message(self, end: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{self.generation.id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._content.blocks,
            **end,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """What came from the prefix cache isn't counted as input, as at Anthropic."""
        usage = self.generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _end(turn: Turn) -> dict[str, Any]:
    """Why it ended. A stop token is the end of the turn; a stop sequence is named."""
    stopped = turn.event.stop_reason if isinstance(turn.event.stop_reason, str) else None
    reason = "stop_sequence" if stopped is not None else STOP_REASONS[turn.finish_reason or "stop"]
    return {"stop_reason": reason, "stop_sequence": stopped}


def _framed(events: Iterable[Event]) -> bytes:
    return b"".join(map(typed, events))
