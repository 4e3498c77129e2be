"""octavo bench fairness: what one tenant feels of another that asks for far more.

polite   ▂ ▂ ▂ ▂              ▂  ▂  ▂  ▂       one request after another, the same number alone and beside
hostile          ┠───────────────────────      all at once; those that still run at the end are dropped
           alone  settle       beside

The two are told apart by their keys, or where the server has none by `user`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import orjson

from loadtest.client import Client, NoModel, Served, Target, Unreachable, clock
from loadtest.options import Flags, Help, base_url, positive
from loadtest.outcome import Outcome
from loadtest.report import row
from loadtest.traffic import Send
from loadtest.workloads import BadWorkload, TokenRange, random_prompts

NOTHING_MEASURED, BAD_START, INTERRUPTED = 1, 2, 130


@dataclass(frozen=True, slots=True)
class Fairness:
    """What was found. Of the polite tenant, alone and beside the hostile one."""

    alone: list[Outcome]
    beside: list[Outcome]
    hostile: int
    """Requests of the hostile tenant."""
    ended: int
    """Of these, answered to their end before the polite tenant was done."""
    failures: dict[str, int]
    """Of these, by kind."""

    @property
    def ttft_ratio(self) -> float | None:
        """Median by median; None where one of them was not measured."""
        return _ratio(_ttfts(self.alone), _ttfts(self.beside))

    @property
    def gap_ratio(self) -> float | None:
        return _ratio(_gaps(self.alone), _gaps(self.beside))

    @property
    def warning(self) -> str | None:
        """Why the figures say less than they should; None where they don't."""
        lost = sum(outcome.failure is not None for outcome in self.alone + self.beside)
        asked = f"of {self.hostile} hostile requests"
        reasons = [f"{lost} polite requests failed"] if lost else []
        reasons += [f"{count} {asked} failed: {kind}" for kind, count in self.failures.items()]
        if self.ended:
            reasons.append(f"{self.ended} {asked} had ended: raise their number or --hostile-output-len")
        return "; ".join(reasons) or None

    def lines(self) -> str:
        """For people."""
        lines = []
        for name, values in (("TTFT", _ttfts), ("gap between tokens", _gaps)):
            alone, beside = values(self.alone), values(self.beside)
            if alone and beside:
                lines += [
                    row(f"Median {name} alone (ms):", median(alone) * 1000),
                    row(f"Median {name} beside (ms):", median(beside) * 1000),
                    row(f"Worst {name} beside (ms):", max(beside) * 1000),
                    row(f"{name}, beside / alone:", median(beside) / median(alone)),
                ]
        return "\n".join([*lines, *([f"WARNING: {self.warning}"] if self.warning else [])])

    def fields(self) -> dict[str, object]:
        """The same as JSON (docs/operations.md); null where nothing was measured."""
        fields: dict[str, object] = {"hostile": self.hostile, "hostile_ended": self.ended, "warning": self.warning}
        for name, values in (("ttft", _ttfts), ("gap", _gaps)):
            for phase, outcomes in (("alone", self.alone), ("beside", self.beside)):
                found = values(outcomes)
                fields[f"{name}_{phase}_ms"] = median(found) * 1000 if found else None
                fields[f"worst_{name}_{phase}_ms"] = max(found) * 1000 if found else None
        fields |= {"ttft_ratio": self.ttft_ratio, "gap_ratio": self.gap_ratio}
        return {f"fairness_{name}": value for name, value in fields.items()}


def _ttfts(outcomes: Sequence[Outcome]) -> list[float]:
    return [outcome.ttft for outcome in outcomes if outcome.failure is None]


def _gaps(outcomes: Sequence[Outcome]) -> list[float]:
    good = (outcome for outcome in outcomes if outcome.failure is None)
    return [b - a for outcome in good for a, b in pairwise(outcome.beats or outcome.arrivals)]


def _ratio(alone: Sequence[float], beside: Sequence[float]) -> float | None:
    return median(beside) / median(alone) if alone and beside and median(alone) > 0 else None


async def measure(args: argparse.Namespace) -> Fairness:
    """Raises Unreachable, NoModel or BadWorkload."""
    async with _client(args, args.api_key) as polite, _client(args, args.hostile_api_key) as hostile:
        served = await polite.served() if args.model is None else Served(args.model, None)
        tokens = TokenRange.of_vocabulary(args.vocab_size or served.vocab_size)
        # No prompt twice: the second would come from the cache.
        prompts = random_prompts(2 * args.requests + 1, args.input_len, args.output_len, 0.0, tokens, args.seed)
        lengths = (args.hostile_input_len, args.hostile_output_len, 0.0)
        flood = random_prompts(args.hostile_requests, *lengths, tokens, args.seed + 1)

        def sender(client: Client, user: str) -> Send:
            fields = {"model": served.model, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
            return lambda prompt, due: client.send(prompt, {**fields, "user": user}, due)

        send = sender(polite, "polite")
        first, *rest = prompts
        await send(first, clock())
        alone = [await send(prompt, clock()) for prompt in rest[: args.requests]]
        flooding = [asyncio.ensure_future(sender(hostile, "hostile")(prompt, clock())) for prompt in flood]
        try:
            await asyncio.sleep(args.settle)
            beside = [await send(prompt, clock()) for prompt in rest[args.requests :]]
            over = [task.result() for task in flooding if task.done()]
        finally:
            for task in flooding:
                task.cancel()
            await asyncio.gather(*flooding, return_exceptions=True)
        failures = Counter(outcome.failure.kind for outcome in over if outcome.failure is not None)
        return Fairness(alone, beside, len(flood), len(over) - failures.total(), dict(failures))


def _client(args: argparse.Namespace, key: str | None) -> Client:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return Client(Target(args.base_url, headers=headers, timeout=args.request_timeout))


# ---- the command ----


def make_parser() -> argparse.ArgumentParser:
    parser = Flags(
        "octavo bench fairness",
        description="What a tenant that asks for little feels of one that asks for much.",
        formatter_class=Help,
    )
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", type=base_url, help="the server, without the endpoint")
    add("--model", help="its name in requests; without it the first of /v1/models")
    add("--api-key", help="of the polite tenant; without it, OPENAI_API_KEY from the environment")
    add("--hostile-api-key", help="of the hostile one; without keys the two differ by `user`")
    add("--requests", type=positive(int), default=8, help="polite ones, one after another, alone and then beside")
    add("--input-len", type=positive(int), default=256, help="tokens of their prompts")
    add("--output-len", type=positive(int), default=32, help="tokens of their answers")
    add("--hostile-requests", type=positive(int), default=64, help="sent at once")
    add("--hostile-input-len", type=positive(int), default=4000, help="tokens of their prompts")
    add("--hostile-output-len", type=positive(int), default=4000, help="tokens of their answers")
    add("--settle", type=positive(float), default=5.0, help="seconds from the hostile requests to the next polite one")
    add("--request-timeout", type=positive(float), default=3600.0, help="seconds for one whole answer")
    add("--vocab-size", type=positive(int), help="without it, asked from the server, else 32000")
    add("--seed", type=int, default=0, help="of the prompts; one sent again may come from a cache")
    add("--result-file", type=Path, help="write the figures as JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    """The exit status: 0; 1 where no polite request was answered, alone or beside; 2 where the run could not start,
    with one line why."""
    parser = make_parser()
    args = parser.parse_args(argv)
    args.api_key = args.api_key or os.environ.get("OPENAI_API_KEY")
    if (args.api_key is None) != (args.hostile_api_key is None) or (
        args.api_key and args.api_key == args.hostile_api_key
    ):
        parser.error("with keys each tenant needs its own: --api-key and --hostile-api-key")
    try:
        found = asyncio.run(measure(args))
        print(found.lines())
        if args.result_file is not None:
            args.result_file.write_bytes(orjson.dumps(found.fields()))
    except (Unreachable, NoModel, BadWorkload) as error:
        print(f"octavo bench fairness: {error}", file=sys.stderr)
        return BAD_START
    except OSError as error:
        print(f"octavo bench fairness: cannot write {args.result_file}: {error.strerror}", file=sys.stderr)
        return BAD_START
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0 if found.ttft_ratio is not None else NOTHING_MEASURED
