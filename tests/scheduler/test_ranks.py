"""A split model as processes: the real worker and its ranks over Gloo, against the whole model in this process."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Any

import psutil
import pytest

from model.batch import StepResult
from model.errors import ModelError
from scheduler.assembly import assemble
from scheduler.config import EngineConfig
from scheduler.isolation import out_of_memory
from scheduler.link import Vote
from scheduler.messages import BeamSearch, Progress, Ready, SamplingParams, StepOutput, Submit
from scheduler.ranked import Stranded
from scheduler.ranks import Leader, RankFailed, said
from tests.model.parity import build, prompts
from tests.scheduler.test_worker import Process

Key = tuple[int, int]


def config(folder: Path, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {"model": str(folder), "device": "cpu", "dtype": "float32", "kv_cache_memory": 1 << 20}
    return EngineConfig(**(values | changes))


def requests() -> list[Submit]:
    """Greedy, drawn, several, with logprobs of the prompt, a search; more tokens than the pool holds at once."""
    greedy = SamplingParams(max_tokens=60, seed=0, temperature=0.0)
    drawn = SamplingParams(max_tokens=40, seed=7, temperature=0.9, top_p=0.9, logprobs=2, frequency_penalty=0.2)
    asked = SamplingParams(max_tokens=8, seed=1, temperature=0.0, prompt_logprobs=2)
    beams = SamplingParams(max_tokens=12, seed=1, logprobs=6)
    texts = prompts(128, (5, 33, 50, 64, 79, 20, 31))
    return [
        *(Submit(id=number, prompt_ids=text, params=greedy) for number, text in enumerate(texts[:4])),
        Submit(id=4, prompt_ids=texts[4], params=drawn, n=2),
        Submit(id=5, prompt_ids=texts[5], params=asked),
        Submit(id=6, prompt_ids=texts[6], params=beams, n=2, search=BeamSearch(width=3)),
    ]


def collect(outputs: list[StepOutput]) -> dict[Key, list[int]]:
    found: dict[Key, list[int]] = {}
    for output in outputs:
        assert not output.errors
        for id, index, token in zip(output.ids, output.indices, output.tokens, strict=True):
            found.setdefault((id, index), []).append(token)
    return found


def whole(folder: Path) -> dict[Key, list[int]]:
    """What one rank answers."""
    engine, _ = assemble(config(folder), lambda stage, detail: None)
    outputs = [engine.step(requests())]
    while engine.has_work:
        outputs.append(engine.step())
    return collect(outputs)


def test_two_ranks_answer_as_one_and_die_as_one(tmp_path: Path) -> None:
    """In float32, where sums of two halves may differ from whole ones in their last bits: no token does. The model has
    two query heads to a key head, and biases. Here rank 0 is killed, and in tests/faults the other."""
    build("llama-bias", tmp_path)
    it = Process("-m", "scheduler.worker")
    # While it imports.
    right = whole(tmp_path)
    try:
        it.client.send(config(tmp_path, tensor_parallel_size=2))
        lines: list[tuple[str, str]] = []
        while isinstance(message := it.client.next(), Progress):
            lines.append((message.stage, message.detail))
        assert isinstance(message, Ready)
        assert message.kv_bytes_per_token == 2 * 4 * 1 * 16 * 4  # of one of two key heads
        assert ("ranks", "2, each with as much") in lines
        (rank,) = psutil.Process(it.process.pid).children()
        handle = os.pidfd_open(rank.pid)

        outputs: list[StepOutput] = []
        for request in requests():
            it.client.send(request)
        running = True
        while running:
            output = it.client.next()
            assert isinstance(output, StepOutput)
            outputs.append(output)
            done = collect(outputs)
            running = output.stats.running + output.stats.waiting > 0 or len(done) < len(right)
        assert collect(outputs) == right
        assert outputs[-1].stats.blocks_active == 0

        it.client.send(Submit(id=9, prompt_ids=[5] * 20, params=SamplingParams(max_tokens=400, seed=0)))
        it.client.next()
        it.process.kill()
        ended, _, _ = select.select([handle], [], [], 20)
        assert ended, "a rank outlived its leader"
        os.close(handle)
        it.end()
    finally:
        if it.process.poll() is None:
            it.process.kill()


def test_a_size_that_does_not_fit_is_refused_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("llama", tmp_path)
    monkeypatch.setattr("scheduler.assembly.Leader", None)
    with pytest.raises(ModelError, match="--tensor-parallel-size 3: does not divide the model's 4 attention heads"):
        assemble(config(tmp_path, tensor_parallel_size=3), lambda stage, detail: None)


class Voter:
    """A link to a rank that voted."""

    def __init__(self, vote: Vote) -> None:
        self.vote = vote
        self.told: list[bytearray] = []

    def receive(self, kind: type[Vote]) -> Vote:
        return self.vote

    def write(self, data: bytearray) -> None:
        self.told.append(data)


def settle(vote: Vote, error: Exception | None = None) -> StepResult:
    leader = Leader.__new__(Leader)
    leader._links = [Voter(vote)]  # type: ignore[list-item]
    return leader._settle(7, error, StepResult([[3]], [[]], [None]))


def test_how_a_step_is_settled() -> None:
    assert settle(Vote(7, None)).tokens == [[3]]
    with pytest.raises(RankFailed, match="rank 1: out of memory") as caught:
        settle(Vote(7, "rank 1: out of memory"))
    assert out_of_memory(caught.value)
    with pytest.raises(KeyError):
        settle(Vote(7, None), KeyError("mine"))
    with pytest.raises(Stranded, match=r"ranks \[1\] planned another step"):
        settle(Vote(8, None))


def test_words_of_an_error_stay_where_it_was() -> None:
    assert said(1, ValueError("a prompt, perhaps")) == "rank 1: ValueError"
    assert said(2, RuntimeError("CUDA out of memory: tried")) == "rank 2: out of memory"
    assert said(0, None) is None
