"""A conversation that is continued the next day: a server with --kv-disk, and another one after it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.daemon import Daemon, serve

STORY = "The old mill by the river stood quiet in the spring rain while people walked past it, number %d. "
FIRST = [{"role": "user", "content": "".join(STORY % number for number in range(25))}]


def chat(daemon: Daemon, messages: list[dict[str, str]], **fields: Any) -> tuple[str, int, int]:
    """Text, tokens of the prompt, and how many of them were cached."""
    body = {"messages": messages, "max_tokens": 20, "temperature": 0, **fields}
    reply = httpx.post(f"{daemon.url}/v1/chat/completions", json=body, timeout=60).json()
    usage = reply["usage"]
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return reply["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


def second(answer: str, question: str) -> list[dict[str, str]]:
    return [*FIRST, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]


def test_the_second_turn_is_warm_after_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "kv"
    flags = ("--kv-disk", str(file), "--kv-disk-size", "60MiB", "--kv-cache-memory", "64MiB")
    with serve(*flags) as daemon:
        answer, prompt, cached = chat(daemon, FIRST)
        assert prompt > 500
        assert cached == 0
        assert chat(daemon, FIRST, cache_salt="another tenant")[2] == 0
        warm, asked, cached = chat(daemon, second(answer, "Who walked past?"))
        assert asked - cached < 64
        held = subprocess.run([sys.executable, "-m", "server", "serve", *flags], capture_output=True, text=True)
        assert held.returncode == 2
        assert held.stderr.strip().splitlines()[-1].endswith("another server uses it")
        assert (file.stat().st_mode & 0o777, file.stat().st_size <= 60 << 20) == (0o600, True)

    with serve(*flags) as daemon:
        assert "were found" in daemon.log.read_text()
        assert chat(daemon, second(answer, "Who walked past?"), cache_salt="a third tenant")[2] == 0
        again, asked, cached = chat(daemon, second(answer, "Who walked past?"))
        assert again == warm, "the same text from the same keys"
        assert asked - cached < 64
        assert daemon.metric("octavo_kv_tier_hits_total") == 1
        assert daemon.metric("octavo_kv_tier_tokens_total", ("event", "restored")) == cached
        assert daemon.metric("octavo_kv_tier_bytes", ("state", "used")) > 0
