"""Requests of many kinds, and what their clients got: the same with faults as without."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from tests.e2e.daemon import MODEL, Daemon

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "inhabitants": {"type": "integer"}},
    "required": ["city", "inhabitants"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """All of one answer: per choice its text and why it ended; the tokens that were counted."""

    texts: tuple[str, ...]
    finishes: tuple[str, ...]
    usage: tuple[int, int]


def mixture(count: int) -> list[dict[str, Any]]:
    """`count` requests: greedy, seeded, of several choices, with stops, a schema, logprobs, beams; a ninth whole."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 1, "seed": 6, "n": 2},
        {"temperature": 0.8, "seed": 7, "top_p": 0.9, "frequency_penalty": 0.5},
        {"temperature": 0, "stop": [" which", "\n\n"]},
        {"temperature": 0, "extra_body": {"structured_outputs": {"json": SCHEMA}}},
        {"temperature": 0.7, "seed": 8, "logprobs": 2, "echo": True},
        {"temperature": 0, "stream": False},
        {"n": 2, "max_tokens": 16, "extra_body": {"use_beam_search": True, "beam_width": 4}},
    ]
    return [
        {"prompt": f"Story {number}: once upon a time", "max_tokens": 48, "stream": True, **kinds[number % len(kinds)]}
        for number in range(count)
    ]


async def ask(client: AsyncOpenAI, fields: dict[str, Any]) -> Answer:
    """Raises what the SDK makes of an error."""
    n = fields.get("n", 1)
    if not fields["stream"]:
        whole = await client.completions.create(model=MODEL, **fields)
        assert whole.usage is not None
        texts, finishes = [c.text for c in whole.choices], [str(c.finish_reason) for c in whole.choices]
        return Answer(tuple(texts), tuple(finishes), (whole.usage.prompt_tokens, whole.usage.completion_tokens))
    texts, finishes, usage = [""] * n, [""] * n, (0, 0)
    async for chunk in await client.completions.create(model=MODEL, stream_options={"include_usage": True}, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
        if chunk.usage is not None:
            usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
    return Answer(tuple(texts), tuple(finishes), usage)


async def ask_all(daemon: Daemon, requests: list[dict[str, Any]]) -> list[Answer | BaseException]:
    """At once; every failure is an answer of its own."""
    async with AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        return await asyncio.gather(*(ask(client, fields) for fields in requests), return_exceptions=True)
