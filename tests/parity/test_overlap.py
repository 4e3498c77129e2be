"""A real model whose steps are launched before the tokens of the step before are read: the same tokens, to the last."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from model.batch import Batch, Row
from model.drawn import Drawn
from model.executor import Runner
from model.sampler import Sampler
from scheduler.messages import SamplingParams
from tests.model.parity import GREEDY, build, make_runner, prompts
from tests.parity.session import Session

NEW = 24
WAYS = {
    "greedy": SamplingParams(max_tokens=NEW, seed=0, temperature=0.0),
    "sampled": SamplingParams(max_tokens=NEW, seed=5, temperature=0.9, top_p=0.9, min_tokens=3, logit_bias={3: 2.0}),
    "penalties": SamplingParams(max_tokens=NEW, seed=5, presence_penalty=0.7, repetition_penalty=1.2),
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder: Path = tmp_path_factory.mktemp("overlap")
    build("llama", folder)
    return make_runner(folder)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_tokens_at_both_depths(runner: Runner, way: str) -> None:
    asked = prompts(128, [5, 33, 50, 64, 79], seed=3)
    answers = [
        Session(runner, chunk=chunk, depth=depth).ask(asked, NEW, n=2, params=WAYS[way])
        for depth, chunk in ((0, 512), (1, 512), (1, 19))
    ]
    assert answers[0] == answers[1] == answers[2]
    assert {len(answer) for answer in answers[0]} == {NEW}


def test_the_same_tokens_in_a_small_pool(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompts(128, [5, 33, 50, 64, 79], seed=3)
    right = Session(runner).ask(asked, NEW)
    monkeypatch.setattr("scheduler.estimate.MIN_REMAINING", 1)
    small = Session(runner, blocks=(79 + NEW) // 16 + 4, chunk=64, depth=1)
    small.ask(asked * 3, 1)
    assert small.ask(asked, NEW) == right
    assert small.preemptions > 0


def test_a_row_begins_with_a_token_that_nobody_has_read(runner: Runner) -> None:
    first, second = prompts(128, [20, 21], seed=1)

    whole = [Row(first, 20, 0, 20, [1, 2], GREEDY), Row(second, 21, 0, 21, [3, 4], GREEDY)]
    one, other = runner.execute(Batch(whole)).result().tokens
    known = [Row(first + one, 20, 20, 1, [1, 2], GREEDY), Row(second + other, 21, 21, 1, [3, 4], GREEDY)]
    right = runner.execute(Batch(known)).result().tokens

    pending = runner.execute(Batch(whole))
    swapped = [
        Row(second, 21, 21, 1, [3, 4], GREEDY, length=22, source=1),
        Row(first, 20, 20, 1, [1, 2], GREEDY, length=21, source=0),
    ]
    ahead = runner.execute(Batch(swapped, after=pending))
    assert pending.result().tokens == [one, other]
    first += one
    second += other
    assert ahead.result().tokens == right[::-1]


@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}, {"presence_penalty": 0.7}]
)
def test_the_same_tokens_where_the_device_draws_them(
    runner: Runner, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the next step takes them from there, and waits for none."""
    asked = prompts(128, [5, 33, 50, 64, 79], seed=3)
    params = SamplingParams(max_tokens=NEW, seed=5, **fields)
    monkeypatch.setattr(runner, "_sampler", Sampler())
    right = Session(runner).ask(asked, NEW, n=2, params=params)
    monkeypatch.setattr(runner, "_sampler", Sampler(asynchronous=True))
    read: list[int] = []
    take = Drawn.take

    def taken(drawn: Drawn, draws: Sequence[int]) -> Tensor:
        read.append(len(draws))
        return take(drawn, draws)

    monkeypatch.setattr(Drawn, "take", taken)
    assert Session(runner, depth=1).ask(asked, NEW, n=2, params=params) == right
    assert (sum(read) > 100) == ("temperature" in fields)
