"""The rounds of a comparison. Each server has the machine to itself; in every round all have their turn, so that a
machine whose speed drifts is the same machine for all.

    round 1   A: start, cells, stop   B: start, cells, stop   C …
    round 2   A: start, cells, stop   B …
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from loadtest.cells import Cell, Words
from loadtest.client import Client, NoModel, Target, Unreachable, clock
from loadtest.comparison import Figures, Run
from loadtest.outcome import Outcome
from loadtest.peers import Peer
from loadtest.report import Summary, summarise
from loadtest.running import Died, Running, running
from loadtest.traffic import closed_loop
from loadtest.workloads import Prompt

DYING_SECONDS = 1.0
"""From the moment a server's connections break until it is seen to be gone."""
WARM_UP_TOKENS = 16
"""Of an answer before the measured ones: enough for whatever is made at first use."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What every server is asked."""

    cells: Sequence[Cell]
    words: Words
    rounds: int
    requests_per_client: int
    seed: int
    start_limit: float
    """Seconds until a server must be ready."""
    cell_limit: float
    """Seconds for one answer."""
    logs: Path


class NoFigures(Exception):
    """The cell ran and gave nothing to compare; one line."""


async def compare(plan: Plan, peers: Sequence[Peer], done: Sequence[Run], record: Callable[[Run], None]) -> None:
    """Run what `done` has no figures of; `record` gets each cell as it ends."""
    have = {(run.server, run.cell, run.round) for run in done if run.figures is not None}
    for number in range(1, plan.rounds + 1):
        for peer in peers:
            left = [cell for cell in plan.cells if (peer.name, cell.name, number) not in have]
            if left:
                await _turn(plan, peer, number, left, record)


async def _turn(plan: Plan, peer: Peer, number: int, cells: Sequence[Cell], record: Callable[[Run], None]) -> None:
    """One server's turn. A failed cell does not stop the next, unless the server is gone or hangs."""
    log = plan.logs / f"{_file_name(peer.name)}-{number}.log"
    tell = f"round {number}/{plan.rounds}  {peer.name}"
    left = list(cells)
    try:
        print(f"{tell}: starting", file=sys.stderr)
        async with running(peer, log, plan.start_limit) as server:
            print(f"{tell}: ready after {server.start_seconds:.1f} s", file=sys.stderr)
            while left:
                cell = left[0]
                try:
                    figures = await _measure(plan, peer, number, cell, server)
                except NoFigures as error:
                    await asyncio.sleep(DYING_SECONDS)
                    server.check()
                    print(f"{tell}  {cell.name}: {error}", file=sys.stderr)
                    record(Run(server=peer.name, cell=cell.name, round=number, error=str(error), log=str(log)))
                else:
                    print(f"{tell}  {cell.name}: {figures.output_tok_s:.1f} tok/s", file=sys.stderr)
                    record(Run(server=peer.name, cell=cell.name, round=number, figures=figures, log=str(log)))
                left.pop(0)
                server.check()
    except Died as error:
        print(f"{tell}: {error}", file=sys.stderr)
        for cell in left:
            record(Run(server=peer.name, cell=cell.name, round=number, error=str(error), log=str(log)))


async def _measure(plan: Plan, peer: Peer, number: int, cell: Cell, server: Running) -> Figures:
    """Warm up, then the closed loop. Raises NoFigures, or Died where the server does not answer in time."""
    count = cell.concurrency * plan.requests_per_client
    # Warm-ups share nothing with the measured prompts, not even the shared part.
    warm_ups, prompts = (
        plan.words.prompts(cell, size, (plan.seed, number, part)) for part, size in enumerate((cell.concurrency, count))
    )
    if not peer.takes_tokens:
        warm_ups, prompts = ([plan.words.as_text(prompt) for prompt in some] for some in (warm_ups, prompts))
    async with Client(Target(server.base_url, timeout=plan.cell_limit, keep_alive=False)) as client:
        try:
            model = peer.model or (await client.served()).model
        except (Unreachable, NoModel) as error:
            raise NoFigures(str(error)) from None
        options = {"model": model, "temperature": 0.0, **peer.body}

        async def send(prompt: Prompt, scheduled: float) -> Outcome:
            return await client.send(prompt, options, scheduled)

        first = [Prompt(one.content, one.input_len, min(one.output_len, WARM_UP_TOKENS)) for one in warm_ups]
        _check(await closed_loop(send, first, cell.concurrency, lambda outcome: None), "warm-up")
        server.peak_rss = 0
        with tqdm(total=count, unit="req", desc=cell.name, leave=False, disable=not sys.stderr.isatty()) as bar:
            began = clock()
            outcomes = await closed_loop(send, prompts, cell.concurrency, lambda outcome: bar.update())
            duration = clock() - began
    _check(outcomes, "cell")
    return _figures(summarise(outcomes, duration, [99.0], {}), server)


def _check(outcomes: Sequence[Outcome], what: str) -> None:
    """One failed request spoils a cell: the others had more of the machine than they should."""
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    if not failures:
        return
    first = failures[0]
    said = f"{len(failures)} of {len(outcomes)} requests of the {what} failed, the first: {first.kind}: {first.message}"
    raise Died(said) if first.kind == "timeout" else NoFigures(said)


def _figures(summary: Summary, server: Running) -> Figures:
    ttft, itl = summary.spreads["ttft"], summary.spreads["itl"]
    return Figures(
        output_tok_s=summary.output_tokens / summary.duration,
        ttft_median_ms=ttft.median,
        ttft_p99_ms=ttft.percentiles[99.0],
        itl_median_ms=itl.median,
        itl_p99_ms=itl.percentiles[99.0],
        start_s=server.start_seconds,
        peak_rss_mib=server.peak_rss / 2**20,
        requests=summary.completed,
        input_tokens=summary.input_tokens / summary.completed,
        output_tokens=summary.output_tokens / summary.completed,
        duration_s=summary.duration,
    )


def _file_name(name: str) -> str:
    return "".join(char if char.isalnum() else "-" for char in name).strip("-")
