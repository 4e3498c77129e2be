"""The soak's judgement: what it calls broken, and what its own faults explain."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from loadtest.soak import call_checkers, make_parser
from loadtest.soak_clients import Clients, Read, Seen, read_stream, read_whole
from loadtest.soak_traffic import MALFORMED, Ask, Traffic
from tests.loadtest.scripted import Reply, event, serving

WHOLE = event({"choices": [{"text": "a", "finish_reason": None}]}) + event(
    {"choices": [{"text": "b", "finish_reason": "stop"}]}
)
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("data", "read"),
    [
        (WHOLE + DONE, Read("ab", 2)),
        (b": keep-alive\n\n" + WHOLE + DONE, Read("ab", 2)),
        (WHOLE, Read(fault="a stream that breaks off")),
        (b"", Read(fault="a stream that breaks off")),
        (WHOLE[: len(WHOLE) // 2 + 1] + b"\n\n", Read(fault="a stream that breaks off")),
        (event({"choices": [{"text": "a"}]}) + DONE, Read("a", 1, "a stream without a finish reason")),
        (WHOLE + event({"error": {"code": "engine_error"}}) + DONE, Read(fault="an error event: engine_error")),
    ],
)
def test_streams(data: bytes, read: Read) -> None:
    assert read_stream(data) == read


def test_whole_answers() -> None:
    assert read_whole(b'{"choices": [{"text": "ab"}], "usage": {"completion_tokens": 2}}') == Read("ab", 2)
    assert read_whole(b'{"data": [], "usage": {"prompt_tokens": 2}}') == Read("", 0)
    for data in (b"", b"{", b"[]", b'{"choices": []}'):
        assert read_whole(data).fault is not None


def asked(
    ask: Ask,
    answer: Callable[[str, dict[str, Any]], Reply],
    times: int = 1,
    state: dict[str, float] | None = None,
) -> Seen:
    """What the clients of a soak see of it."""

    async def run(url: str) -> Seen:
        server: Any = SimpleNamespace(base_url=url, check=lambda: None)
        clients = Clients(server, Traffic(0), 1)
        for name, value in (state or {}).items():
            setattr(clients, name, value)
        async with aiohttp.ClientSession() as session:
            for _ in range(times):
                await clients._ask(session, ask)
        return clients.seen

    with serving(answer) as server:
        return asyncio.run(run(server.url))


def test_a_grammar_is_asked_for_before_files_are_counted() -> None:
    with serving(lambda path, body: Reply([(0.0, b"{}")])) as server:
        asyncio.run(call_checkers(server.url))
        (body,) = server.bodies
    assert body["structured_outputs"] == {"regex": "a"}


SHORT = Ask("short", "/v1/completions", {"prompt": "x"})
FULL = json.dumps({"error": {"code": "server_overloaded"}}).encode()


@pytest.mark.parametrize(
    ("status", "state", "broken"),
    [
        (429, {"_burst_until": float("inf")}, None),
        (429, {"_down_until": float("inf")}, "short: HTTP 429 server_overloaded"),
        (503, {"_down_until": float("inf")}, None),
        (503, {}, "short: HTTP 503 server_overloaded"),
        (500, {"_down_until": float("inf"), "_burst_until": float("inf")}, "short: HTTP 500 server_overloaded"),
    ],
)
def test_refusals_are_explained_by_faults(status: int, state: dict[str, float], broken: str | None) -> None:
    seen = asked(SHORT, lambda path, body: Reply([(0, FULL)], status), state=state)
    assert dict(seen.broken) == ({} if broken is None else {broken: 1})


def test_a_text_that_changes() -> None:
    texts = itertools.chain(["a", "a", "b"], itertools.repeat("a"))

    def answer(path: str, body: dict[str, Any]) -> Reply:
        whole = {"choices": [{"text": next(texts)}], "usage": {"completion_tokens": 1}}
        return Reply([(0, json.dumps(whole).encode())])

    seen = asked(Ask("canary", "/v1/completions", {"prompt": "x"}), answer, 4)
    assert seen.broken == {"canary: another text": 1}
    assert seen.tokens == 4


def test_a_stream_that_is_cut() -> None:
    seen = asked(
        Ask("chat", "/v1/chat/completions", {"stream": True}), lambda path, body: Reply([(0, WHOLE)], cut=True)
    )
    (broken,) = seen.broken
    assert broken.startswith("chat: no answer: ")


def test_what_is_no_request_must_be_refused() -> None:
    ask = Ask("malformed", "/v1/completions", {"n": -1}, frozenset({400}))
    assert asked(ask, lambda path, body: Reply([(0, FULL)], 400)).broken == {}
    assert sum(asked(ask, lambda path, body: Reply([(0, b"{}")])).broken.values()) == 1


def test_every_kind_is_drawn() -> None:
    traffic = Traffic(1)
    kinds = {traffic.draw().kind for _ in range(300)}
    assert kinds == {"canary", "short", "long", "shared", "several", "form", "embed", "chat"}
    assert len({repr(traffic.malformed().body)[:50] for _ in range(300)}) == len(MALFORMED)


def test_sums() -> None:
    total, part = Seen(), Seen()
    part.ends["whole"] = 2
    part.broken["x"] = 1
    part.tokens, part.bursts, part.kills = 5, 1, 2
    total.add(part)
    total.add(part)
    assert (total.ends["whole"], total.broken["x"], total.tokens, total.bursts, total.kills) == (4, 2, 10, 2, 4)


def test_flags() -> None:
    args = make_parser().parse_args(["--duration", "60", "--no-kill", "--max-growth", "64MiB"])
    assert (args.duration, args.no_kill, args.max_growth) == (60.0, True, 64 << 20)
