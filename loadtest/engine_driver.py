"""The engine without HTTP: a closed loop over Engine.step, in this process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from loadtest.client import clock
from loadtest.outcome import Failure, Outcome
from loadtest.profile import Laps, Stopwatch, profile_fields, profile_table, watch
from loadtest.report import row
from loadtest.server_bench import progress, token_prompts
from scheduler.config import EngineConfig
from scheduler.messages import FinishReason, Ready, SamplingParams, StepOutput, Submit

SAMPLING = ("temperature", "top_p", "top_k", "min_p")


class Steps(Protocol):
    """What is driven: an Engine."""

    def step(self, inbox: Sequence[Submit] = ()) -> StepOutput: ...


@dataclass(frozen=True, slots=True)
class Step:
    """One step: what it computed, how long it took, and how full the pool was behind it."""

    seconds: float
    """From the call to its return."""
    model_seconds: float
    """Of them, in the runner."""
    rows: int
    prompt_tokens: int
    """Computed in chunks; what was preempted and is computed again included."""
    decodes: int
    """Rows that computed one generated token each."""
    blocks: int
    """In use."""
    tokens: int
    """Held in them."""
    phases: dict[str, int] = field(default_factory=dict)
    """Nanoseconds of each, where the engine is profiled."""


@dataclass(frozen=True, slots=True)
class EngineRun:
    """A whole run, its steps in order."""

    outcomes: list[Outcome]
    steps: list[Step]
    duration: float
    preemptions: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


def measure_engine(args: argparse.Namespace) -> tuple[Ready, EngineRun]:
    """Build the engine, warm it up, run the workload. Raises ModelError, BudgetError or BadWorkload."""
    from scheduler.assembly import assemble  # Brings in torch.

    concurrency = args.max_concurrency or args.max_num_seqs
    engine, ready = assemble(
        EngineConfig(
            model=args.engine or None,
            device=args.device,
            dtype=args.dtype,
            quantization=args.quantization,
            max_model_len=args.max_model_len,
            max_num_seqs=max(args.max_num_seqs, concurrency),
            max_num_batched_tokens=args.max_num_batched_tokens,
            kv_cache_memory=args.kv_cache_memory,
            kv_cache_dtype=args.kv_cache_dtype,
            force_kv_cache_dtype=True,
            block_size=args.block_size,
            enable_prefix_caching=args.enable_prefix_caching,
            target_step_time=args.target_step_time,
            num_speculative_tokens=args.num_speculative_tokens,
        ),
        lambda stage, detail: print(f"{stage}: {detail}", file=sys.stderr),
    )
    prompts = token_prompts(args, args.vocab_size or ready.vocab_size)
    sampling = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    requests = [
        # No stop tokens: every answer has its full length.
        Submit(
            id=number,
            prompt_ids=prompt.content,
            params=SamplingParams(max_tokens=prompt.output_len, seed=args.seed + number, **sampling),
        )
        for number, prompt in enumerate(prompts)
        if isinstance(prompt.content, list)
    ]
    drive(engine, requests[args.num_prompts :], concurrency, lambda outcome: None)
    stopwatch = watch(engine) if args.profile else None
    with progress(args, args.num_prompts) as bar:
        run = drive(engine, requests[: args.num_prompts], concurrency, lambda outcome: bar.update(), stopwatch)
    return ready, run


def drive(
    engine: Steps,
    requests: Sequence[Submit],
    concurrency: int,
    done: Callable[[Outcome], object],
    stopwatch: Stopwatch | None = None,
) -> EngineRun:
    """Keep `concurrency` of the requests in the engine until all have ended. `stopwatch` watches the engine."""
    outcomes: list[Outcome] = []
    live: dict[int, Outcome] = {}
    steps: list[Step] = []
    first = last = engine.step().stats
    began = clock()
    while True:
        inbox = requests[len(outcomes) : len(outcomes) + concurrency - len(live)]
        for request in inbox:
            now = clock()
            live[request.id] = Outcome(now, now, len(request.prompt_ids), counted=True)
            outcomes.append(live[request.id])
        if not live:
            break
        if stopwatch is not None:
            stopwatch.take()
        before = clock()
        output = engine.step(inbox)
        after = clock()
        phases = stopwatch.take() if stopwatch is not None else {}
        for outcome in _apply(output, live, after):
            done(outcome)
        stats = output.stats
        if stats.steps > last.steps:
            chunks = stats.computed_tokens - last.computed_tokens
            steps.append(
                Step(
                    seconds=after - before,
                    model_seconds=stats.step_seconds,
                    rows=stats.step_rows,
                    prompt_tokens=chunks,
                    decodes=stats.step_tokens - chunks - (stats.drafted_tokens - last.drafted_tokens),
                    blocks=stats.blocks_active,
                    tokens=stats.tokens_active,
                    phases=phases,
                )
            )
        last = stats
    return EngineRun(
        outcomes,
        steps,
        clock() - began,
        last.preemptions - first.preemptions,
        last.drafted_tokens - first.drafted_tokens,
        last.accepted_tokens - first.accepted_tokens,
    )


def _apply(output: StepOutput, live: dict[int, Outcome], now: float) -> list[Outcome]:
    """Book a step's rows; those that ended leave `live`."""
    for started in output.started:
        live[started.id].cached_tokens = started.cached_tokens
    messages = {error.row: error.message for error in output.errors}
    ended = []
    for number, (id, token, finish) in enumerate(zip(output.ids, output.tokens, output.finishes, strict=True)):
        outcome = live[id]
        if token >= 0:
            outcome.output_tokens += 1
            if outcome.arrivals[-1:] != [now]:  # A right draft brings several tokens at once.
                outcome.arrivals.append(now)
        if finish != FinishReason.RUNNING:
            outcome.end = now
            if finish == FinishReason.ERROR:
                outcome.failure = Failure("engine", messages.get(number, "no message"))
            ended.append(live.pop(id))
    return ended


def step_table(run: EngineRun, block_size: int) -> str:
    """How the steps were made up and what they took, as lines under the requests' table."""
    if not run.steps:
        return "no steps"
    lines = [f"{'Engine steps':-^50}", row("Steps:", len(run.steps))]
    for name, steps in _kinds(run).items():
        if steps:
            times = np.array([step.seconds for step in steps]) * 1000
            lines += [
                row(f"{name}:", len(steps)),
                row("  Mean step time (ms):", float(times.mean())),
                row("  Median step time (ms):", float(np.median(times))),
                row("  P99 step time (ms):", float(np.percentile(times, 99))),
                row("  Mean rows:", _mean([step.rows for step in steps])),
                row("  Mean decodes:", _mean([step.decodes for step in steps])),
                row("  Mean prompt tokens:", _mean([step.prompt_tokens for step in steps])),
            ]
    seconds = sum(step.seconds for step in run.steps)
    slots = sum(step.blocks for step in run.steps) * block_size
    lines += [
        row("Step time outside the model (%):", 100 * (1 - sum(s.model_seconds for s in run.steps) / seconds)),
        row("Peak blocks in use:", max(step.blocks for step in run.steps)),
        row("Slots in use that hold no token (%):", 100 * (1 - sum(s.tokens for s in run.steps) / max(slots, 1))),
        row("Preemptions:", run.preemptions),
        row("Draft tokens:", run.drafted_tokens),
        row("Draft tokens that were right:", run.accepted_tokens),
        "=" * 50,
    ]
    if run.steps[0].phases:
        lines.append(profile_table(_laps(run)))
    return "\n".join(lines)


def _kinds(run: EngineRun) -> dict[str, list[Step]]:
    return {
        "Decode-only": [step for step in run.steps if not step.prompt_tokens],
        "Steps with prompt tokens": [step for step in run.steps if step.prompt_tokens],
    }


def _laps(run: EngineRun) -> dict[str, Laps]:
    return {kind: [step.phases for step in steps] for kind, steps in _kinds(run).items()}


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


def step_fields(run: EngineRun, detailed: bool) -> dict[str, object]:
    """The same for the JSON file; detailed: every step, as columns."""
    fields: dict[str, object] = {"steps": len(run.steps), "preemptions": run.preemptions}
    if run.steps and run.steps[0].phases:
        fields["profile"] = profile_fields(_laps(run))
    if detailed:
        for name in ("seconds", "model_seconds", "rows", "prompt_tokens", "decodes", "blocks", "tokens"):
            fields[f"step_{name}"] = [getattr(step, name) for step in run.steps]
    return fields
