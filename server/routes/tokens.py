"""POST /tokenize and /detokenize: each answers in the shape of the server whose field names the request uses."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from server.body import check_media_type, parse_json_object, read_body, threaded, validate
from server.protocol.tokens import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from server.routes.chat import conversation
from server.service import Loaded, service_of

router = APIRouter()


@router.post("/v1/tokenize", include_in_schema=False)
@router.post("/tokenize", operation_id="tokenize")
async def tokenize(http: Request) -> Response:
    """The tokens of a text, or of the prompt that a conversation becomes."""
    service = service_of(http)
    check_media_type(http)
    content = await threaded(parse_json_object, await read_body(http))
    if content.get("messages") is not None:
        chat = validate(TokenizeChatRequest, content)
        service.check_model(chat.model)
        loaded = service.require()
        prompt = await loaded.prompts.chat(conversation(chat), add_special_tokens=chat.add_special_tokens)
        return _vllm(loaded, prompt.ids, chat.return_token_strs)
    body = validate(TokenizeRequest, content)
    service.check_model(body.model)
    loaded = service.require()
    if body.prompt is not None:
        ids = await loaded.prompts.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        return _vllm(loaded, ids, body.return_token_strs)
    text = loaded.tokenizer.token_text
    if body.content is not None:
        ids = await loaded.prompts.encode(
            body.content, add_special_tokens=body.add_special, allow_special=body.parse_special
        )
        return _json({"tokens": [{"id": id, "piece": text(id)} for id in ids] if body.with_pieces else ids})
    ids = await loaded.prompts.encode(body.inputs or "", add_special_tokens=True)
    return _json(_spans(loaded, ids))


@router.post("/v1/detokenize", include_in_schema=False)
@router.post("/detokenize", operation_id="detokenize")
async def detokenize(http: Request) -> Response:
    """The text of tokens, as `prompt` and as `content`."""
    service = service_of(http)
    check_media_type(http)
    body = validate(DetokenizeRequest, await threaded(parse_json_object, await read_body(http)))
    service.check_model(body.model)
    param = "tokens" if body.tokens is not None else "ids"
    ids = body.tokens if body.tokens is not None else body.ids or []
    text = await service.require().prompts.decode(ids, skip_special_tokens=body.skip_special_tokens, param=param)
    return _json({"prompt": text, "content": text})


def _vllm(loaded: Loaded, ids: list[int], with_texts: bool) -> Response:
    texts = [loaded.tokenizer.token_text(id) for id in ids] if with_texts else None
    return _json({"count": len(ids), "max_model_len": loaded.ready.max_model_len, "tokens": ids, "token_strs": texts})


def _spans(loaded: Loaded, ids: list[int]) -> list[dict[str, Any]]:
    """TGI's shape: where each token lies in the text, in characters."""
    spans, start = [], 0
    for id in ids:
        text = loaded.tokenizer.token_text(id)
        length = 0 if loaded.tokenizer.is_special(id) else len(text)
        spans.append({"id": id, "text": text, "start": start, "stop": start + length})
        start += length
    return spans


def _json(body: object) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
