"""The compiled sampler against the float64 reference of `tests.model.test_sampler`, and against the path in torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from numpy.typing import NDArray

from model.batch import BAD_LOGITS, NO_TOKEN, Row
from model.kernels.loaded import Kernels
from model.logprobs import FLOOR, prompt_logprobs, token_logprobs
from model.params import SamplingParams
from model.sampler import Sampler
from tests.model.test_sampler import MIXTURES, logit_rows, reference_probs, reference_support, row, settings_of

Floats32 = NDArray[np.float32]
NEAR = 1e-6
"""How near a uniform number may come to the boundary between two tokens."""


def draws(kernels: Kernels, logits: Floats32, params: SamplingParams, numbers: Iterable[float]) -> list[int]:
    """What one row draws for each of some uniform numbers."""
    wishes = torch.tensor(
        [[params.temperature, params.top_k, params.top_p, params.min_p, u] for u in numbers], dtype=torch.float64
    )
    rows = torch.from_numpy(np.tile(logits, (len(wishes), 1)))
    tokens: list[int] = kernels.ops.draw(rows, wishes).tolist()
    return tokens


def language(rows: int, vocab: int, seed: int = 0) -> Floats32:
    """Logits as a language model has them: a few that stand out, and a broad rest."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2.5, (rows, vocab))
    logits[:, rng.integers(0, vocab, vocab // 100)] += rng.uniform(0, 14, vocab // 100)
    return logits.astype(np.float32)


def test_support_and_boundaries_equal_reference(kernels: Kernels) -> None:
    """Just inside both ends of each token's interval that token is drawn: so the support is the same, and every share.
    A token more or less would move them all."""

    @settings(max_examples=150, deadline=None)
    @given(logits=logit_rows, params=settings_of)
    def check(logits: Floats32, params: SamplingParams) -> None:
        p = reference_probs(logits, params)
        support = reference_support(p, params)
        # Not just equal to float64 but to float32, where the support is decided: near-ties at the cut are rounding.
        inside = np.isin(np.arange(p.size), support)
        if not inside.all() and p[~inside].max() > p[inside].min() * (1 - 1e-5):
            reject()
        sums = np.cumsum(p[support]) / p[support].sum()
        lows = np.concatenate([[0.0], sums[:-1]])
        wide = sums - lows > 4 * NEAR
        numbers = np.concatenate([(lows + NEAR)[wide], (sums - NEAR)[wide], [0.0, 1 - 2.0**-53]])
        expected = [*support[wide], *support[wide]]
        *drawn, first, last = draws(kernels, logits, params, numbers)
        assert drawn == expected
        assert inside[first]
        assert inside[last]

    check()


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"top_k": 7}, 7),
        ({"top_k": 700}, 700),
        ({"top_p": 0.4975}, 398),
        ({"top_k": 40, "top_p": 0.26}, 11),
        ({"min_p": 1.0}, 800),
    ],
)
def test_ties_keep_the_lowest_ids(kernels: Kernels, fields: Any, count: int) -> None:
    """800 equal tokens among smaller ones: each of the first `count` is drawn, and no other."""
    logits = np.full(2000, -30.0, np.float32)
    logits[::2][:800] = 1.5
    numbers = (np.arange(count) + 0.5) / count
    params = SamplingParams(max_tokens=1, seed=0, **fields)
    assert draws(kernels, logits, params, numbers) == list(range(0, 2 * count, 2))


@pytest.mark.parametrize("fields", MIXTURES)
def test_frequencies(kernels: Kernels, fields: Any) -> None:
    """Evenly spaced numbers draw each token as often as its probability says, up to one at each end."""
    count, logits = 5000, np.random.default_rng(3).normal(0, 2, 40).astype(np.float32)
    params = SamplingParams(max_tokens=1, seed=0, **fields)
    p = reference_probs(logits, params)
    support = reference_support(p, params)
    expected = np.zeros(40)
    expected[support] = p[support] / p[support].sum() * count
    drawn = np.bincount(draws(kernels, logits, params, (np.arange(count) + 0.5) / count), minlength=40)
    assert np.abs(drawn - expected).max() <= 1.01
    assert drawn.sum() == drawn[support].sum()


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.98},
    {"temperature": 1.2, "top_k": 40},
    {"temperature": 1.5, "top_k": 3000, "top_p": 0.9, "min_p": 0.001},
    {"temperature": 1.0, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 0.0, "frequency_penalty": 0.5, "logit_bias": {7: 3.0}},
    {"temperature": 1.0, "allowed_token_ids": (1, 2, 3, 4000), "bad_words": ((2,),)},
    {"temperature": 1.0, "allowed_token_ids": (1,), "bad_words": ((1,),)},
    {"temperature": 1e-5, "logprobs": 0},
    {"temperature": 1.0, "logprobs": 3, "min_tokens": 30, "stop_token_ids": (4, 5)},
]


def mixed(count: int, vocab: int) -> tuple[torch.Tensor, list[Row]]:
    rng = np.random.default_rng(5)
    rows = [
        row(rng.integers(0, vocab, 30).tolist(), prompt_len=9, seed=n, **KINDS[n % len(KINDS)]) for n in range(count)
    ]
    return torch.from_numpy(language(count, vocab)), rows


@pytest.mark.parametrize("vocab", [5003, 49152])
def test_tokens_equal_those_of_torch(kernels: Kernels, vocab: int) -> None:
    logits, rows = mixed(72, vocab)
    logits[30, 9], logits[31, 8], logits[32] = torch.nan, torch.inf, -torch.inf
    before = logits.clone()
    tokens, logprobs = Sampler(kernels).sample(logits, rows)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    expected, expected_logprobs = Sampler().sample(logits, rows)
    assert tokens == expected
    assert {BAD_LOGITS, NO_TOKEN} < set(tokens)
    for own, other in zip(logprobs, expected_logprobs, strict=True):
        assert (own is None) == (other is None)
        assert own is None or other is None or (own.rank, own.top_ids) == (other.rank, other.top_ids)


def test_rows_do_not_depend_on_their_batch(kernels: Kernels) -> None:
    logits, rows = mixed(24, 5003)
    sampler = Sampler(kernels)
    together, logprobs = sampler.sample(logits, rows)
    backwards, _ = sampler.sample(logits.flip(0), rows[::-1])
    assert backwards[::-1] == together
    for n in range(24):
        alone, own = sampler.sample(logits[n : n + 1], [rows[n]])
        assert (alone[0], own[0]) == (together[n], logprobs[n])


@pytest.mark.parametrize("vocab", [1, 2, 15, 17, 511, 512, 513, 1025])
def test_every_size_and_every_number(kernels: Kernels, vocab: int) -> None:
    """The only finite logit is found wherever it stands; no number falls outside, and none on what has no weight."""
    numbers = [0.0, 2.0**-53, 0.5, 1 - 2.0**-53]
    for at in {0, vocab // 2, vocab - 1}:
        logits = np.full(vocab, -np.inf, np.float32)
        logits[at] = -3e38
        for fields in ({}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}, {"temperature": 0.0}, {"top_k": 1}):
            params = SamplingParams(max_tokens=1, seed=0, **fields)
            assert draws(kernels, logits, params, numbers) == [at] * 4
        params = SamplingParams(max_tokens=1, seed=0)
        logits[at] = np.inf
        assert draws(kernels, logits, params, numbers) == [BAD_LOGITS] * 4
        logits[at] = np.nan
        assert draws(kernels, logits, params, numbers) == [BAD_LOGITS] * 4
        logits[at] = -np.inf
        assert draws(kernels, logits, params, numbers) == [NO_TOKEN] * 4


def test_argmax_takes_the_first_of_equals(kernels: Kernels) -> None:
    logits = np.random.default_rng(0).integers(0, 9, (50, 3000)).astype(np.float32)
    wishes = torch.zeros(50, 5, dtype=torch.float64)
    assert kernels.ops.draw(torch.from_numpy(logits), wishes).tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize("vocab", [7, 512, 5003])
@pytest.mark.parametrize("ties", [False, True])
def test_logprobs_equal_those_of_torch(kernels: Kernels, vocab: int, ties: bool) -> None:
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(language(30, vocab))
    if ties:
        logits = logits.round()
    logits[3, 2], logits[4, :3] = -torch.inf, -1e30
    tokens = rng.integers(0, vocab, 30).tolist()
    tokens[3] = tokens[4] = 2
    counts = [0, 1, 5, 20, 3000] * 6
    own = token_logprobs(logits, tokens, counts, kernels=kernels)
    for n, (got, expected) in enumerate(zip(own, token_logprobs(logits, tokens, counts), strict=True)):
        assert got.rank == expected.rank
        # Of equals at the end of the list torch may take any.
        assert got.top_ids == np.argsort(-logits[n].numpy(), kind="stable")[: counts[n]].tolist()
        assert got.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert got.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-5)
    assert own[3].logprob == own[4].logprob == FLOOR
    some = [7, 3, 3, 29]
    picked = token_logprobs(logits, [tokens[i] for i in some], [2] * 4, rows=some, kernels=kernels)
    assert picked == [token_logprobs(logits[i : i + 1], tokens[i : i + 1], [2], kernels=kernels)[0] for i in some]


def test_broken_rows_have_the_reference_s_logprobs(kernels: Kernels) -> None:
    logits = torch.from_numpy(language(4, 300))
    logits[0, 5], logits[1, 6], logits[2] = torch.nan, torch.inf, -torch.inf
    assert prompt_logprobs(logits, [5, 5, 5, 5], 3, kernels)[:3] == prompt_logprobs(logits, [5, 5, 5, 5], 3)[:3]


def test_mistakes_are_errors_not_crashes(kernels: Kernels) -> None:
    logits, wishes = torch.zeros(2, 9), torch.zeros(2, 5, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.int64)
    for broken in (logits.double(), logits[:1], torch.zeros(9, 2).t()):
        with pytest.raises(RuntimeError, match="logits must"):
            kernels.ops.draw(broken, wishes)
    for rows, tokens, counts, message in (
        (one * 2, one, one, "no row 2"),
        (one, one * 9, one, "no token 9"),
        (one, one * -1, one, "no token -1"),
        (one, one, one * 3, "from 0 to 2"),
    ):
        with pytest.raises(RuntimeError, match=message):
            kernels.ops.logprobs(logits, rows, tokens, counts, 2)
    assert not math.isnan(kernels.ops.logprobs(logits, one, one, one, 2)[0][0, 0])
