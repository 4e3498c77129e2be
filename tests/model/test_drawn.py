"""Tokens that are drawn ahead are those that the sampler draws when it is asked, whoever else is in the step."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from model.batch import BAD_LOGITS
from model.drawn import Drawn
from model.grammar import Matcher
from model.sampler import Sampler
from tests.model.test_sampler import MIXTURES, row

SAMPLER = Sampler(asynchronous=True)
KINDS: list[dict[str, Any]] = [{"temperature": 0.0}, *MIXTURES, {"temperature": 0.0, "logprobs": 2}, {"top_k": 1}]
EDITED: dict[str, Any] = {"temperature": 0.9, "presence_penalty": 1.0, "logprobs": 1}


@pytest.mark.parametrize("bad", [None, torch.nan, torch.inf, -torch.inf])
def test_as_the_sampler_draws(bad: float | None) -> None:
    """Rows with penalties and with a grammar, and broken ones, among others."""
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.normal(0, 3, (30, 501)).astype(np.float32))
    rows = [row([1] * (1 + n), seed=n, **KINDS[n % len(KINDS)]) for n in range(28)]
    rows.insert(7, row([5, 6], seed=100, **EDITED))
    rows.insert(20, row([5, 6], seed=101, temperature=0.0))
    rows[20].matcher = cast(Matcher, object())
    masks = {20: np.full(63, 0b100, np.uint8)}
    if bad is not None:
        for number in (0, 5, 7, 16):
            logits[number] = bad
    expected = SAMPLER.sample(logits.clone(), rows, masks)
    ahead = SAMPLER.ahead(logits, rows)
    assert ahead is not None
    assert sorted(ahead.places) == [n for n in range(30) if n not in (7, 20)]
    assert SAMPLER.sample(logits, rows, masks, ahead) == expected
    assert [expected[0][number] == BAD_LOGITS for number in (0, 5, 7, 16, 1, 20)] == [bad is not None] * 4 + [False] * 2


def test_only_where_it_is_worth_it() -> None:
    logits = torch.zeros(1, 9)
    assert Sampler().ahead(logits, [row()]) is None
    assert SAMPLER.ahead(logits, [row(**EDITED)]) is None


def test_a_next_step_takes_what_it_needs() -> None:
    """In its own order; a draw that failed becomes a token that an embedding has."""
    drawn = Drawn(torch.tensor([70, BAD_LOGITS, 90]), [0, 2, 5])
    assert drawn.take([5, 0, 5, 2]).tolist() == [90, 70, 90, 0]
    assert drawn.wait() == {0: 70, 2: BAD_LOGITS, 5: 90}
