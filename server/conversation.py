"""A conversation on its way to the engine and back, for every route that has one, whatever its words for it.

ChatRequest, Chat ──▶ begin: prompt, parameters, format ──▶ Generation ──▶ turns: pieces of one answer
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from msgspec.structs import replace

from server.body import validate
from server.errors import RequestError
from server.generation import Generation, Job, stream_options
from server.history import normalized
from server.parsing.answer import AnswerFormat, AnswerParser
from server.parsing.forcing import forced
from server.pieces import Piece, joined
from server.prompts import check_values
from server.protocol.chat import ChatFields, ChatRequest
from server.streams import TextEvent
from server.template import Chat

C = TypeVar("C", bound=ChatFields)


def conversation(model: type[C], value: dict[str, Any]) -> tuple[C, Chat]:
    """The request, and what the template gets of it. Takes its time where there are thousands of messages."""
    body = validate(model, value)
    verbosity = getattr(body, "verbosity", None)
    return body, Chat(
        messages=normalized(message.model_dump(exclude_none=True) for message in body.messages),
        tools=body.use.shown(),
        reasoning_effort=body.reasoning_effort,
        add_generation_prompt=body.generation_prompt,
        continue_final_message=body.continue_final_message,
        documents=body.documents,
        template=body.chat_template,
        kwargs={**({} if verbosity is None else {"verbosity": verbosity}), **body.chat_template_kwargs},
    )


async def begin(
    generation: Generation,
    body: ChatRequest,
    chat: Chat,
    names: Mapping[str, str] = MappingProxyType({}),
) -> AnswerFormat:
    """Tokenise, check, submit; how to read what comes back. Raises whatever the client did wrong.

    `names`: fields of chat, and what the same is called on the route that was asked.
    """
    try:
        return await _begin(generation, body, chat)
    except RequestError as error:
        raise renamed(error, names) from None


async def _begin(generation: Generation, body: ChatRequest, chat: Chat) -> AnswerFormat:
    loaded = generation.loaded
    prompts, sampling, formats = loaded.prompts, loaded.sampling, loaded.formats
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    cut = prompts.cut(body.truncate_prompt_tokens, body.truncation_side, body.limit or 1)
    params, prompt = await asyncio.gather(
        prompts.threaded(lambda: sampling.params(body, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs)),
        prompts.chat(chat, add_special_tokens=body.add_special_tokens, cut=cut),
    )
    scored = 0 if body.prompt_logprobs is None else body.prompt_logprobs + 1
    values = scored + body.return_prompt_text + body.n * (body.return_token_ids + body.echo)
    check_values(len(prompt.ids), values, "prompt_logprobs" if scored else "n")
    max_tokens = prompts.max_tokens(len(prompt.ids), body.limit, param="messages", field=body.limit_field)
    last = chat.messages[-1].get("content", "") if body.continue_final_message else None
    inside = formats.inside(prompt.text or "", last)
    use = body.use
    format = formats.answer(use, body.splits_reasoning, inside)
    structure = forced(formats, use, body.structure, inside=inside, thinks=formats.thinks(prompt.text or ""))
    grammar = await loaded.structures.grammar(structure)
    options = dataclasses.replace(
        stream_options(body),
        # They are for the content, and there is none where calls are all that may come.
        stop=() if use.choice == "required" and use.whole is None else tuple(body.stop),
        shown=formats.shown(format),
        reasoning=format.reasoning,
        inside=inside,
        # A grammar speaks of every character, a first blank included.
        new_text=not body.continue_final_message and grammar is None,
    )
    text = ""
    if body.return_prompt_text:
        text = (prompt.text if cut is None else None) or await prompts.decode(prompt.ids)
    job = Job(
        prompt.ids,
        replace(params(max_tokens), grammar=grammar),
        body.sequences,
        body.priority,
        text=text,
    )
    generation.submit([job], options)
    return format


@dataclass(frozen=True, slots=True)
class Turn:
    """What one step brought."""

    pieces: list[Piece]
    event: TextEvent
    finish_reason: str | None
    """stop, length or tool_calls; exactly one turn has it, the last."""


async def turns(generation: Generation, format: AnswerFormat) -> AsyncGenerator[Turn, None]:
    """The one answer of a request with n = 1. Raises what the generation failed with."""
    parser = AnswerParser(format)
    async for _, batch in generation.batches():
        for event in batch:
            pieces = parser.feed(event.text)
            reason = event.finish_reason
            if reason is not None:
                pieces += parser.finish()
                reason = parser.finish_reason(reason)
            yield Turn(joined(pieces), event, reason)


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The same error about the same field, by the name that it has on another route. Of several the longest counts; '#'
    stands for a number."""
    given = error.param or ""
    for name in sorted(names, key=len, reverse=True):
        found = re.match(re.escape(name).replace(r"\#", r"(\d+)") + r"(?=\.|$)", given)
        if found is not None:
            error.param = names[name].replace("#", "".join(found.groups())) + given[found.end() :]
            error.message = error.message.replace(given, error.param, 1)
            break
    return error
