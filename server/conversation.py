"""A conversation on its way to the engine and back, for every route that has one, whatever its words for it.

ChatRequest, Chat ──▶ begin: prompt, parameters, format ──▶ Generation ──▶ turns: pieces of one answer
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from server.errors import RequestError
from server.generation import Generation, Job
from server.parsing.answer import AnswerFormat, AnswerParser
from server.parsing.forcing import forced
from server.pieces import Piece, joined
from server.prompts import check_values
from server.protocol.chat import ChatRequest
from server.service import Caller
from server.streams import StreamOptions, TextEvent
from server.template import Chat


async def begin(generation: Generation, body: ChatRequest, chat: Chat, caller: Caller) -> AnswerFormat:
    """Tokenise, check, submit; how to read what comes back. Raises whatever the client did wrong."""
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
    last = chat.messages[-1]["content"] if body.continue_final_message else None
    inside = formats.inside(prompt.text or "", last)
    use = body.use
    format = formats.answer(use, body.splits_reasoning, inside)
    structure = forced(formats, use, body.structure, inside=inside, thinks=formats.thinks(prompt.text or ""))
    grammar = await loaded.structures.grammar(structure)
    options = StreamOptions(
        shown=formats.shown(format),
        reasoning=format.reasoning,
        inside=inside,
        stop=tuple(body.stop),
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        min_tokens=body.min_tokens,
        token_ids=body.return_token_ids,
        interval=body.stream_interval,
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
        caller.tenant,
        caller.salt,
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
    """The same error about the same field, by the name that it has on another route. Of several the longest counts."""
    given = error.param or ""
    for name in sorted(names, key=len, reverse=True):
        if given == name or given.startswith(f"{name}."):
            error.param = names[name] + given.removeprefix(name)
            error.message = error.message.replace(given, error.param, 1)
            break
    return error
