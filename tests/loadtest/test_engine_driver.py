"""The engine's closed loop, on a real Engine and pool with a runner that computes nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvpool.pool import KVPool
from loadtest.__main__ import main
from loadtest.engine_driver import drive, step_fields, step_table
from loadtest.outcome import Outcome
from loadtest.report import summarise
from model.batch import BAD_LOGITS, Batch, StepResult
from scheduler.config import EngineConfig
from scheduler.engine import Engine
from scheduler.limits import Limits
from scheduler.messages import EmbeddingConfig, Ready, SamplingParams, Submit


@dataclass
class Done:
    value: StepResult

    def result(self) -> StepResult:
        return self.value


class Constant:
    """Draws token 7, or fails rows of a seed."""

    def __init__(self, bad_seed: int | None = None) -> None:
        self.bad_seed = bad_seed
        self.rows: list[int] = []

    def execute(self, batch: Batch) -> Done:
        self.rows.append(len(batch.rows))
        tokens = [[BAD_LOGITS if row.params.seed == self.bad_seed else 7] * row.samples for row in batch.rows]
        return Done(StepResult(tokens, [[] for _ in tokens], [None] * len(tokens)))


def engine(runner: Constant, num_blocks: int = 200) -> Engine:
    limits = Limits(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=256)
    return Engine(KVPool(num_blocks, 16, True), runner, limits, time.monotonic)


def requests(count: int, input_len: int = 20, output_len: int = 5, shared: int = 0) -> list[Submit]:
    return [
        Submit(
            id=n,
            prompt_ids=[9] * shared + [100 + n] * (input_len - shared),
            params=SamplingParams(max_tokens=output_len, seed=n, temperature=0.0),
        )
        for n in range(count)
    ]


def test_counts_add_up() -> None:
    runner, done = Constant(), list[Outcome]()
    run = drive(engine(runner), requests(10), 4, done.append)
    assert len(done) == 10
    assert {(o.input_tokens, o.output_tokens, len(o.arrivals), o.failure) for o in run.outcomes} == {(20, 5, 5, None)}
    assert max(runner.rows) == 4, "never more than asked for"
    # Every prompt token is computed once, and every generated token but the last is decoded.
    assert sum(step.prompt_tokens for step in run.steps) == 10 * 20
    assert sum(step.decodes for step in run.steps) == 10 * 4
    assert len(run.steps) == len(runner.rows)
    assert run.preemptions == 0
    assert all(0 <= step.model_seconds <= step.seconds for step in run.steps)
    assert max(step.blocks for step in run.steps) <= 4 * 2
    summary = summarise(run.outcomes, run.duration, [99.0], {})
    assert (summary.completed, summary.output_tokens, summary.peak_requests) == (10, 50, 4)


def test_a_second_run_on_the_same_engine() -> None:
    """Counters go on from the warm-up; the second run counts only its own."""
    served = engine(Constant())
    everything = requests(6, input_len=40)
    drive(served, everything[:2], 2, lambda outcome: None)
    run = drive(served, everything[2:], 2, lambda outcome: None)
    assert len(run.outcomes) == 4
    assert sum(step.prompt_tokens for step in run.steps) == 4 * 40


def test_prefix_hits_are_reported() -> None:
    run = drive(engine(Constant()), requests(3, input_len=50, shared=32), 1, lambda outcome: None)
    assert [o.cached_tokens for o in run.outcomes] == [0, 32, 32]


def test_failures_and_preemptions() -> None:
    run = drive(engine(Constant(bad_seed=2)), requests(4), 4, lambda outcome: None)
    assert [o.failure is None for o in run.outcomes] == [True, True, False, True]
    assert run.outcomes[2].failure is not None
    assert "not finite" in run.outcomes[2].failure.message
    too_long = drive(engine(Constant()), requests(1, input_len=300), 1, lambda outcome: None)
    assert too_long.outcomes[0].failure is not None


def test_table_and_fields() -> None:
    run = drive(engine(Constant()), requests(10), 4, lambda outcome: None)
    lines = step_table(run, 16).splitlines()
    figures = {line[:40].strip(): line[40:].strip() for line in lines if line[:40].strip().endswith(":")}
    assert figures["Steps:"] == str(len(run.steps))
    assert int(figures["Decode-only:"]) + int(figures["Steps with prompt tokens:"]) == len(run.steps)
    assert figures["Preemptions:"] == "0"
    fields = step_fields(run, detailed=True)
    assert fields["step_rows"] == [step.rows for step in run.steps]
    assert step_fields(run, detailed=False).keys() == {"steps", "preemptions"}
    empty = drive(engine(Constant()), [], 4, lambda outcome: None)
    assert step_table(empty, 16) == "no steps"


@pytest.mark.parametrize("concurrency", [1, 3])
def test_waste_is_counted_in_slots(concurrency: int) -> None:
    """One block of 16 slots per request; right after the first token 10 are computed, so 6 are empty."""
    run = drive(engine(Constant()), requests(concurrency, input_len=10, output_len=2), concurrency, lambda o: None)
    first = run.steps[0]
    assert (first.blocks, first.tokens) == (concurrency, 10 * concurrency)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags reach the engine, warm-ups are not counted, and the table and the file hold requests and steps."""
    built: list[EngineConfig] = []

    def assemble(config: EngineConfig, progress: Callable[[str, str], None]) -> tuple[Engine, Ready]:
        built.append(config)
        progress("load", "nothing")
        return engine(Constant()), Ready(
            max_model_len=256,
            vocab_size=500,
            num_blocks=199,
            block_size=16,
            kv_bytes_per_token=1,
            kv_bytes=1,
            device="cpu",
            dtype="float32",
            kv_cache_dtype="float32",
            attention="none",
            weight_bytes=1,
            load_seconds=0.0,
            embedding=EmbeddingConfig(hidden_size=8),
        )

    monkeypatch.setattr("scheduler.assembly.assemble", assemble)
    flags = ["--engine", "some/model", "--kv-cache-memory", "1MiB", "--max-num-seqs", "2", "--max-concurrency", "3"]
    lengths = ["--num-prompts", "5", "--num-warmups", "2", "--random-input-len", "20", "--random-output-len", "4"]
    save = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    assert main([*flags, *lengths, *save, "--no-enable-prefix-caching"]) == 0
    (config,) = built
    assert (config.model, config.kv_cache_memory, config.max_num_seqs) == ("some/model", 1 << 20, 3)
    assert not config.enable_prefix_caching
    saved = json.loads((tmp_path / "r.json").read_bytes())
    assert (saved["completed"], saved["total_output_tokens"], saved["backend"]) == (5, 20, "octavo-engine")
    assert sum(saved["step_prompt_tokens"]) == 100
    out, err = capsys.readouterr()
    assert "Engine steps" in out
    assert err == "load: nothing\n"
