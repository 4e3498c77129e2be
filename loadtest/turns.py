"""octavo bench turns: how long the second turn of a conversation waits for its first token, before and after a restart.

    server with --kv-disk   first turn ── answer ── second turn
    the same, started anew                          second turn, of another question

The second turn repeats the first and its answer, so nearly all of it was computed before: it lies in the pool, and
after the restart in the file.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import orjson

from loadtest.client import clock
from loadtest.extras import MissingExtra
from loadtest.options import Flags, Help, byte_count, positive, shell_words
from loadtest.peers import PORT, Peer
from loadtest.report import row
from loadtest.running import Died, Running, running

START_SECONDS = 600.0
TEXT = "the old mill by the river stood quiet in the spring rain while people walked past it and talked about their day"
QUESTIONS = ("What did they talk about, and why?", "Who walked past, and when was that?")
"""Of the second turn, before and after the restart."""
WARM_UP = [{"role": "user", "content": "Hello!"}]
ALL_FAILED, BAD_START, INTERRUPTED = 1, 2, 130


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one request."""

    ttft: float
    """Seconds."""
    text: str
    prompt_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Turns:
    """Answers of all conversations, turn by turn."""

    first: list[Answer] = field(default_factory=list)
    second: list[Answer] = field(default_factory=list)
    restarted: list[Answer] = field(default_factory=list)

    def lines(self) -> str:
        """For people."""
        lines = [row("Tokens of a first turn:", self.first[0].prompt_tokens)]
        for name, answers in self._turns().items():
            lines.append(row(f"Median TTFT, {name} (ms):", 1000 * _ttft(answers)))
            if answers is not self.first:
                lines.append(row(f"Cached tokens, {name}:", int(median(answer.cached_tokens for answer in answers))))
                lines.append(row(f"First turn / {name}:", _ttft(self.first) / _ttft(answers)))
        return "\n".join(lines)

    def fields(self) -> dict[str, object]:
        """The same as JSON."""
        found: dict[str, object] = {"turns_prompt_tokens": self.first[0].prompt_tokens}
        for name, answers in zip(("first", "second", "restarted"), self._turns().values(), strict=True):
            found[f"turns_{name}_ttft_ms"] = 1000 * _ttft(answers)
            found[f"turns_{name}_cached_tokens"] = [answer.cached_tokens for answer in answers]
        return found

    def _turns(self) -> dict[str, list[Answer]]:
        return {"first turn": self.first, "second turn": self.second, "after a restart": self.restarted}


def _ttft(answers: Sequence[Answer]) -> float:
    return median(answer.ttft for answer in answers)


async def ask(session: aiohttp.ClientSession, url: str, messages: list[dict[str, str]], max_tokens: int) -> Answer:
    """One streamed chat. Raises Died where it is not answered."""
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    began, first, text = clock(), None, ""
    usage: dict[str, Any] = {}
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                if response.status != 200:
                    raise Died(f"HTTP {response.status}: {line.decode(errors='replace').strip()[:300]}")
                continue
            event = orjson.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                if content := choice["delta"].get("content"):
                    first = first or clock()
                    text += content
    if first is None or not usage:
        raise Died("an answer without text, or without usage")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(first - began, text, usage["prompt_tokens"], cached)


def conversations(count: int, words: int, seed: int) -> list[str]:
    """First questions that have not even their beginning in common."""
    drawn = random.Random(seed)
    return [" ".join(drawn.choices(TEXT.split(), k=words)) for _ in range(count)]


async def measure(args: argparse.Namespace, disk: Path, log: Path) -> Turns:
    """Raises Died, MissingExtra."""
    found = Turns()
    openings = conversations(args.conversations, args.input_len, args.seed)
    flags = ("--kv-disk", str(disk), "--kv-disk-size", str(args.kv_disk_size), "--log-level", "warning")
    command = (sys.executable, "-m", "server", "serve", "--port", PORT, *flags, *args.serve_flags)
    peer = Peer("octavo", "octavo", command, ready="/ready")

    async def turn(server: Running, session: aiohttp.ClientSession, opening: str, number: int | None) -> Answer:
        messages = [{"role": "user", "content": opening}]
        if number is not None:
            answer = found.first[openings.index(opening)].text
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": QUESTIONS[number]}]
        return await ask(session, server.base_url, messages, args.output_len)

    timeout = aiohttp.ClientTimeout(total=args.request_timeout)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        async with running(peer, log, START_SECONDS) as server:
            await ask(session, server.base_url, WARM_UP, args.output_len)
            for opening in openings:
                found.first.append(await turn(server, session, opening, None))
                found.second.append(await turn(server, session, opening, 0))
        async with running(peer, log, START_SECONDS) as server:
            await ask(session, server.base_url, WARM_UP, args.output_len)
            for opening in openings:
                found.restarted.append(await turn(server, session, opening, 1))
    return found


# ---- the command ----


def make_parser() -> argparse.ArgumentParser:
    parser = Flags(
        "octavo bench turns",
        description="Start a server with --kv-disk, and time first and second turns, before and after a restart.",
        formatter_class=Help,
    )
    add = parser.add_argument
    add("--conversations", type=positive(int), default=3, help="one after another; times are medians")
    add("--input-len", type=positive(int), default=2970, help="words of a first turn, a token each in most tokenizers")
    add("--output-len", type=positive(int), default=32, help="tokens of an answer")
    add("--kv-disk", type=Path, metavar="FILE", help="without it, a file in a temporary folder")
    add("--kv-disk-size", type=byte_count, default=1 << 30, metavar="BYTES", help="of that file")
    serve = "more flags of `octavo serve`, MODEL too, in one string"
    add("--serve-flags", type=shell_words, default=[], metavar="FLAGS", help=serve)
    add("--request-timeout", type=positive(float), default=3600.0, help="seconds for one whole answer")
    add("--seed", type=int, default=0, help="of the words")
    add("--result-file", type=Path, help="write the figures as JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    """The exit status: 0; 1 where a request was not answered; 2 where the run could not start, with one line why."""
    args = make_parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="octavo-turns-") as folder:
        try:
            found = asyncio.run(measure(args, args.kv_disk or Path(folder, "kv"), Path(folder, "log")))
            print(found.lines())
            if args.result_file is not None:
                args.result_file.write_bytes(orjson.dumps(found.fields()))
        except (MissingExtra, OSError) as error:
            print(f"octavo bench turns: {error}", file=sys.stderr)
            return BAD_START
        except (Died, aiohttp.ClientError) as error:
            print(f"octavo bench turns: {error}", file=sys.stderr)
            return ALL_FAILED
        except (KeyboardInterrupt, asyncio.CancelledError):
            return INTERRUPTED
    return 0
