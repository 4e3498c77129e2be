"""What `octavo bench turns` says of a conversation, and how it fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from loadtest.running import Died
from loadtest.turns import Answer, Turns, ask, conversations, main
from tests.loadtest.scripted import Reply, event, serving

USAGE = {"prompt_tokens": 3000, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 2992}}


def asked(answer: Any) -> Answer:
    async def run(url: str) -> Answer:
        async with aiohttp.ClientSession() as session:
            return await ask(session, url, [{"role": "user", "content": "x"}], 2)

    with serving(answer) as server:
        return asyncio.run(run(server.url))


def chunk(text: str) -> bytes:
    return event({"choices": [{"delta": {"content": text}}], "usage": None})


def test_an_answer_is_timed_to_its_first_text() -> None:
    def answer(path: str, body: dict[str, Any]) -> Reply:
        assert path == "/v1/chat/completions"
        assert body["temperature"] == 0
        role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        end = event({"choices": [], "usage": USAGE}) + b"data: [DONE]\n\n"
        return Reply([(0, role), (0.05, chunk("a")), (0.2, chunk("b") + end)])

    found = asked(answer)
    assert 0.05 <= found.ttft < 0.2
    assert (found.text, found.prompt_tokens, found.cached_tokens) == ("ab", 3000, 2992)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply([(0, b'{"error": {"message": "full"}}')], status=429), "HTTP 429: .*full"),
        (Reply([(0, event({"choices": [], "usage": USAGE}))]), "without text"),
        (Reply([(0, chunk("a"))]), "without usage"),
    ],
)
def test_no_answer(reply: Reply, words: str) -> None:
    with pytest.raises(Died, match=words):
        asked(lambda path, body: reply)


def test_figures() -> None:
    first, second = Answer(4.0, "a", 3000, 0), Answer(0.25, "b", 3050, 3024)
    found = Turns([first] * 3, [second] * 3, [Answer(0.5, "c", 3050, 3008)] * 3)
    lines = [line.split() for line in found.lines().splitlines()]
    assert [line[-1] for line in lines] == ["3000", "4000.00", "250.00", "3024", "16.00", "500.00", "3008", "8.00"]
    fields = found.fields()
    assert (fields["turns_first_ttft_ms"], fields["turns_restarted_cached_tokens"]) == (4000.0, [3008] * 3)


def test_conversations_differ_from_their_beginning_on() -> None:
    made = conversations(4, 100, seed=1)
    assert made == conversations(4, 100, seed=1)
    assert len({text[:40] for text in made}) == 4
    assert [len(text.split()) for text in made] == [100] * 4


def test_a_server_that_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--serve-flags", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err
