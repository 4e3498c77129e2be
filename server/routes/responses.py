"""/v1/responses: conversations of items, streamed as typed events, and kept for a while where the client lets us.

input, previous_response_id ──▶ items ──▶ chat ──▶ Generation ──▶ pieces ──▶ ResponseOutput ──▶ events, or one object
                store ──────────────▲                                                 └──▶ store
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterable
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, Request, Response

from server.answer import respond
from server.body import read_object, validate
from server.conversation import Turn, begin, conversation, renamed, turns
from server.errors import InvalidRequest, RequestError
from server.generation import Generation
from server.item_messages import CHAT_NAMES, chat_fields, listed
from server.parsing.answer import AnswerFormat
from server.protocol.chat import ChatRequest
from server.protocol.items import MAX_ITEMS, Item, ReferenceItem, parse_items
from server.protocol.responses import InputFields, ResponseRequest
from server.response_output import Event, ResponseOutput
from server.service import Service, service_of
from server.sse import typed
from server.store import Record
from server.template import Chat

router = APIRouter()
F = TypeVar("F", bound=InputFields)
THREAD_ITEMS = 64
"""A conversation of more items is put together in a thread."""
MAX_REFERENCES = 128
"""Of a request to stored items: each is looked up in a whole conversation."""
MAX_PAGE, PAGE = 100, 20
"""Items of an answer about input items."""


@router.post("/v1/responses")
async def create_response(http: Request) -> Response:
    """Answer a conversation of items."""
    service = service_of(http)
    arrival = service.clock()
    body, value = await read_object(http, service, lambda value: (validate(ResponseRequest, value), value))
    model = service.check_model(body.model)
    items, chat_body, chat = await _chat(body, value, _stored(service, body, service.owner(http)))
    caller = service.caller(http, body.cache_salt, body.user)
    generation = Generation(service, "responses", 1, arrival, caller)
    answer = ResponseAnswer(service, generation, body, items, chat_body, chat, model, service.owner(http))
    return await respond(http, answer, body.stream, answer.failed)


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(http: Request) -> Response:
    """How many tokens a request's prompt has."""
    service = service_of(http)
    body, value = await read_object(http, service, lambda value: (validate(InputFields, value), value))
    service.check_model(body.model)
    _, chat_body, chat = await _chat(body, value, _stored(service, body, service.owner(http)))
    with service.admission.slot():
        try:
            prompt = await service.require().prompts.chat(chat, add_special_tokens=chat_body.add_special_tokens)
        except RequestError as error:
            raise renamed(error, CHAT_NAMES) from None
    return _json({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


@router.get("/v1/responses/{id}")
async def retrieve_response(http: Request, id: str) -> Response:
    """A stored response."""
    service = service_of(http)
    if http.query_params.get("stream") == "true":
        raise InvalidRequest("stream: only background responses can be streamed later", param="stream")
    return Response(service.responses.get(id, service.owner(http)).response, media_type="application/json")


@router.delete("/v1/responses/{id}")
async def delete_response(http: Request, id: str) -> Response:
    """Let go of a stored response. Later ones that went on from it keep what was said."""
    service = service_of(http)
    service.responses.delete(id, service.owner(http))
    return _json({"id": id, "object": "response", "deleted": True})


@router.post("/v1/responses/{id}/cancel")
async def cancel_response(http: Request, id: str) -> Response:
    """Only background responses can be cancelled, and there are none: hang up instead."""
    service = service_of(http)
    service.responses.get(id, service.owner(http))
    raise InvalidRequest("response_id: only background responses can be cancelled", param="response_id")


@router.get("/v1/responses/{id}/input_items")
async def list_input_items(http: Request, id: str) -> Response:
    """The items that a stored response answered, the newest first (`order=asc`: last)."""
    service = service_of(http)
    record = service.responses.get(id, service.owner(http))
    query = http.query_params
    order, limit, after = query.get("order", "desc"), query.get("limit", str(PAGE)), query.get("after")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order: must be asc or desc", param="order")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= MAX_PAGE):
        raise InvalidRequest(f"limit: must be a number from 1 to {MAX_PAGE}", param="limit")
    items = orjson.loads(record.context)
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [number for number, item in enumerate(items) if item["id"] == after]
        if not places:
            raise InvalidRequest(f"after: there is no item {after[:128]!a}", param="after")
        items = items[places[0] + 1 :]
    page = items[: int(limit)]
    ends = {"first_id": page[0]["id"] if page else "", "last_id": page[-1]["id"] if page else ""}
    return _json({"object": "list", "data": page, **ends, "has_more": len(items) > len(page)})


def _stored(service: Service, body: InputFields, owner: bytes) -> list[Any]:
    """What the request takes from the store: the items of the previous response, then one for every reference.

    Raises NotFound."""
    stored: list[Any] = []
    if body.previous_response_id is not None:
        stored += service.responses.get(body.previous_response_id, owner, "previous_response_id").items
    references = [(number, item.id) for number, item in enumerate(body.input) if isinstance(item, ReferenceItem)]
    if len(references) > MAX_REFERENCES:
        raise InvalidRequest(f"input: at most {MAX_REFERENCES} references are allowed", param="input")
    return stored + [service.responses.item(id, owner, f"input.{number}") for number, id in references]


async def _chat(body: InputFields, value: dict[str, Any], stored: list[Any]) -> tuple[list[Item], ChatRequest, Chat]:
    """All that is to be answered, and the request in the words of chat. Raises what is wrong, by its names here."""

    def work() -> tuple[list[Item], ChatRequest, Chat]:
        number = sum(isinstance(item, ReferenceItem) for item in body.input)
        if len(stored) + len(body.input) > MAX_ITEMS:
            raise InvalidRequest(
                f"previous_response_id: the conversation has more than {MAX_ITEMS} items", param="previous_response_id"
            )
        items = parse_items(stored) if stored else []
        found = iter(items[len(items) - number :])
        items = items[: len(items) - number]
        items += [next(found) if isinstance(item, ReferenceItem) else item for item in body.input]
        return items, *conversation(ChatRequest, chat_fields(body, value, items))

    try:
        large = len(stored) + len(body.input) > THREAD_ITEMS
        return await asyncio.to_thread(work) if large else work()
    except RequestError as error:
        raise renamed(error, CHAT_NAMES) from None


class ResponseAnswer:
    def __init__(
        self,
        service: Service,
        generation: Generation,
        body: ResponseRequest,
        items: list[Item],
        chat_body: ChatRequest,
        chat: Chat,
        model: str,
        owner: bytes,
    ) -> None:
        """`items`: what it answers; `chat_body` and `chat`: the same in the words of chat."""
        self.generation = generation
        self._service = service
        self._body = body
        self._items = items
        self._chat_body = chat_body
        self._chat = chat
        self._model = model
        self._owner = owner
        self._format = AnswerFormat()
        self._created = int(time.time())
        self._number = 0
        customs = frozenset(tool.name for tool in body.tools if tool.type == "custom")
        self._output = ResponseOutput(customs, body.logprobs)

    async def start(self) -> None:
        self._format = await begin(self.generation, self._chat_body, self._chat, CHAT_NAMES)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        kinds = ("response.created", "response.in_progress")
        yield self._framed({"type": kind, "response": self._response("in_progress")} for kind in kinds)
        async for turn in turns(self.generation, self._format):
            events = self._take(turn)
            if turn.finish_reason is not None:
                final = self._final(turn.finish_reason)
                events.append({"type": f"response.{final['status']}", "response": final})
            if events:
                yield self._framed(events)

    async def whole(self) -> bytes:
        final: dict[str, Any] = {}
        async for turn in turns(self.generation, self._format):
            self._take(turn)
            if turn.finish_reason is not None:
                final = self._final(turn.finish_reason)
        return orjson.dumps(final)

    def failed(self, error: RequestError) -> bytes:
        """The end of a stream that cannot go on."""
        about = {"code": error.code, "message": error.message, "param": error.param}
        response = self._response("failed", error={"code": "server_error", "message": error.message})
        return self._framed([{"type": "error", **about}, {"type": "response.failed", "response": response}])

    def _take(self, turn: Turn) -> list[Event]:
        events = self._output.feed(turn.pieces, turn.event.logprobs or ())
        if turn.finish_reason is not None:
            events += self._output.finish(turn.finish_reason != "length")
        return events

    def _final(self, reason: str) -> dict[str, Any]:
        """The response as it ends, stored where it may be."""
        cut = {"reason": "max_output_tokens"} if reason == "length" else None
        fields = {"incomplete_details": cut, "usage": self._usage(), "completed_at": None if cut else int(time.time())}
        response = self._response("incomplete" if cut else "completed", **fields)
        if self._body.store:
            context = [listed(item, f"msg_{secrets.token_hex(16)}") for item in self._items]
            ids = tuple(item["id"] for item in (*context, *self._output.items))
            record = Record(response["id"], self._owner, orjson.dumps(context), orjson.dumps(response), ids)
            self._service.responses.put(record)
        return response

    def _usage(self) -> dict[str, Any]:
        usage = self.generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage["total_tokens"],
        }

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        body, params = self._body, self.generation.streams[0].submit.params
        names = ("instructions", "max_tool_calls", "metadata", "parallel_tool_calls")
        more = ("previous_response_id", "prompt_cache_key", "safety_identifier", "store")
        text = {"format": {"type": "text"}} | body.text.model_dump(exclude_none=True, by_alias=True)
        return {
            "id": f"resp_{self.generation.id}",
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": list(self._output.items),
            **{name: getattr(body, name) for name in (*names, *more)},
            "reasoning": {"effort": body.reasoning.effort, "summary": body.reasoning.summary},
            "max_output_tokens": body.limit,
            "service_tier": "default",
            "temperature": params.temperature,
            "text": text,
            "tool_choice": body.tool_choice or "auto",
            "tools": [_shown(tool.model_dump(exclude_none=True)) for tool in body.tools],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user or None,
            **fields,
        }

    def _framed(self, events: Iterable[Event]) -> bytes:
        """Numbered as they go out."""
        frames = []
        for event in events:
            frames.append(typed({"type": event["type"], "sequence_number": self._number, **event}))
            self._number += 1
        return b"".join(frames)


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool with the fields that clients' types want in any case."""
    return tool if tool["type"] == "custom" else {"parameters": None, "strict": None, **tool}


def _json(body: object) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
