"""The sampler against a plain float64 reference, worked numbers, and its own promises about neighbours and bad rows."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from model.batch import BAD_LOGITS, NO_TOKEN, Row
from model.params import SamplingParams
from model.sampler import Sampler, inverse_cdf
from model.truncation import truncate, truncate_by_bisection
from model.uniform import uniforms

Floats = NDArray[np.float64]
SAMPLER = Sampler()
EDGE = 1e-5
"""Float32 may decide differently from float64 where a sum comes closer than this to its limit."""
MIXTURES: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 12},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
]


def row(tokens: list[int] | None = None, *, prompt_len: int = 1, index: int = 0, **fields: Any) -> Row:
    tokens = [0] if tokens is None else tokens
    params = SamplingParams(**{"max_tokens": 10**6, "seed": 0, **fields})
    return Row(tokens, prompt_len, len(tokens) - 1, 1, [], params, index)


def draw(logits: Any, *rows: Row) -> list[int]:
    matrix = torch.tensor(np.array(logits), dtype=torch.float32).reshape(len(rows), -1)
    before = matrix.clone()
    tokens, _ = SAMPLER.sample(matrix, list(rows))
    assert torch.equal(matrix.nan_to_num(), before.nan_to_num()), "the model's logits are not the sampler's to change"
    return tokens


def frequencies(logits: Any, count: int, **fields: Any) -> Floats:
    """Shares of each token over 100 positions of count / 100 seeds."""
    rows = [row([0] * (1 + n % 100), seed=n // 100, **fields) for n in range(count)]
    tokens = draw([logits] * count, *rows)
    shares: Floats = np.bincount(tokens, minlength=len(logits)) / count
    return shares


# The reference: one row, float64, sorted, in the order that design.md states.


def reference_probs(logits: Any, params: SamplingParams) -> Floats:
    z = np.array(logits, dtype=np.float64) / params.temperature
    p = np.exp(z - z.max())
    probs: Floats = p / p.sum()
    return probs


def clear(values: Floats, limit: float) -> None:
    """Give the example up where float32 may fall on the limit's other side."""
    if np.abs(values - limit).min() <= EDGE:
        reject()


def reference_support(p: Floats, params: SamplingParams) -> NDArray[np.int64]:
    order = np.argsort(-p, kind="stable")
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        sums = np.cumsum(p[order]) / p[order].sum()
        clear(sums, params.top_p)
        order = order[: int((sums < params.top_p).sum()) + 1]
    if params.min_p > 0:
        clear(p / p.max(), params.min_p)
        order = order[p[order] >= params.min_p * p.max()]
    return np.sort(order)


# Worked numbers of the two texts the project started from.


@pytest.mark.parametrize(
    ("temperature", "percent"),
    [(0.5, (86.7, 11.7, 1.6)), (1.0, (66.5, 24.5, 9.0)), (2.0, (50.6, 30.7, 18.6))],
)
def test_seed_softmax_of_2_1_0(temperature: float, percent: tuple[float, ...]) -> None:
    exact = reference_probs([2, 1, 0], SamplingParams(max_tokens=1, seed=0, temperature=temperature))
    assert np.round(100 * exact, 1).tolist() == list(percent)
    shares = frequencies([2.0, 1.0, 0.0], 10_000, temperature=temperature)
    assert np.abs(shares - exact).max() < 5 * 0.5 / 10_000**0.5


@pytest.mark.parametrize(
    ("percent", "fields", "expected"),
    [
        ((50, 20, 15, 10, 5), {"top_k": 2}, (50 / 70, 20 / 70, 0, 0, 0)),
        ((50, 20, 15, 10, 5), {"top_p": 0.9}, (50 / 95, 20 / 95, 15 / 95, 10 / 95, 0)),
        ((40, 30, 18, 12), {"top_k": 3}, (0.455, 0.341, 0.205, 0)),
        ((40, 30, 18, 12), {"top_p": 0.9}, (0.40, 0.30, 0.18, 0.12)),
        ((97, 1.5, 1, 0.5), {"top_p": 0.9}, (1, 0, 0, 0)),
    ],
)
def test_seed_top_k_and_top_p(percent: tuple[float, ...], fields: Any, expected: tuple[float, ...]) -> None:
    logits = [math.log(p) for p in percent]
    shares = frequencies(logits, 10_000, **fields)
    assert [share > 0 for share in shares] == [p > 0 for p in expected]
    assert np.abs(shares - np.array(expected)).max() < 5 * 0.5 / 10_000**0.5 + 0.0005


# Truncation and the draw, against the reference.

logit_rows = st.integers(2, 400).flatmap(
    lambda n: st.builds(
        lambda seed, spread: np.random.default_rng(seed).normal(0, spread, n).astype(np.float32),
        st.integers(0, 2**32),
        st.floats(0.1, 6),
    )
)
settings_of = st.builds(
    lambda temperature, top_k, top_p, min_p: SamplingParams(
        max_tokens=1, seed=0, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    ),
    st.floats(0.05, 5),
    st.sampled_from([0, 1, 2, 3, 5, 10, 50, 399, 1000]),
    st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    st.one_of(st.just(0.0), st.floats(0.001, 1)),
)


@settings(max_examples=200, deadline=None)
@given(logits=logit_rows, params=settings_of)
def test_support_equals_reference(logits: NDArray[np.float32], params: SamplingParams) -> None:
    """Both ways to truncate keep exactly the reference's tokens, and change no probability that stays."""
    probs = torch.softmax(torch.from_numpy(logits) / params.temperature, 0).unsqueeze(0)
    support = reference_support(probs[0].double().numpy(), params)
    expected = np.zeros_like(logits)
    expected[support] = probs[0].numpy()[support]
    for method in (truncate, truncate_by_bisection):
        kept = probs.clone()
        method(kept, [params])
        assert np.array_equal(kept[0].numpy(), expected), method.__name__


@settings(max_examples=150, deadline=None)
@given(
    logits=logit_rows,
    params=settings_of,
    seed=st.integers(-(2**70), 2**70),
    position=st.integers(1, 50),
    data=st.data(),
)
def test_token_equals_reference(
    logits: NDArray[np.float32], params: SamplingParams, seed: int, position: int, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, 20))
    p = reference_probs(logits, params)
    support = reference_support(p, params)
    sums = np.cumsum(p[support]) / p[support].sum()
    u = uniforms([seed], [index], [position])[0]
    clear(sums, u)
    expected = support[int((sums <= u).sum())]
    fields = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    assert draw(logits, row([0] * position, seed=seed, index=index, **fields)) == [expected]


@pytest.mark.parametrize("vocab", [1, 5, 127, 128, 129, 1000])
def test_inverse_cdf_edges(vocab: int) -> None:
    """Every number from 0 to the last below 1 finds an id in range that has a probability, whatever the scale."""
    rng = np.random.default_rng(vocab)
    numbers = np.array([0.0, 2.0**-53, 0.5, 1 - 2.0**-53, *rng.random(60)])
    for scale in (1e-38, 1.0, 1e30):
        probs = rng.random((numbers.size, vocab)) * (rng.random((numbers.size, vocab)) < 0.3) * scale
        probs[np.arange(numbers.size), rng.integers(0, vocab, numbers.size)] = scale
        tensor = torch.from_numpy(probs.astype(np.float32))
        ids = inverse_cdf(tensor, numbers)
        assert ids.min() >= 0
        assert ids.max() < vocab
        assert (tensor[torch.arange(numbers.size), torch.from_numpy(ids)] > 0).all()


def test_ties_keep_exactly_k_lowest_ids() -> None:
    """200 equal tokens are cut to exactly k, or to exactly what top-p needs, at the same place by both methods."""
    probs = torch.full((1, 200), 1 / 200)
    for fields, count in (({"top_k": 7}, 7), ({"top_p": 0.4975}, 100), ({"top_k": 40, "top_p": 0.26}, 11)):
        params = SamplingParams(max_tokens=1, seed=0, **fields)
        for method in (truncate, truncate_by_bisection):
            kept = probs.clone()
            method(kept, [params])
            assert kept[0].nonzero()[:, 0].tolist() == list(range(count)), (method.__name__, fields)


@pytest.mark.parametrize("fields", MIXTURES)
def test_distribution(fields: Any) -> None:
    """Chi-square over 20,000 draws."""
    count = 20_000
    logits = np.random.default_rng(3).normal(0, 2, 40).astype(np.float32)
    params = SamplingParams(max_tokens=1, seed=0, **fields)
    p = reference_probs(logits, params)
    support = reference_support(p, params)
    shares = frequencies(logits, count, **fields)
    assert shares[np.setdiff1d(np.arange(40), support)].sum() == 0
    expected = p[support] / p[support].sum() * count
    common = expected > 10
    chi = float(((shares[support] * count - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum()) - 1
    assert chi < freedom + 6 * (2 * freedom) ** 0.5


# Neighbours, greedy rows, bad rows.


def test_rows_do_not_depend_on_their_batch() -> None:
    """40 different rows give the same tokens alone, together and reversed, at an odd vocabulary size."""
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 3, (40, 5003)).astype(np.float32)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 40},
        {"temperature": 1.0, "min_p": 0.02, "repetition_penalty": 1.3},
        {"temperature": 0.0, "frequency_penalty": 0.5, "logit_bias": {7: 3.0}},
        {"temperature": 1.0, "allowed_token_ids": (1, 2, 3, 4000)},
        {"temperature": 1.0, "logprobs": 3},
    ]
    rows = [row(rng.integers(0, 5003, 30).tolist(), prompt_len=9, seed=n, **kinds[n % 8]) for n in range(40)]
    together, logprobs = SAMPLER.sample(torch.from_numpy(logits), rows)
    backwards, _ = SAMPLER.sample(torch.from_numpy(logits[::-1].copy()), rows[::-1])
    assert backwards[::-1] == together
    for n in range(40):
        alone, own = SAMPLER.sample(torch.from_numpy(logits[n : n + 1]), [rows[n]])
        assert (alone[0], own[0]) == (together[n], logprobs[n])


def test_greedy_takes_the_first_of_equals() -> None:
    logits = [[1.0, 5.0, 5.0, 2.0], [0.0, 0.0, 0.0, 0.0]]
    assert draw(logits, row(temperature=0), row(temperature=0)) == [1, 0]
    assert draw(logits, row(top_k=1), row(temperature=1e-10)) == [1, 0]


@pytest.mark.parametrize("temperature", [1e-10, 1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(0, 1e4, (3, 999))
    rows = [row(temperature=temperature, seed=n) for n in range(3)]
    assert draw(logits, *rows) == logits.argmax(1).tolist()


def test_huge_temperature_is_nearly_uniform() -> None:
    shares = frequencies([300.0, 0.0, -300.0, 7.0], 20_000, temperature=1e30)
    assert np.abs(shares - 0.25).max() < 0.02


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("fields", [{"temperature": 0}, {"top_p": 0.9}, {"presence_penalty": 1.0, "logprobs": 2}])
def test_bad_row_spares_its_neighbours(bad: float, fields: Any) -> None:
    logits = np.random.default_rng(1).normal(0, 1, (3, 300))
    rows = [row(seed=n, **fields) for n in range(3)]
    clean = draw(logits, *rows)
    logits[1, 17] = bad
    logits[1, 0] = 1e3
    tokens, logprobs = SAMPLER.sample(torch.from_numpy(logits).float(), rows)
    assert tokens == [clean[0], BAD_LOGITS, clean[2]]
    assert logprobs[1] is None
    assert (logprobs[0] is None) == ("logprobs" not in fields)


def test_row_of_minus_infinity_is_bad_but_a_few_are_not() -> None:
    logits = np.full((2, 9), -np.inf)
    logits[1, 4] = -3
    assert draw(logits, row(), row()) == [BAD_LOGITS, 4]


# Edits.


def test_repetition_counts_prompt_and_output_once() -> None:
    """Positive logits are divided, negative multiplied, however often the token occurs."""
    logits = [3.0, 2.9, -1.0, -1.1]
    assert draw(logits, row([0, 0, 0], prompt_len=2, temperature=0, repetition_penalty=1.02)) == [0]
    assert draw(logits, row([0, 0, 0], prompt_len=3, temperature=0, repetition_penalty=1.05)) == [1]
    only_negative: dict[str, Any] = {"allowed_token_ids": (2, 3)}
    assert draw(logits, row([2], temperature=0, repetition_penalty=1.05, **only_negative)) == [2]
    assert draw(logits, row([2], temperature=0, repetition_penalty=1.2, **only_negative)) == [3]


def test_presence_and_frequency_count_output_only() -> None:
    logits = [3.0, 2.0, 0.0]
    prompt_only = row([0, 0, 0], prompt_len=3, temperature=0, presence_penalty=2.0, frequency_penalty=2.0)
    assert draw(logits, prompt_only) == [0]
    assert draw(logits, row([0, 0, 0, 0], prompt_len=1, temperature=0, presence_penalty=0.9)) == [0]
    assert draw(logits, row([0, 0], prompt_len=1, temperature=0, frequency_penalty=0.4)) == [0]
    assert draw(logits, row([0, 0, 0, 0], prompt_len=1, temperature=0, frequency_penalty=0.4)) == [1]
    assert draw([0.0, 1.0, 0.0], row([1], temperature=0, presence_penalty=-2)) == [1]


def test_edits_equal_reference() -> None:
    """All edits of many rows at once, in order, against a loop."""
    rng = np.random.default_rng(11)
    vocab, count = 50, 30
    logits = rng.normal(0, 2, (count, vocab)).astype(np.float32)
    expected = logits.astype(np.float64)
    rows = []
    for n in range(count):
        tokens = rng.integers(0, vocab, 40).tolist()
        bias = {int(t): float(rng.normal(0, 4)) for t in rng.integers(0, vocab, 5)}
        banned = ((int(rng.integers(vocab)),), (*tokens[-2:], int(rng.integers(vocab))))
        allowed = tuple(rng.permutation(vocab)[:35].tolist()) if n % 2 else None
        rows.append(
            row(
                tokens,
                prompt_len=25,
                temperature=0,
                repetition_penalty=1.3,
                presence_penalty=0.7,
                frequency_penalty=0.2,
                logit_bias=bias,
                bad_words=banned,
                allowed_token_ids=allowed,
                min_tokens=16,
                stop_token_ids=(n,),
            )
        )
        out = expected[n]
        for t in set(tokens):
            out[t] = out[t] / 1.3 if out[t] > 0 else out[t] * 1.3
        for t, uses in Counter(tokens[25:]).items():
            out[t] -= 0.7 + 0.2 * uses
        for t, value in bias.items():
            out[t] += value
        for t in range(vocab):
            if t in (n, banned[0][0], banned[1][-1]) or (allowed is not None and t not in allowed):
                out[t] = -np.inf
    assert draw(logits, *rows) == expected.argmax(1).tolist()


def test_bad_words() -> None:
    logits = [0.0, 5.0, 4.0]
    assert draw(logits, row(temperature=0, bad_words=((1,),))) == [2]
    assert draw(logits, row([0, 2], temperature=0, bad_words=((2, 1),))) == [2], "the word would be complete"
    assert draw(logits, row([2, 0], temperature=0, bad_words=((2, 1),))) == [1]
    assert draw(logits, row([0], temperature=0, bad_words=((2, 2, 0, 1),))) == [1], "longer than the text"


def test_min_tokens_masks_stops_until_reached() -> None:
    logits = [0.0, 5.0, 4.0]
    fields: dict[str, Any] = {"temperature": 0, "min_tokens": 2, "stop_token_ids": (1,)}
    tokens = [draw(logits, row([0] * n, **fields))[0] for n in (1, 2, 3, 4)]
    assert tokens == [2, 2, 1, 1]


def test_masks_win_over_bias() -> None:
    logits = [0.0, 5.0, 4.0, 1.0]
    fields: dict[str, Any] = {"logit_bias": {1: 100.0, 2: 100.0}, "bad_words": ((1,),), "allowed_token_ids": (1, 3)}
    assert draw(logits, row(temperature=0, **fields)) == [3]
    assert draw(logits, row(temperature=1, **fields)) == [3]


def test_nothing_left_ends_the_sequence() -> None:
    """No token, not even a stop token that is not allowed; the neighbour draws as ever."""
    logits = [[0.0, 5.0, 4.0]] * 4
    nothing: dict[str, Any] = {"allowed_token_ids": (1,), "bad_words": ((1,),), "logprobs": 1}
    rows = [
        row(**nothing, stop_token_ids=(2, 0)),
        row(**nothing),
        row(allowed_token_ids=(), temperature=0, min_tokens=9, stop_token_ids=(77, 0)),
        row(temperature=0, presence_penalty=0.1),
    ]
    tokens, logprobs = SAMPLER.sample(torch.tensor(logits), rows)
    assert tokens == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 1]
    assert logprobs[1] is None


def test_foreign_ids_are_ignored() -> None:
    fields: dict[str, Any] = {
        "logit_bias": {-1: 50.0, 3: 50.0},
        "allowed_token_ids": (0, 1, 2, 3, 10**9),
        "bad_words": ((99,), (-1,)),
        "min_tokens": 5,
        "stop_token_ids": (3,),
        "temperature": 0,
    }
    assert draw([[0.0, 1.0, 0.5]] * 2, row(**fields), row(temperature=0)) == [1, 1]
