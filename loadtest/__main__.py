"""octavo bench: parse, run, print, save."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import math
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import orjson

from kvpool.budget import BudgetError
from loadtest.client import NoModel, Unreachable
from loadtest.engine_driver import measure_engine, step_fields, step_table
from loadtest.options import check, make_parser
from loadtest.outcome import Outcome
from loadtest.report import DEFINITIONS, Summary, result, summarise, table
from loadtest.server_bench import measure_interference, measure_server
from loadtest.workloads import BadWorkload
from model.errors import ModelError

ALL_FAILED, BAD_START, INTERRUPTED = 1, 2, 130
BENCHES = ("compare", "export", "fairness", "growth", "kv", "perplexity", "sharing", "soak", "turns")
"""Each is a module of that name. Imported when it is asked for: some need libraries of an extra."""


def main(argv: Sequence[str]) -> int:
    """The exit status: 0; 1 where every request failed, or no stream ran beside the long prompt; 2 where the run could
    not start, with one line why."""
    if argv and argv[0] in BENCHES:
        return int(importlib.import_module(f"loadtest.{argv[0]}").main(argv[1:]))
    parser = make_parser()
    if argv and not argv[0].startswith("-"):
        parser.error(f"no benchmark {argv[0]!r}: name one of {', '.join(BENCHES)}, or none")
    args = parser.parse_args(argv)
    check(parser, args)
    try:
        return _bench_server(args) if args.engine is None else _bench_engine(args)
    except (Unreachable, NoModel, BadWorkload, ModelError, BudgetError) as error:
        print(f"octavo bench: {error}", file=sys.stderr)
        return BAD_START
    except KeyboardInterrupt:
        return INTERRUPTED


def _bench_server(args: argparse.Namespace) -> int:
    if args.long_prompt_len is not None:
        return _bench_interference(args)
    model, outcomes, duration = asyncio.run(measure_server(args))
    return _conclude(args, model, "openai", outcomes, duration)


def _bench_interference(args: argparse.Namespace) -> int:
    model, outcomes, duration, found = asyncio.run(measure_interference(args))
    status = _conclude(args, model, "openai", outcomes, duration, found.lines(), found.fields())
    return status if found.worst else ALL_FAILED


def _bench_engine(args: argparse.Namespace) -> int:
    ready, run = measure_engine(args)
    print(f"{ready.device}, weights {ready.dtype}, KV {ready.kv_cache_dtype}, attention {ready.attention}")
    steps = step_table(run, ready.block_size)
    fields = step_fields(run, args.save_detailed)
    return _conclude(args, args.engine or "demo", "octavo-engine", run.outcomes, run.duration, steps, fields)


def _conclude(
    args: argparse.Namespace,
    model: str,
    backend: str,
    outcomes: Sequence[Outcome],
    duration: float,
    more_lines: str | None = None,
    more_fields: dict[str, object] | None = None,
) -> int:
    """Print the table, save the JSON; the exit status."""
    goodput = dict(args.goodput)
    summary = summarise(outcomes, duration, args.metric_percentiles, goodput)
    print(table(summary, args.percentile_metrics, args.request_rate, args.max_concurrency))
    if more_lines is not None:
        print(more_lines)
    print(DEFINITIONS)
    if args.save_result:
        fields = _setting(args, model, backend) | result(summary, outcomes, args.percentile_metrics, args.save_detailed)
        _save(args, model, backend, fields | (more_fields or {}))
    return ALL_FAILED if _all_failed(summary) else 0


def _all_failed(summary: Summary) -> bool:
    return summary.completed == 0


def _setting(args: argparse.Namespace, model: str, backend: str) -> dict[str, object]:
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": args.label,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": args.num_prompts,
        **dict(args.metadata),
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }


def _save(args: argparse.Namespace, model: str, backend: str, fields: dict[str, object]) -> None:
    name = args.result_filename
    if name is None:
        concurrency = f"-concurrency{args.max_concurrency}" if args.max_concurrency is not None else ""
        base = model.rstrip("/").rsplit("/", 1)[-1]
        name = f"{args.label or backend}-{fields['request_rate']}qps{concurrency}-{base}-{fields['date']}.json"
    path = Path(args.result_dir) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(orjson.dumps(fields))
    except OSError as error:
        raise BadWorkload(f"cannot write {path}: {error.strerror}") from None
    print(f"saved to {path}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
