"""Steps of a split model that fail on one rank: they fail on all, nobody waits for ever, and the next one is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpool.formats import KVLayout
from kvpool.storage import KVStorage
from model.attention.reference import ReferenceAttention
from model.batch import Batch, Row, StepResult
from model.config_reader import read_config
from model.decoder import Decoder
from model.executor import Runner
from model.follower import FollowingRunner
from model.parallel import Group
from model.params import SamplingParams
from model.source import ModelSource
from model.weights import open_weights
from scheduler.ranked import RankedRunner
from tests.model.meeting import Member, together
from tests.model.parity import CPU, EXACT, build, prompts


class Broken(Exception):
    """Raised once."""


class Breaking(ReferenceAttention):
    """Raises once, in the third layer."""

    armed = False

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.armed and args[2] == 2:
            self.armed = False
            raise Broken
        return super().__call__(*args, **kwargs)


def break_attention(runner: Runner) -> None:
    assert isinstance(runner.model.attention, Breaking)
    runner.model.attention.armed = True


def break_logits(runner: Runner) -> None:
    """The second time, which is for the prompt's logprobs."""
    own, calls = runner.model.logits, iter((False, True))

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        if next(calls, False):
            raise Broken
        return own(hidden)

    runner.model.logits = logits  # type: ignore[method-assign]


def break_sampler(runner: Runner) -> None:
    own = runner._sampler.sample

    def sample(*args: Any) -> Any:
        runner._sampler.sample = own  # type: ignore[method-assign]
        raise Broken

    runner._sampler.sample = sample  # type: ignore[method-assign, assignment]


def make(folder: Path, group: Group | None) -> Runner:
    source = ModelSource("folder", folder, "tiny")
    config = read_config(source)
    model = Decoder(config, open_weights(source, config), Breaking(), EXACT, CPU, 512, group=group)
    layout = KVLayout(config.num_layers, model.config.num_kv_heads, config.head_dim, EXACT.kv)
    return (Runner if group is None or group.rank == 0 else FollowingRunner)(model, KVStorage(layout, 16), 256)


@pytest.mark.parametrize(
    ("fault", "rank"),
    [(break_attention, 0), (break_attention, 1), (break_logits, 0), (break_logits, 1), (break_sampler, 0)],
)
def test_a_step_fails_everywhere_or_nowhere(fault: Callable[[Runner], None], rank: int, tmp_path: Path) -> None:
    build("llama", tmp_path)
    first, second = prompts(128, (70, 9))
    asked = SamplingParams(max_tokens=1, seed=0, temperature=0.0, prompt_logprobs=1, logprobs=1)
    plain = SamplingParams(max_tokens=1, seed=3, temperature=0.7)
    rows = [Row(first, 70, 0, 70, [1, 2, 3, 4, 5], asked), Row(second, 9, 0, 9, [6], plain)]
    with torch.inference_mode():
        whole = make(tmp_path, None).execute(Batch(rows)).result()
    results: list[StepResult] = []

    def run(member: Member) -> StepResult:
        def settle(step: int, error: Exception | None, result: StepResult | None) -> StepResult:
            """As between processes: a vote, and rank 0's result for all."""
            failed = bool(member.sum(torch.tensor(float(error is not None))))
            if not failed and member.rank == 0:
                assert result is not None
                results.append(result)
            member.sum(torch.zeros(1))
            if failed:
                raise error or RuntimeError("another rank")
            return results[0]

        runner = make(tmp_path, member)
        ranked = RankedRunner(runner, member, settle)
        if member.rank == rank:
            fault(runner)
        with pytest.raises(Broken if member.rank == rank else RuntimeError):
            ranked.execute(Batch(rows)).result()
        return ranked.execute(Batch(rows)).result()

    for found in together(2, run):
        assert found.tokens == whole.tokens
        for mine, theirs in zip(found.prompt_logprobs[0] or [], whole.prompt_logprobs[0] or [], strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
            assert mine.top_ids == theirs.top_ids


def test_copies_need_no_meeting(tmp_path: Path) -> None:
    build("llama", tmp_path)

    def run(member: Member) -> StepResult:
        def settle(step: int, error: Exception | None, result: StepResult | None) -> StepResult:
            raise AssertionError

        return RankedRunner(make(tmp_path, member), member, settle).execute(Batch([], [(1, 2)])).result()

    assert together(2, run) == [StepResult([], [], [])] * 2
