"""Fields whose truth only a model can show."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.e2e.daemon import Daemon

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DRAWN = {"prompt": "My favourite word is", "max_tokens": 12, "temperature": 1.4, "seed": 3, "ignore_eos": True}


def ask(daemon: Daemon, path: str, **fields: Any) -> dict[str, Any]:
    reply = httpx.post(daemon.url + path, json=fields, timeout=60)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_best_of_returns_the_likeliest_of_what_n_would(daemon: Daemon) -> None:
    every = ask(daemon, COMPLETIONS, **DRAWN, n=5, logprobs=0)["choices"]
    means = [sum(choice["logprobs"]["token_logprobs"]) / 12 for choice in every]
    assert len(set(means)) == 5
    ranked = [every[i]["text"] for i in sorted(range(5), key=lambda i: -means[i])]
    best = ask(daemon, COMPLETIONS, **DRAWN, n=2, best_of=5)
    assert [choice["text"] for choice in best["choices"]] == ranked[:2]
    assert [(choice["index"], choice["logprobs"]) for choice in best["choices"]] == [(0, None), (1, None)]
    assert best["usage"]["completion_tokens"] == 60


def test_choices_are_the_same_streamed_and_not(daemon: Daemon) -> None:
    """Each draws by itself, and again the same."""
    whole = ask(daemon, COMPLETIONS, **DRAWN, n=3)["choices"]
    reply = httpx.post(daemon.url + COMPLETIONS, json={**DRAWN, "n": 3, "stream": True}, timeout=60)
    texts = [""] * 3
    for line in reply.text.splitlines():
        if line.startswith("data: {"):
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole]
    assert len(set(texts)) == 3


def test_logprobs_of_given_tokens(daemon: Daemon) -> None:
    """Those that are among the likeliest anyway have the same numbers; the others come behind."""
    fields = {"messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 4, "temperature": 0}
    plain = ask(daemon, CHAT, **fields, logprobs=True, top_logprobs=3, return_tokens_as_token_ids=True)
    first = plain["choices"][0]["logprobs"]["content"][0]
    second = int(first["top_logprobs"][1]["token"].removeprefix("token_id:"))
    asked = {"logprob_token_ids": [second, 0, 49_000, 0], "return_tokens_as_token_ids": True}
    given = ask(daemon, CHAT, **fields, logprobs=True, top_logprobs=1, **asked)["choices"][0]
    for entry in given["logprobs"]["content"]:
        names = [top["token"] for top in entry["top_logprobs"]]
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert {f"token_id:{id}" for id in (second, 0, 49_000)} <= set(names)
        assert len(names) == len(set(names))
        assert values == sorted(values, reverse=True)
    found = {top["token"]: top["logprob"] for top in given["logprobs"]["content"][0]["top_logprobs"]}
    assert found[f"token_id:{second}"] == pytest.approx(first["top_logprobs"][1]["logprob"], abs=1e-5)


def test_timings_add_up(daemon: Daemon) -> None:
    body = ask(daemon, COMPLETIONS, **DRAWN, timings_per_token=True)
    timings, usage = body["timings"], body["usage"]
    assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
    assert timings["predicted_n"] == usage["completion_tokens"] == 12
    assert timings["predicted_ms"] > 0 < timings["prompt_ms"]
    assert timings["predicted_per_second"] == pytest.approx(12_000 / timings["predicted_ms"], rel=1e-3)


def likelihood(daemon: Daemon, choice: dict[str, Any]) -> float:
    """Logprob of a choice's tokens behind its prompt, from the echo of both."""
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    whole = ask(daemon, COMPLETIONS, prompt=ids, max_tokens=0, echo=True, logprobs=0)
    return float(sum(whole["choices"][0]["logprobs"]["token_logprobs"][len(choice["prompt_token_ids"]) :]))


def test_beams_find_what_is_likelier_than_greed(daemon: Daemon) -> None:
    fields = {"prompt": "The best way to learn is", "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    greedy = ask(daemon, COMPLETIONS, **fields, temperature=0)["choices"][0]
    one = ask(daemon, COMPLETIONS, **fields, use_beam_search=True)["choices"][0]
    assert one["text"] == greedy["text"], "a single beam is greedy"
    body = ask(daemon, COMPLETIONS, **fields, use_beam_search=True, n=4)
    found = [likelihood(daemon, choice) for choice in body["choices"]]
    assert len({tuple(choice["token_ids"]) for choice in body["choices"]}) == 4
    assert found == pytest.approx(sorted(found, reverse=True), abs=1e-4)
    assert found[0] >= likelihood(daemon, greedy) - 1e-3
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (6, 32)
    told = [choice["cumulative_logprob"] for choice in body["choices"]]
    assert told == pytest.approx(found, abs=1e-2)
    daemon.wait(daemon.at_rest, 2, "blocks freed")
