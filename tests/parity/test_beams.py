"""Beam search equals transformers' own in float32: tokens and scores, ten prompts, whatever the engine does meanwhile.

The prompts of one length are one batch to transformers, which is as good as one by one and takes a tenth of the time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from model.executor import Runner
from scheduler.messages import BeamSearch
from tests.model.parity import build, make_runner, prompts
from tests.parity.searched import assert_same, found, right
from tests.parity.session import Prompts, Session

NEW = 10
ENDS = tuple(range(5, 128, 9))
"""So many that beams end all the time."""
KINDS: dict[int, list[tuple[Any, float]]] = {
    2: [(False, 1.0), (True, 1.0), ("never", 2.0)],
    4: [(False, -0.5), (True, 2.0), ("never", 1.0)],
    8: [(False, 2.0), (True, 0.0), ("never", 0.0)],
}
"""By width: early_stopping and length_penalty."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("beams")
    build("llama", folder)
    return folder


@pytest.fixture(scope="module")
def module(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
def runner(folder: Path) -> Runner:
    return make_runner(folder, num_blocks=256)


@pytest.fixture(scope="module")
def asked() -> list[Prompts]:
    """Ten, in two batches."""
    return [prompts(128, [21] * 5, seed=1), prompts(128, [40] * 5, seed=2)]


@pytest.mark.parametrize("width", KINDS)
def test_beams_equal_generate(module: Any, runner: Runner, asked: list[Prompts], width: int) -> None:
    session = Session(runner, seqs=64)
    ended = 0
    for number, (early, penalty) in enumerate(KINDS[width]):
        search = BeamSearch(width=width, early_stopping=early, length_penalty=penalty)
        ends = ENDS if number else ENDS[:1]
        for batch in asked:
            wanted = right(module, batch, search, ends, NEW)
            ended += sum(len(tokens) < NEW for beams in wanted for tokens, _ in beams)
            assert_same(found(session, batch, search, ends, NEW), wanted)
    assert ended > 4 * width


def test_preempted_beams_equal_generate(module: Any, runner: Runner, asked: list[Prompts]) -> None:
    """The pool holds one search and a little more; an answer of one token teaches the engine to expect short ones."""
    search = BeamSearch(width=4)
    wanted = right(module, asked[1], search, (), NEW)
    session = Session(runner, blocks=24, seqs=64, chunk=40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scheduler.estimate.MIN_REMAINING", 1)
        session.ask(asked[0] * 3, 1)
        assert_same(found(session, asked[1], search, (), NEW), wanted)
    assert session.preemptions > 0


def test_four_greedy_answers_equal_four_single_runs(runner: Runner, asked: list[Prompts]) -> None:
    few = [prompt for batch in asked for prompt in batch[:2]]
    alone = [Session(runner).ask([prompt], 24)[0] for prompt in few for _ in range(4)]
    assert Session(runner).ask(few, 24, n=4) == alone
