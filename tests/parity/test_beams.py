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
from scheduler.messages import BeamSearch, FinishReason, SamplingParams, Submit
from tests.model.parity import build, make_runner, prompts
from tests.parity.session import Prompts, Session

NEW = 12
ENDS = tuple(range(5, 128, 9))
"""So many that beams end all the time."""
Beam = tuple[list[int], float]
"""Tokens and score."""
KINDS = [(False, 1.0), (False, -0.5), (True, 1.0), (True, 2.0), ("never", 1.0), ("never", 0.0)]


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


def right(module: Any, asked: Prompts, search: BeamSearch, ends: tuple[int, ...], new: int) -> list[list[Beam]]:
    """Of each prompt the beams, best first, by transformers."""
    ids = torch.tensor(asked)
    width = search.width
    out = module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        eos_token_id=list(ends) or None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    lengths = (out.beam_indices >= 0).sum(1).tolist()
    beams = [
        (tokens[ids.shape[1] :][:length], score)
        for tokens, length, score in zip(out.sequences.tolist(), lengths, out.sequences_scores.tolist(), strict=True)
    ]
    return [beams[first : first + width] for first in range(0, len(beams), width)]


def found(session: Session, asked: Prompts, search: BeamSearch, ends: tuple[int, ...], new: int) -> list[list[Beam]]:
    """The same by the engine, among requests that draw."""
    params = SamplingParams(max_tokens=new, seed=0, stop_token_ids=ends)
    numbers = {next(session.ids): place for place, _ in enumerate(asked)}
    inbox = [
        Submit(id=id, prompt_ids=asked[place], params=params, n=search.width, search=search)
        for id, place in numbers.items()
    ]
    inbox += [Submit(id=next(session.ids), prompt_ids=prompt[:7], params=params, n=2) for prompt in asked[:2]]
    beams: list[list[tuple[list[int], float]]] = [[([], 0.0) for _ in range(search.width)] for _ in asked]
    while inbox or session.engine.has_work:
        out = session.engine.step(inbox)
        session.engine.check()
        inbox = []
        session.preemptions = out.stats.preemptions
        for row, (id, index, token) in enumerate(zip(out.ids, out.indices, out.tokens, strict=True)):
            assert out.finishes[row] in (FinishReason.RUNNING, FinishReason.STOP, FinishReason.LENGTH), out.errors
            if id in numbers and token >= 0:
                tokens, logprob = beams[numbers[id]][index]
                beams[numbers[id]][index] = ([*tokens, token], logprob + out.logprobs[row].logprob)
    assert out.stats.blocks_active == 0
    penalty = search.length_penalty
    return [[(tokens, logprob / len(tokens) ** penalty) for tokens, logprob in of_one] for of_one in beams]


def assert_same(got: list[list[Beam]], wanted: list[list[Beam]]) -> None:
    assert [[tokens for tokens, _ in beams] for beams in got] == [[tokens for tokens, _ in beams] for beams in wanted]
    for ours, theirs in zip(got, wanted, strict=True):
        assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_beams_equal_generate(module: Any, runner: Runner, asked: list[Prompts], width: int) -> None:
    session = Session(runner, seqs=64)
    ended = 0
    for number, (early, penalty) in enumerate(KINDS):
        search = BeamSearch(width=width, early_stopping=early, length_penalty=penalty)
        ends = ENDS[: 1 + 13 * (number % 3 != 2)]
        for batch in asked:
            wanted = right(module, batch, search, ends, NEW)
            ended += sum(len(tokens) < NEW for beams in wanted for tokens, _ in beams)
            assert_same(found(session, batch, search, ends, NEW), wanted)
    assert ended > 100


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
