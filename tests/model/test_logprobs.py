"""Logprobs: the raw distribution, ranks, order, the floor, and slabs of long prompts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from model.batch import Row
from model.logprobs import FLOOR, prompt_logprobs, token_logprobs
from model.params import Logprob, SamplingParams
from model.sampler import Sampler


def reference(logits: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    z = np.asarray(logits, dtype=np.float64)
    peak = z.max(-1, keepdims=True)
    exact: np.ndarray[Any, np.dtype[np.float64]] = z - peak - np.log(np.exp(z - peak).sum(-1, keepdims=True))
    return exact


def test_values_ranks_and_order() -> None:
    logits = torch.randn(20, 1001, generator=torch.Generator().manual_seed(0)) * 4
    tokens, counts = list(range(0, 1000, 50)), [n % 6 for n in range(20)]
    exact = reference(logits.numpy())
    for n, value in enumerate(token_logprobs(logits, tokens, counts)):
        assert value.logprob == pytest.approx(exact[n, tokens[n]], abs=1e-5)
        assert value.rank == 1 + (exact[n] > exact[n, tokens[n]]).sum()
        assert value.top_ids == np.argsort(-exact[n])[: counts[n]].tolist()
        assert value.top_logprobs == pytest.approx(np.sort(exact[n])[::-1][: counts[n]], abs=1e-5)


def test_raw_whatever_the_request_changes() -> None:
    """Temperature, top-k, bias and masks leave no trace. The logits ln 5, ln 3, ln 2 mean 0.5, 0.3, 0.2."""
    params = SamplingParams(
        max_tokens=9, seed=1, temperature=0.1, top_k=1, logit_bias={2: 50.0}, bad_words=((0,),), logprobs=3
    )
    row = Row([1, 1], 1, 1, 1, [], params)
    tokens, logprobs = Sampler().sample(torch.tensor([[math.log(5), math.log(3), math.log(2)]]), [row])
    assert tokens == [2]
    assert logprobs[0] is not None
    assert logprobs[0].rank == 3
    assert logprobs[0].logprob == pytest.approx(math.log(0.2), abs=1e-6)
    assert logprobs[0].top_ids == [0, 1, 2]
    assert logprobs[0].top_logprobs == pytest.approx([math.log(0.5), math.log(0.3), math.log(0.2)], abs=1e-6)


def test_floor_for_impossible_tokens() -> None:
    logits = torch.tensor([[0.0, -math.inf, -1e30], [math.nan, 0.0, 0.0]])
    first, broken = token_logprobs(logits, [1, 1], [3, 1])
    assert first == Logprob(FLOOR, 3, [0, 2, 1], [0.0, FLOOR, FLOOR])
    assert (broken.logprob, broken.top_logprobs) == (FLOOR, [FLOOR])


def test_equal_tokens_share_a_rank_and_lower_ids_come_first() -> None:
    (value,) = token_logprobs(torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]]), [3], [4])
    assert value.rank == 1
    assert value.top_ids == [1, 2, 3, 0]


def test_more_than_the_vocabulary() -> None:
    (value,) = token_logprobs(torch.zeros(1, 4), [0], [1000])
    assert value.top_ids == [0, 1, 2, 3]


def test_prompt_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut into slabs of three rows, a prompt gives what it gives at once."""
    logits = torch.randn(10, 64, generator=torch.Generator().manual_seed(2))
    tokens = list(range(10))
    whole = prompt_logprobs(logits, tokens, 2)
    monkeypatch.setattr("model.logprobs._SLAB", 3 * 64)
    assert prompt_logprobs(logits, tokens, 2) == whole
    assert prompt_logprobs(logits[:0], [], 2) == []
    exact = reference(logits.numpy())
    assert [v.logprob for v in whole] == pytest.approx([exact[n, n] for n in range(10)], abs=1e-5)
