"""A client of any OpenAI-compatible server: what it serves, and one timed request at a time."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from loadtest.outcome import Failure, Outcome
from loadtest.stream import AnswerStream, error_message
from loadtest.workloads import Prompt

CHAT = "/chat/completions"
clock = time.perf_counter


class Unreachable(Exception):
    """Nothing answers there; one line."""


class NoModel(Exception):
    """/v1/models does not say what is served; one line."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    base_url: str
    """Without the endpoint, e.g. http://127.0.0.1:8000."""
    endpoint: str = "/v1/completions"
    headers: Mapping[str, str] | None = None
    timeout: float = 6 * 3600
    """Seconds for a whole answer."""
    keep_alive: bool = True
    """Else each request has a connection of its own: llama.cpp's server closes one after a stream, unannounced."""

    @property
    def is_chat(self) -> bool:
        return self.endpoint.rstrip("/").endswith(CHAT)


@dataclass(frozen=True, slots=True)
class Served:
    """What /v1/models says of the first model."""

    model: str
    vocab_size: int | None
    """Octavo names it, and llama.cpp; None where the server does not."""


class Client:
    """Sends requests. Use as an async context manager."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=60 if target.keep_alive else None, force_close=not target.keep_alive
            ),
            timeout=aiohttp.ClientTimeout(total=target.timeout, sock_connect=30),
            headers=target.headers,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def served(self) -> Served:
        """Raises Unreachable or NoModel."""
        url = f"{self._target.base_url}/v1/models"
        try:
            async with self._session.get(url) as response:
                body = await _json(response)
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"cannot reach {self._target.base_url}: {_reason(error)}") from None
        if response.status != 200:
            raise NoModel(f"{url} answers HTTP {response.status}: {error_message(body)}")
        try:
            card = body["data"][0]
            meta = card.get("meta") or {}
            size = card.get("vocab_size") or meta.get("n_vocab")
            return Served(str(card["id"]), size if isinstance(size, int) else None)
        except (KeyError, IndexError, TypeError, AttributeError):
            raise NoModel(f"{url} names no model; give one with --model") from None

    async def count_tokens(self, model: str, text: str) -> int | None:
        """Through the server's /tokenize; None where it has none."""
        body = await self._ask("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
        tokens = body.get("tokens")
        return len(tokens) if isinstance(tokens, list) else None

    async def text_of(self, model: str, tokens: list[int]) -> str | None:
        """Through the server's /detokenize; None where it has none."""
        body = await self._ask("/detokenize", {"model": model, "tokens": tokens})
        text = body.get("prompt", body.get("content"))
        return text if isinstance(text, str) else None

    async def _ask(self, path: str, question: dict[str, object]) -> dict[str, Any]:
        try:
            async with self._session.post(f"{self._target.base_url}{path}", json=question) as response:
                body = await _json(response)
        except (aiohttp.ClientError, OSError):
            return {}
        return body if response.status == 200 and isinstance(body, dict) else {}

    async def send(self, prompt: Prompt, options: Mapping[str, object], scheduled: float) -> Outcome:
        """Ask, and read the streamed answer to its end. options: further fields of the body. Never raises."""
        outcome = Outcome(scheduled, clock(), prompt.input_len)
        content = prompt.content
        asked = {"messages": [{"role": "user", "content": content}]} if self._target.is_chat else {"prompt": content}
        body = {
            **asked,
            "max_tokens": prompt.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        data = orjson.dumps(body)
        try:
            try:
                await self._read(data, outcome)
            except aiohttp.ServerDisconnectedError:
                # The server closed a kept-alive connection just as it was used again: no fault of the request.
                await self._read(data, outcome)
        except aiohttp.ConnectionTimeoutError as error:
            outcome.failure = Failure("connection", _reason(error))
        except TimeoutError:
            outcome.failure = Failure("timeout", f"no complete answer within {self._target.timeout:g} s")
        except (aiohttp.ClientError, OSError) as error:
            outcome.failure = Failure("connection", _reason(error))
        outcome.end = outcome.end or clock()
        return outcome

    async def _read(self, data: bytes, outcome: Outcome) -> None:
        url = self._target.base_url + self._target.endpoint
        async with self._session.post(url, data=data, headers={"Content-Type": "application/json"}) as response:
            if response.status != 200:
                outcome.failure = Failure(f"HTTP {response.status}", error_message(await _json(response)))
                return
            stream = AnswerStream(outcome)
            async for part in response.content.iter_any():
                stream.feed(part, clock())
            stream.finish(clock())


async def _json(response: aiohttp.ClientResponse) -> Any:
    """The body as JSON; as text where it is none."""
    data = await response.read()
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return data.decode(errors="replace")


def _reason(error: Exception) -> str:
    """In few words. asyncio's own say "Connect call failed" for every cause."""
    inner = getattr(error, "os_error", None) or error
    number = getattr(inner, "errno", None)
    return (os.strerror(number) if number and number > 0 else str(inner)) or type(error).__name__


async def texts_instead_of_tokens(client: Client, model: str, prompts: list[Prompt]) -> list[Prompt] | None:
    """The same prompts as text, for an endpoint that takes no tokens; None where the server can't say their text.

    The server may read the text as slightly more or fewer tokens.
    """
    gate = asyncio.Semaphore(16)

    async def convert(prompt: Prompt) -> Prompt | None:
        if isinstance(prompt.content, str):
            return prompt
        async with gate:
            text = await client.text_of(model, prompt.content)
        return None if text is None else Prompt(text, prompt.input_len, prompt.output_len)

    converted = await asyncio.gather(*map(convert, prompts))
    known = [prompt for prompt in converted if prompt is not None]
    return known if len(known) == len(prompts) else None
