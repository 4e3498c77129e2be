"""One bad row with a real model and its real memory: it fails alone, and neither pool nor buffers remember it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpool.pool import KVPool
from model.batch import Batch, Pending
from model.executor import Runner
from model.runner import RunnerOptions, load_runner
from model.source import resolve
from model.tokenizer import load_tokenizer
from scheduler.engine import Engine
from scheduler.limits import Limits
from scheduler.messages import EngineStats, FinishReason, SamplingParams, Submit
from tests.model.parity import build, make_runner, prompts
from tests.parity.session import Answers, Prompts
from tests.parity.test_demo import TEXTS

NEW = 12
BLOCK = 16
PLACES = ("before", "in the layers", "at the logits", "behind")


HEAD = ("logits", "likeliest")
"""What a model's head is asked: the second where it may do without the first."""


def no_memory(*_: Any) -> Any:
    """What torch does where the system gives it none: more than any address reaches."""
    return torch.empty(2**50, dtype=torch.uint8)


class Faulty:
    """A runner that runs out of memory, somewhere, in a step for which `fault` names a place."""

    def __init__(self, runner: Runner, fault: Callable[[Batch], str | None]) -> None:
        self.runner = runner
        self.fault = fault
        self.faults = 0

    def execute(self, batch: Batch) -> Pending:
        place = self.fault(batch) if batch.rows else None
        self.faults += place is not None
        if place == "before":
            no_memory()
        with pytest.MonkeyPatch.context() as patch:
            if place == "in the layers":  # half of them have written their keys and values
                self._cut(patch)
            if place == "at the logits":
                for name in HEAD:
                    patch.setattr(self.runner.model, name, no_memory)
            pending = self.runner.execute(batch)
        if place == "behind":
            pending.result()
            raise MemoryError
        return pending

    def _cut(self, patch: pytest.MonkeyPatch) -> None:
        model: Any = self.runner.model
        if model.fused is None:
            layers = model.layers
            patch.setattr(model, "layers", [*layers[:2], replace(layers[2], down=no_memory), *layers[3:]])
        else:  # one call computes them all: everything is written, and then it fails
            fused = model.fused
            patch.setattr(model, "fused", lambda *given: no_memory(fused(*given)))


def run(engine: Engine, asked: Prompts) -> tuple[Answers, list[str], EngineStats]:
    """Greedy answers, the errors among them, and the figures at the end."""
    params = SamplingParams(max_tokens=NEW, seed=0, temperature=0.0)
    inbox = [Submit(id=place, prompt_ids=prompt, params=params) for place, prompt in enumerate(asked)]
    answers: Answers = [[] for _ in asked]
    errors = ["" for _ in asked]
    while inbox or engine.has_work:
        out = engine.step(inbox)
        engine.check()
        inbox = []
        messages = {error.row: error.message for error in out.errors}
        for row, (id, token, finish) in enumerate(zip(out.ids, out.tokens, out.finishes, strict=True)):
            assert finish != FinishReason.ABORT
            errors[id] = messages.get(row, errors[id])
            answers[id] += [token] if token >= 0 else []
    assert out.stats.blocks_active == 0
    assert out.stats.blocks_free + out.stats.blocks_cached == out.stats.blocks_total
    return answers, errors, out.stats


def make_engine(executor: Any, blocks: int) -> Engine:
    limits = Limits(max_num_seqs=32, max_num_batched_tokens=512, max_model_len=512, num_speculative_tokens=4)
    return Engine(KVPool(blocks, BLOCK), executor, limits, time.monotonic)


@pytest.fixture(scope="module", params=["demo", "torch"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, Prompts, Answers]:
    """The demo model on the kernels, and a tiny one in plain torch; prompts and their undisturbed answers."""
    if request.param == "demo":
        runner = load_runner(RunnerOptions(kv_cache_memory=64 << 20)).runner
        tokenizer = load_tokenizer(resolve(None))
        asked = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS[:8]]
    else:
        folder: Path = tmp_path_factory.mktemp("tiny")
        build("llama", folder)
        runner = make_runner(folder, compiled=False)
        asked = prompts(128, [5, 33, 50, 64, 79, 12, 20], seed=3)
    answers, errors, _ = run(make_engine(runner, runner.storage.data.shape[2]), asked)
    assert not any(errors)
    return runner, asked, answers


def others(values: list[Any]) -> list[Any]:
    return [*values[:GUILTY], *values[GUILTY + 1 :]]


GUILTY = 3


@pytest.mark.parametrize("place", PLACES)
def test_out_of_memory_for_one_row(case: tuple[Runner, Prompts, Answers], place: str) -> None:
    runner, asked, right = case
    guilty, late = asked[GUILTY], len(asked[GUILTY]) + NEW // 2

    def fault(batch: Batch) -> str | None:
        hit = any(row.tokens[: len(guilty)] == guilty and len(row.tokens) >= late for row in batch.rows)
        return place if hit else None

    faulty = Faulty(runner, fault)
    engine = make_engine(faulty, runner.storage.data.shape[2])
    answers, errors, stats = run(engine, asked)
    assert others(answers) == others(right)
    assert errors[GUILTY] == "the model failed on this request"
    assert not any(others(errors))
    assert right[GUILTY][: len(answers[GUILTY])] == answers[GUILTY]
    assert (stats.failed_memory, stats.failed_raised) == (1, 0)
    assert faulty.faults > 2  # in the whole, in a half, alone
    faulty.fault = lambda batch: None
    again, errors, _ = run(engine, asked)
    assert again == right
    assert not any(errors)


@pytest.mark.parametrize("place", ["in the layers", "behind"])
def test_out_of_memory_for_many_rows_together(case: tuple[Runner, Prompts, Answers], place: str) -> None:
    """Where fewer at a time fit, nobody fails."""
    runner, asked, right = case
    faulty = Faulty(runner, lambda batch: place if len(batch.rows) > 5 else None)
    answers, errors, stats = run(make_engine(faulty, runner.storage.data.shape[2]), asked)
    assert faulty.faults > 10
    assert answers == right
    assert not any(errors)
    assert stats.failed_memory == 0


def test_logits_that_are_not_finite(case: tuple[Runner, Prompts, Answers], monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft is blamed first, and computed anew; then the row."""
    runner, asked, right = case
    guilty = asked[GUILTY]
    execute = runner.execute
    spoiled: list[int] = []

    def watched(batch: Batch) -> Pending:
        spoiled.clear()
        position = 0
        for row in batch.rows:
            if row.samples and row.start + row.count == len(row.tokens):
                if row.tokens[: len(guilty)] == guilty and len(row.tokens) > len(guilty) + 5:
                    spoiled.append(position)
                position += 1 + len(row.draft)
        return execute(batch)

    def bad(head: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def spoilt(hidden: torch.Tensor) -> Any:
            hidden = hidden.clone()
            hidden[spoiled] = float("nan")
            return head(hidden)

        return spoilt

    for name in HEAD:
        monkeypatch.setattr(runner.model, name, bad(getattr(runner.model, name)))
    monkeypatch.setattr(runner, "execute", watched)
    engine = make_engine(runner, runner.storage.data.shape[2])
    answers, errors, stats = run(engine, asked)
    assert others(answers) == others(right)
    assert "not finite" in errors[GUILTY]
    assert not any(others(errors))
    assert stats.failed_logits == 1
    monkeypatch.undo()
    assert run(engine, asked)[0] == right
