"""Beam search twice: by transformers' `generate`, and by the whole engine among requests that draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scheduler.messages import BeamSearch, FinishReason, SamplingParams, Submit
from tests.parity.session import Prompts, Session

Beam = tuple[list[int], float]
"""Tokens and score."""


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
