"""octavo bench growth: what a step costs as rows, contexts, the queue and the cache grow, and the constants of it.

    step        ms = a + b · rows + c · context     of the model, fitted over a grid; context: tokens that all rows read
    planning    of the next step beside 0, 200 and 2,000 waiting requests, and all of a step but the model
    look-up     of a prefix among 100, 10,000 and 100,000 cached blocks

The grid is timed by the clock, the fastest of several runs. The rest is one thread's own and short, so it is its
processor time, the median of many runs: a neighbour on the machine does not show in it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from kvpool.budget import BudgetError
from kvpool.pool import KVPool
from loadtest.options import Flags, Help, positive
from loadtest.report import aligned
from model.batch import Batch, Executor, Row, StepResult
from model.errors import ModelError
from model.params import SamplingParams
from model.precision import QUANTIZATIONS
from scheduler.budget import Budget
from scheduler.engine import Engine
from scheduler.limits import Limits
from scheduler.messages import Submit
from scheduler.policy import SchedulerState, plan
from scheduler.sequence import Phase, Request

BAD_START, INTERRUPTED = 2, 130
SIZE = 16
WAITING = (0, 200, 2_000)
CACHED = (100, 10_000, 100_000)
PROMPT, PREFIX = 513, 64
"""Tokens of a waiting prompt, and blocks of the prefix that is looked up."""
TOKENS = 512
GREEDY = SamplingParams(max_tokens=1 << 20, seed=0, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid."""

    rows: int
    context: int
    """Of all rows together."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Line:
    """seconds = fixed + row · rows + token · context, by least squares."""

    fixed: float
    row: float
    token: float
    r_squared: float
    worst: float
    """Largest share by which a cell is off the line."""

    @classmethod
    def through(cls, cells: Sequence[Cell]) -> Line:
        x = np.array([(1.0, cell.rows, cell.context) for cell in cells])
        y = np.array([cell.seconds for cell in cells])
        (fixed, row, token), *_ = np.linalg.lstsq(x, y, rcond=None)
        off = y - x @ (fixed, row, token)
        spread = float(np.square(y - y.mean()).sum())
        r_squared = 1.0 - float(np.square(off).sum()) / spread if spread else 1.0
        return cls(float(fixed), float(row), float(token), r_squared, float(np.abs(off / y).max()))


class Idle:
    """An executor that computes nothing: every row draws token 1."""

    @dataclass(frozen=True, slots=True)
    class Done:
        tokens: list[list[int]]

        def result(self) -> StepResult:
            return StepResult(self.tokens, [[] for _ in self.tokens], [None] * len(self.tokens))

    def execute(self, batch: Batch) -> Done:
        return Idle.Done([[1] * row.samples for row in batch.rows])


# ---- the model ----


def grid(runner: Executor, num_blocks: int, rows: Sequence[int], contexts: Sequence[int], repeat: int) -> list[Cell]:
    """Decode steps of every number of rows and length of context that the pool holds, no block shared.

    Nobody filled the pool, which is zeros: what is read costs the same, and a token of it means nothing.
    """
    cells = []
    for count, context in itertools.product(rows, contexts):
        each = -(-context // SIZE)
        if count * each >= num_blocks:
            continue
        tokens = [0] * context
        batch = Batch(
            [
                Row(tokens, context, context - 1, 1, list(range(1 + n * each, 1 + (n + 1) * each)), GREEDY)
                for n in range(count)
            ]
        )
        runner.execute(batch).result()
        cells.append(Cell(count, count * context, min(timed(runner, batch) for _ in range(repeat))))
    return cells


def timed(runner: Executor, batch: Batch) -> float:
    """Seconds of a step."""
    began = time.perf_counter()
    runner.execute(batch).result()
    return time.perf_counter() - began


# ---- the queue ----


def _submit(number: int, tokens: int) -> Submit:
    return Submit(id=number, prompt_ids=[number * tokens + i for i in range(tokens)], params=GREEDY)


def decoding(rows: int, waiting: int, seats: int, blocks: int) -> SchedulerState:
    """`rows` sequences that decode behind 8 blocks each, and others that wait with prompts of their own."""
    limits = Limits(max_num_seqs=seats, max_num_batched_tokens=TOKENS, max_model_len=1 << 21)
    state = SchedulerState(KVPool(blocks + 1, SIZE), limits)
    for number in range(rows + waiting):
        sequence = Request(_submit(number, 8 * SIZE + 1 if number < rows else PROMPT), 1 << 21).sequences[0]
        if number >= rows:
            state.waiting.add(sequence)
            continue
        sequence.phase, sequence.num_computed = Phase.RUNNING, 8 * SIZE
        state.pool.extend(sequence.table, 8 * SIZE, 0)
        state.pool.commit(sequence.table, sequence.tokens, 8 * SIZE, b"")
        state.running.append(sequence)
    return state


def planning(rows: int, waiting: int) -> dict[str, float]:
    """Seconds, by situation."""
    plenty = 1 << 20
    found = {}
    for name, seats, blocks in (
        ("plan, every seat taken", rows, plenty),
        ("plan, the pool has no room", 2 * rows, 26 * rows),
        ("plan, admitting", 2 * rows, plenty),
    ):
        state = decoding(rows, waiting, seats, blocks)
        budget = Budget(TOKENS)
        state.closed = plan(state, budget, 0.0).closed  # as the engine keeps it; what is hashed stays hashed
        found[name] = processor_time(lambda state=state, budget=budget: plan(state, budget, 0.0))  # type: ignore[misc]
    limits = Limits(max_num_seqs=rows, max_num_batched_tokens=TOKENS, max_model_len=1 << 21)
    engine = Engine(KVPool(plenty, SIZE), Idle(), limits, time.monotonic)
    engine.step([_submit(number, 8 * SIZE) for number in range(rows)])
    while engine.step().stats.step_tokens > rows:
        pass
    engine.step([_submit(rows + number, PROMPT) for number in range(waiting)])
    found["step, but the model"] = processor_time(engine.step)
    return found


# ---- the cache ----


def lookups(cached: int) -> dict[str, float]:
    """Seconds to find a prefix of PREFIX blocks among so many, and to find that there is none."""
    pool = KVPool(cached + 1, SIZE)
    for number in range(-(-cached // PREFIX)):
        blocks = min(PREFIX, cached - number * PREFIX)
        submit = _submit(number, blocks * SIZE)
        table = pool.new_table()
        pool.extend(table, len(submit.prompt_ids), 0)
        pool.commit(table, submit.prompt_ids, len(submit.prompt_ids), b"")
        pool.release(table)
    hit = [*range(PREFIX * SIZE), 0]
    miss = [7] * (PREFIX * SIZE + 1)
    return {
        f"match, {PREFIX} blocks": processor_time(lambda: pool.match(hit, b"")),
        "match, none": processor_time(lambda: pool.match(miss, b"")),
    }


def processor_time(call: Callable[[], object], times: int = 201) -> float:
    """Median seconds of this thread."""
    taken = []
    for _ in range(times):
        began = time.thread_time_ns()
        call()
        taken.append(time.thread_time_ns() - began)
    return median(taken) / 1e9


# ---- the command ----


def make_parser() -> argparse.ArgumentParser:
    parser = Flags(
        "octavo bench growth",
        description="What a step costs as rows, contexts, the queue and the prefix cache grow.",
        formatter_class=Help,
    )
    add = parser.add_argument
    add("--model", help="hub id, folder or GGUF file; without it the demo model")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"], help="where it runs")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="of the weights")
    add("--quantization", default=None, choices=QUANTIZATIONS, help="of the weights; by default none")
    add("--kv-cache-dtype", default="auto", help="of keys and values")
    add("--rows", nargs="+", type=positive(int), default=[1, 2, 4, 8, 16, 32], help="sequences of a step")
    add("--contexts", nargs="+", type=positive(int), default=[64, 256, 1024, 4096], help="tokens of each of them")
    add("--repeat", type=positive(int), default=5, help="runs of each step; the fastest counts")
    return parser


def main(argv: Sequence[str]) -> int:
    """The exit status: 0; 2 where the run could not start, with one line why."""
    args = make_parser().parse_args(argv)
    try:
        for line in _report(args):
            print(line, flush=True)
        return 0
    except (ModelError, BudgetError) as error:
        print(f"octavo bench growth: {error}", file=sys.stderr)
        return BAD_START
    except KeyboardInterrupt:
        return INTERRUPTED


def _report(args: argparse.Namespace) -> list[str]:
    rows = max(args.rows)
    lines = _table(f"µs of processor time, {rows} rows; waiting:", WAITING, [planning(rows, n) for n in WAITING])
    lines += ["", *_table("µs of processor time; cached blocks:", CACHED, [lookups(n) for n in CACHED])]
    return [*_model_lines(args), "", *lines]


def _model_lines(args: argparse.Namespace) -> list[str]:
    from model.runner import RunnerOptions, load_runner  # Brings in torch.

    loaded = load_runner(
        RunnerOptions(
            model=args.model,
            device=args.device,
            dtype=args.dtype,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
            force_kv_cache_dtype=True,
            max_num_seqs=max(args.rows),
            block_size=SIZE,
            one_group=True,
        ),
        lambda stage, detail: print(f"{stage}: {detail}", file=sys.stderr),
    )
    contexts = [context for context in args.contexts if context <= loaded.max_model_len]
    cells = grid(loaded.runner, loaded.num_blocks, args.rows, contexts, args.repeat)
    if len({cell.rows for cell in cells}) < 2 or len({cell.context / cell.rows for cell in cells}) < 2:
        raise ModelError("a line needs two numbers of --rows and two of --contexts that the model and the pool hold")
    line = Line.through(cells)
    by_cell = {(cell.rows, cell.context // cell.rows): f"{1000 * cell.seconds:.1f}" for cell in cells}
    table = [[f"{count:,} rows", *(by_cell.get((count, each), "") for each in contexts)] for count in args.rows]
    return [
        f"{loaded.device}, weights {args.quantization or loaded.dtype}, KV {loaded.kv_cache_dtype}",
        *aligned([["ms of a step; context of each row:", *(f"{each:,}" for each in contexts)], *table]),
        f"ms = {1e3 * line.fixed:.2f} + {1e3 * line.row:.3f} · rows + {1e6 * line.token:.3f} · context / 1,000",
        f"R² {line.r_squared:.4f}; no cell is off by more than {line.worst:.0%}",
    ]


def _table(title: str, numbers: Sequence[int], columns: Sequence[dict[str, float]]) -> list[str]:
    rows = [[name, *(f"{1e6 * column[name]:.0f}" for column in columns)] for name in columns[0]]
    return aligned([[title, *(f"{number:,}" for number in numbers)], *rows])
