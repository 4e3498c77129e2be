"""octavo bench sharing: what priorities and cores of the API process and of the engine bring, on one running server.

    start, warm-up    round 1   A: 1, 8, 32 streams   B: the same   C …
                      round 2   B   C …   A

One start serves all arrangements, and in every round all have their turn, so that a machine whose speed drifts is the
same machine for all. This client takes its share of the same cores, whatever the arrangement.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median

import orjson

from loadtest.arrangement import ARRANGEMENTS, AS_STARTED, Processes, may_raise, processor_seconds
from loadtest.client import Client, NoModel, Served, Target, Unreachable, clock
from loadtest.extras import MissingExtra
from loadtest.options import Flags, Help, positive, shell_words
from loadtest.outcome import Outcome
from loadtest.peers import PORT, Peer
from loadtest.report import aligned, summarise
from loadtest.running import Died, running, tree
from loadtest.traffic import closed_loop
from loadtest.workloads import BadWorkload, Prompt, TokenRange, random_prompts

START_SECONDS = 600.0
WARM_UP_TOKENS = 16
"""Of an answer: prompts enough to see which threads compute."""
FIGURES = {"output_tok_s": "tok/s", "ttft_ms": "TTFT", "itl_p50_ms": "ITL p50", "itl_p99_ms": "ITL p99"}
LEGEND = """\
Medians over rounds; times in ms, TTFT is itself a median. ±: half of what lies between lowest and highest round.
x: to "as started" of the same round, the median of rounds."""
FAILED, BAD_START, INTERRUPTED = 1, 2, 130


@dataclass(frozen=True, slots=True)
class Sample:
    """One arrangement with so many streams, in one round."""

    arrangement: str
    streams: int
    round: int
    output_tok_s: float
    ttft_ms: float
    """The median."""
    itl_p50_ms: float
    itl_p99_ms: float


@dataclass(slots=True)
class Sharing:
    """What was found so far."""

    cores: int = 0
    threads: int = 0
    """That share the engine's parallel regions."""
    samples: list[Sample] = field(default_factory=list)

    def lines(self) -> str:
        """For people."""
        rows = [["streams, arrangement", *(column for title in FIGURES.values() for column in (title, "±", "x"))]]
        cells = product(sorted({sample.streams for sample in self.samples}), (one.name for one in ARRANGEMENTS))
        rows += [[f"{cell[0]}, {cell[1]}", *self._columns(*cell)] for cell in cells if self._rounds(*cell, "round")]
        return "\n".join([f"{self.cores} cores, {self.threads} compute threads", *aligned(rows), LEGEND])

    def fields(self) -> dict[str, object]:
        """As JSON."""
        return {
            "sharing_cores": self.cores,
            "sharing_threads": self.threads,
            "sharing_samples": self.samples,
        }

    def _columns(self, streams: int, name: str) -> list[str]:
        columns = []
        for figure in FIGURES:
            mine, usual = (self._rounds(streams, which, figure) for which in (name, AS_STARTED.name))
            middle = median(mine.values())
            spread = (max(mine.values()) - min(mine.values())) / 2 / middle if middle else 0.0
            ratios = [mine[number] / usual[number] for number in mine if usual.get(number)]
            columns += [f"{middle:.1f}", f"{spread:.0%}", f"{median(ratios):.3f}" if ratios else ""]
        return columns

    def _rounds(self, streams: int, name: str, figure: str) -> dict[int, float]:
        """The figure by round."""
        samples = (one for one in self.samples if (one.streams, one.arrangement) == (streams, name))
        return {sample.round: getattr(sample, figure) for sample in samples}


async def measure(peer: Peer, args: argparse.Namespace, log: Path, found: Sharing) -> None:
    """Adds to `found`, cell by cell. Raises Died, MissingExtra, Unreachable, NoModel, BadWorkload or OSError."""
    async with (
        running(peer, log, START_SECONDS) as server,
        Client(Target(server.base_url, timeout=args.request_timeout)) as client,
    ):
        say(f"ready after {server.start_seconds:.1f} s, warming up")
        family = tree(server.process.pid)
        if len(family) < 2:
            raise Died("the server has no process of an engine")
        served, before = await client.served(), processor_seconds(family[1:])
        await load(client, served, args, max(args.concurrency), min(WARM_UP_TOKENS, args.output_len), args.seed)
        processes = Processes(family[0], family[1:], before)
        found.cores, found.threads = len(processes.cores), len(processes.compute)
        for number in range(args.repeat):
            first = number % len(args.arrangements)
            for arrangement in (*args.arrangements[first:], *args.arrangements[:first]):
                processes.arrange(arrangement)
                for streams in args.concurrency:
                    # No prompt twice: the second would come from the cache.
                    seed = args.seed + 1 + len(found.samples)
                    outcomes, seconds = await load(client, served, args, streams, args.output_len, seed)
                    sample = sample_of(arrangement.name, streams, number + 1, outcomes, seconds)
                    found.samples.append(sample)
                    where = f"round {sample.round}/{args.repeat}  {streams}, {sample.arrangement}"
                    say(f"{where}: {sample.output_tok_s:.1f} tok/s, ITL p99 {sample.itl_p99_ms:.0f} ms")


async def load(
    client: Client, served: Served, args: argparse.Namespace, streams: int, output_len: int, seed: int
) -> tuple[list[Outcome], float]:
    """A closed loop, and its seconds. Raises Died where a request fails: the others had more of the machine than they
    should."""
    tokens = TokenRange.of_vocabulary(served.vocab_size)
    prompts = random_prompts(streams * args.requests, args.input_len, output_len, 0.0, tokens, seed)
    options = {"model": served.model, "temperature": 0.0, "ignore_eos": True}

    async def send(prompt: Prompt, scheduled: float) -> Outcome:
        return await client.send(prompt, options, scheduled)

    began = clock()
    outcomes = await closed_loop(send, prompts, streams, lambda outcome: None)
    seconds = clock() - began
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    if failures:
        kind, message = failures[0].kind, failures[0].message
        raise Died(f"{len(failures)} of {len(outcomes)} requests failed, the first: {kind}: {message}")
    return outcomes, seconds


def sample_of(arrangement: str, streams: int, number: int, outcomes: Sequence[Outcome], seconds: float) -> Sample:
    summary = summarise(outcomes, seconds, [99.0], {})
    ttft, itl = summary.spreads["ttft"], summary.spreads["itl"]
    rate = summary.output_tokens / seconds
    return Sample(arrangement, streams, number, rate, ttft.median, itl.median, itl.percentiles[99.0])


# ---- the command ----


def make_parser() -> argparse.ArgumentParser:
    parser = Flags(
        "octavo bench sharing",
        description="Start a server, and give its running processes priorities and cores, in turn: what each brings.",
        formatter_class=Help,
    )
    add = parser.add_argument
    names = [one.name for one in ARRANGEMENTS if one != AS_STARTED]
    each = f"beside {AS_STARTED.name!r}; without it, all of: {'; '.join(names)}"
    add("--arrangements", nargs="+", choices=names, metavar="NAME", help=each)
    add("--concurrency", nargs="+", type=positive(int), default=[1, 8, 32], metavar="N", help="streams")
    add("--requests", type=positive(int), default=1, help="of each stream, one after another")
    add("--input-len", type=positive(int), default=128, help="tokens of a prompt")
    add("--output-len", type=positive(int), default=128, help="tokens of an answer")
    add("--repeat", type=positive(int), default=3, help="rounds; medians are shown")
    add("--threads", type=positive(int), metavar="N", help="of the engine (OMP_NUM_THREADS); without it, as it starts")
    serve = "more flags of `octavo serve`, MODEL too, in one string"
    add("--serve-flags", type=shell_words, default=[], metavar="FLAGS", help=serve)
    add("--request-timeout", type=positive(float), default=3600.0, help="seconds for one whole answer")
    add("--seed", type=int, default=0, help="of the prompts")
    add("--result-file", type=Path, help="write the figures as JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    """The exit status: 0; 1 where a request failed or the server ended; 2 where the run could not start, with one line
    why. However it ends, what was found is printed and written."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if not hasattr(os, "sched_setaffinity"):
        parser.error("threads are given cores on Linux only")
    asked = args.arrangements or [one.name for one in ARRANGEMENTS]
    args.arrangements = [one for one in ARRANGEMENTS if one == AS_STARTED or one.name in asked]
    if any(one.niced for one in args.arrangements) and not may_raise():
        say("no arrangement that is niced: this user could not take it back (root or CAP_SYS_NICE could)")
        args.arrangements = [one for one in args.arrangements if not one.niced]
    flags = ("--log-level", "warning", *args.serve_flags)
    command = (sys.executable, "-m", "server", "serve", "--port", PORT, *flags)
    threads = {"OMP_NUM_THREADS": str(args.threads)} if args.threads is not None else {}
    return run(Peer("octavo", "octavo", command, threads, ready="/ready"), args)


def run(peer: Peer, args: argparse.Namespace) -> int:
    """Measure, print, write; the exit status."""
    found, status = Sharing(), 0
    with tempfile.TemporaryDirectory(prefix="octavo-sharing-") as folder:
        try:
            asyncio.run(measure(peer, args, Path(folder, "log"), found))
        except (MissingExtra, BadWorkload, Unreachable, NoModel, OSError) as error:
            say(str(error))
            status = BAD_START
        except Died as error:
            say(str(error))
            status = FAILED
        except (KeyboardInterrupt, asyncio.CancelledError):
            status = INTERRUPTED
    if not found.samples:
        return status
    print(found.lines())
    if args.result_file is not None:
        try:
            fields = found.fields() | {"sharing_serve_flags": shlex.join(args.serve_flags)}
            args.result_file.write_bytes(orjson.dumps(fields))
        except OSError as error:
            say(f"cannot write {args.result_file}: {error.strerror}")
            return BAD_START
    return status


def say(line: str) -> None:
    print(f"octavo bench sharing: {line}", file=sys.stderr, flush=True)
