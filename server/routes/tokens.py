"""POST /tokenize and /detokenize: each answers in the shape of the server whose field names the request uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from server.body import read_object, validate
from server.conversation import conversation
from server.detokenizer import Detokenizer
from server.prompts import Prompt
from server.protocol.tokens import DetokenizeRequest, PromptRequest, TokenizeChatRequest, TokenizeRequest
from server.service import Loaded, service_of
from server.template import Chat

router = APIRouter()


@router.post("/v1/tokenize", include_in_schema=False)
@router.post("/tokenize", operation_id="tokenize")
async def tokenize(http: Request) -> Response:
    """The tokens of a text, or of the prompt that a conversation becomes."""
    service = service_of(http)
    body, chat = await read_object(http, service, _parsed)
    service.check_model(body.model)
    loaded = service.require()
    with service.admission.slot():
        shape = await _tokenized(loaded, body, chat)
        return await loaded.prompts.threaded(lambda: _json(shape()))


def _parsed(value: dict[str, Any]) -> tuple[TokenizeRequest | TokenizeChatRequest, Chat | None]:
    if value.get("messages") is not None:
        return conversation(TokenizeChatRequest, value)
    return validate(TokenizeRequest, value), None


async def _tokenized(
    loaded: Loaded, body: TokenizeRequest | TokenizeChatRequest, chat: Chat | None
) -> Callable[[], Any]:
    """The answer, still to be made: every token's text in it takes its time."""
    prompts = loaded.prompts
    if chat is not None or isinstance(body, TokenizeChatRequest):
        assert chat is not None
        ids = (await prompts.chat(chat, add_special_tokens=body.add_special_tokens)).ids
    elif body.prompt is not None:
        ids = await prompts.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    elif body.content is not None:
        ids = await prompts.encode(
            body.content, add_special_tokens=body.add_special, allow_special=body.parse_special, param="content"
        )
        return lambda: {"tokens": [{"id": id, "piece": _piece(loaded, id)} for id in ids] if body.with_pieces else ids}
    else:
        ids = await prompts.encode(body.inputs or "", add_special_tokens=True, param="inputs")
        return lambda: _spans(loaded, ids)
    return lambda: _vllm(loaded, ids, body.return_token_strs)


@router.post("/apply-template", operation_id="apply_template")
async def apply_template(http: Request) -> Response:
    """The text of the prompt that a conversation becomes."""
    prompt = await _prompt(http)
    return _json({"prompt": prompt.text})


@router.post("/v1/chat/completions/input_tokens", operation_id="count_chat_tokens")
async def count_chat_tokens(http: Request) -> Response:
    """How many tokens that prompt has."""
    prompt = await _prompt(http)
    return _json({"object": "chat.completion.input_tokens", "input_tokens": len(prompt.ids)})


async def _prompt(http: Request) -> Prompt:
    service = service_of(http)
    body, chat = await read_object(http, service, lambda value: conversation(PromptRequest, value))
    service.check_model(body.model)
    with service.admission.slot():
        return await service.require().prompts.chat(chat, add_special_tokens=body.add_special_tokens)


@router.post("/v1/detokenize", include_in_schema=False)
@router.post("/detokenize", operation_id="detokenize")
async def detokenize(http: Request) -> Response:
    """The text of tokens, as `prompt` and as `content`."""
    service = service_of(http)
    body = await read_object(http, service, lambda value: validate(DetokenizeRequest, value))
    service.check_model(body.model)
    prompts = service.require().prompts
    param = "tokens" if body.tokens is not None else "ids"
    ids = body.tokens if body.tokens is not None else body.ids or []
    with service.admission.slot():
        text = await prompts.decode(ids, skip_special_tokens=body.skip_special_tokens, param=param)
    return _json({"prompt": text, "content": text})


def _vllm(loaded: Loaded, ids: list[int], with_texts: bool) -> dict[str, Any]:
    texts = [loaded.tokenizer.token_text(id) for id in ids] if with_texts else None
    return {"count": len(ids), "max_model_len": loaded.ready.max_model_len, "tokens": ids, "token_strs": texts}


def _piece(loaded: Loaded, id: int) -> str | list[int]:
    """llama.cpp's: a token's text, or its bytes where they are not the whole of any."""
    text = loaded.tokenizer.token_text(id)
    if "\ufffd" not in text:
        return text
    data = loaded.tokenizer.token_bytes(id)
    return text if data == text.encode() else list(data)


def _spans(loaded: Loaded, ids: list[int]) -> list[dict[str, Any]]:
    """TGI's shape: where each token lies in the text, in characters. The last token of a character has all of it."""
    detokenizer = Detokenizer(loaded.tokenizer)
    spans, start = [], 0
    for id in ids:
        stop = start + len(detokenizer.push(id))
        spans.append({"id": id, "text": loaded.tokenizer.token_text(id), "start": start, "stop": stop})
        start = stop
    return spans


def _json(body: object) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
