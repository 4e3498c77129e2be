"""The same request gives the same bytes: alone, streamed, and in a batch of 32; greedy and seeded."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.e2e.daemon import Daemon

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENS = 24
LINE = "A register of names and codes, in no order at all. "
GREEDY = {"temperature": 0}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
HARD = {"temperature": 1.3, "top_k": 40, "seed": 11, "presence_penalty": 0.5, "logit_bias": {"28": -3}}

Request = tuple[str, dict[str, Any]]


def completion(prompt: str, **fields: Any) -> Request:
    return COMPLETIONS, {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 2, **fields}


def chat(text: str, **fields: Any) -> Request:
    messages = [{"role": "user", "content": text}]
    scored = {"logprobs": True, "top_logprobs": 2}
    return CHAT, {"messages": messages, "max_tokens": TOKENS, "ignore_eos": True, **scored, **fields}


PROBES = [
    completion("Once upon a time", **GREEDY),
    completion(LINE * 12 + "The first name is", **GREEDY),
    completion("Once upon a time", **SEEDED),
    completion(LINE * 7 + "The last code is", **HARD),
    chat("Name three colours.", **GREEDY),
    chat("Write a line of verse about rain.", **SEEDED),
]
OTHERS = [completion(LINE * (n % 5) + f"Entry {n}:", **(GREEDY if n % 2 else {"seed": n})) for n in range(26)]


@dataclass(slots=True)
class Heard:
    """One answer: every text, logprob and end in it, and when its first text and its end came."""

    text: str
    logprobs: str
    finish_reason: str
    first: float
    end: float

    @property
    def bytes(self) -> tuple[str, str, str]:
        return self.text, self.logprobs, self.finish_reason


def heard(parts: list[dict[str, Any]], first: float) -> Heard:
    """`parts`: choices of chunks, or the one of a whole answer."""
    text = ""
    scores: list[Any] = []
    for part in parts:
        body = part.get("delta") or part.get("message") or {"content": part.get("text")}
        text += body.get("content") or ""
        lists = part["logprobs"] or {}
        scores += lists.get("content") or list(
            zip(*(lists.get(k) or () for k in ("tokens", "token_logprobs")), strict=True)
        )
        scores += lists.get("top_logprobs") or []
    # Chat brings one list, completions two that a stream interleaves: their order is no matter of the numbers.
    return Heard(text, json.dumps(sorted(map(json.dumps, scores))), parts[-1]["finish_reason"], first, time.monotonic())


async def whole(client: httpx.AsyncClient, request: Request) -> Heard:
    reply = (await client.post(request[0], json=request[1])).raise_for_status()
    return heard(reply.json()["choices"], 0.0)


async def streamed(client: httpx.AsyncClient, request: Request) -> Heard:
    parts: list[dict[str, Any]] = []
    first = 0.0
    async with client.stream("POST", request[0], json={**request[1], "stream": True}) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                parts += json.loads(line.removeprefix("data: "))["choices"]
                said = parts[-1].get("text") or parts[-1].get("delta", {}).get("content")
                first = first or (time.monotonic() if said else 0.0)
    return heard(parts, first)


def test_alone_streamed_and_in_a_batch_of_32(daemon: Daemon) -> None:
    """Every character and every logprob, to the last bit."""

    async def run() -> tuple[list[Heard], list[Heard], list[Heard]]:
        limits = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(base_url=daemon.url, timeout=120, limits=limits) as client:
            fingerprint = (await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})).json()
            if "-bfloat16-kv-" not in fingerprint["system_fingerprint"]:
                pytest.skip("without our kernels sums are taken in other orders")
            alone = [await whole(client, probe) for probe in PROBES]
            by_stream = [await streamed(client, probe) for probe in PROBES]
            crowd = await asyncio.gather(*(streamed(client, request) for request in [*OTHERS, *PROBES]))
            return alone, by_stream, list(crowd)

    alone, by_stream, crowd = asyncio.run(run())
    assert max(one.first for one in crowd) < min(one.end for one in crowd), "they did not run at once"
    for probe, one, two, three in zip(PROBES, alone, by_stream, crowd[len(OTHERS) :], strict=True):
        assert len(one.text) > 20
        assert one.bytes == two.bytes == three.bytes, probe
    assert len({one.text for one in alone}) == len(PROBES)
    daemon.wait(daemon.at_rest, 2, "blocks freed")
