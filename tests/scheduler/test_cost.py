"""The cost model finds what steps cost, whatever the machine, and keeps its head when one of them stalls."""

from __future__ import annotations

import random

import pytest

from scheduler.budget import Budget
from scheduler.cost import CostModel, Fit, Work

TRUE = (0.031, 0.0021, 2.0e-7, 0.0045, 1.1e-6, 5.0e-6)
"""a, b, e, c, d, f of the module's docstring, in seconds."""


def seconds(work: Work, factor: float = 1.0) -> float:
    base, row, read, token, pair, reach = TRUE
    prefill = token * work.prefill + pair * work.product + reach * work.reach
    return factor * (base + row * work.rows + read * work.context + prefill)


def some_work(rng: random.Random) -> Work:
    rows = rng.randrange(0, 33)
    prefill = rng.choice([0, 0, 8, 30, 100]) if rows else rng.choice([8, 30, 100])
    start = rng.randrange(6000) if prefill else 0
    return Work(rows, rows * rng.randrange(20, 3000), prefill, prefill * (start + prefill / 2), start)


def teach(model: CostModel, rng: random.Random, steps: int, factor: float = 1.0) -> None:
    for _ in range(steps):
        work = some_work(rng)
        model.observe(work, seconds(work, factor) * rng.uniform(0.95, 1.05))


def worst_error(model: CostModel, rng: random.Random, factor: float = 1.0) -> float:
    works = [some_work(rng) for _ in range(200)]
    return max(abs(model.seconds(w) / seconds(w, factor) - 1) for w in works)


@pytest.mark.parametrize("weight_bytes", [1_000, 20_000_000, 270_000_000, 4_000_000_000])
def test_learns_from_any_prior(weight_bytes: int) -> None:
    rng = random.Random(1)
    model = CostModel(weight_bytes)
    teach(model, rng, 150)
    assert worst_error(model, rng) < 0.25


def test_prior_is_sane() -> None:
    small, large = CostModel(270_000_000), CostModel(16_000_000_000)
    assert 0.005 < small.decode_seconds(1, 100) < 0.2
    assert large.decode_seconds(1, 100) > 10 * small.decode_seconds(1, 100)


def test_stalled_steps_do_not_poison() -> None:
    rng = random.Random(2)
    model = CostModel()
    teach(model, rng, 150)
    for _ in range(20):
        work = some_work(rng)
        model.observe(work, 60.0)
        teach(model, rng, 10)
    assert worst_error(model, rng) < 0.3


def test_follows_a_slower_machine() -> None:
    rng = random.Random(3)
    model = CostModel()
    teach(model, rng, 150)
    teach(model, rng, 120, factor=3.0)
    assert worst_error(model, rng, factor=3.0) < 0.3


def test_remembers_prompts_over_long_decoding() -> None:
    rng = random.Random(4)
    model = CostModel()
    teach(model, rng, 150)
    before = model.token_seconds, model.pair_seconds
    for i in range(5000):
        work = Work(8, 8 * (100 + i % 500))
        model.observe(work, seconds(work) * rng.uniform(0.95, 1.05))
    assert (model.token_seconds, model.pair_seconds) == before
    # Nothing told it apart what rows and context cost meanwhile; it must still know the usual case, and learn again.
    assert model.decode_seconds(8, 3000) == pytest.approx(seconds(Work(8, 3000)), rel=0.1)
    teach(model, rng, 60)
    assert worst_error(model, rng) < 0.3


def test_coefficients_stay_positive() -> None:
    rng = random.Random(5)
    model = CostModel()
    for _ in range(500):
        model.observe(some_work(rng), 0.0)
    assert model.token_seconds > 0
    assert model.pair_seconds > 0
    assert model.decode_seconds(0, 0) > 0


def test_fit_needs_matching_features() -> None:
    with pytest.raises(ValueError, match="zip"):
        Fit([1.0, 1.0], (0.1, 0.1)).predict((1.0,))


# ---- the purse ----


def taught() -> CostModel:
    model = CostModel()
    teach(model, random.Random(6), 200)
    return model


def test_purse_beside_decodes_stays_below_the_slowdown() -> None:
    model = taught()
    budget = Budget(512, target=0.1, cost=model)
    for rows, context, start in [(1, 50, 0), (8, 4000, 0), (8, 4000, 5000), (32, 60_000, 2000)]:
        purse = budget.purse(rows, context)
        count = max(purse.afford(start), 1)
        alone = model.decode_seconds(rows, context)
        whole = model.seconds(Work(rows, context, count, count * (start + count / 2), start))
        allowed = min(2.2 * alone, max(0.1, 2.0 * alone))
        assert whole <= allowed * 1.001 or count == 1
        assert whole + model.token_seconds + model.pair_seconds * (start + count) > allowed


def test_more_prompts_than_streams_make_a_step_longer() -> None:
    model = taught()
    budget = Budget(512, target=0.1, cost=model)
    alone = model.decode_seconds(8, 4000)

    def whole(prompts: int) -> float:
        count = budget.purse(8, 4000, prompts).afford(0)
        return model.seconds(Work(8, 4000, count, count * count / 2))

    usual = whole(1)
    assert usual == whole(3) <= 2.2 * alone
    assert whole(6) == pytest.approx(2.5 * usual, rel=0.1)
    assert whole(9) == whole(500) == pytest.approx(4 * usual, rel=0.1)


def test_purse_alone_fills_the_target() -> None:
    model = taught()
    count = Budget(512, target=0.5, cost=model).purse(0, 0).afford(0)
    assert model.seconds(Work(0, 0, count, count * count / 2)) == pytest.approx(0.5, rel=0.05)
    # A model whose every step exceeds the target still gets on.
    assert Budget(512, target=0.001, cost=model).purse(0, 0).afford(0) >= 3


def test_purse_pays_in_parts_what_it_pays_at_once() -> None:
    model = taught()
    budget = Budget(512, target=0.5, cost=model)
    whole = budget.purse(0, 0).afford(100)
    purse = budget.purse(0, 0)
    at = 100
    for part in range(whole // 7):
        purse.spend(at, 7, begun=part > 0)
        at += 7
    assert abs(at - 100 + purse.afford(at, begun=True) - whole) <= 1


def test_purse_in_tokens() -> None:
    purse = Budget(64).purse(10, 999)
    assert purse.tokens == purse.afford(123_456) == 54
    assert purse.afford(0, 0.5) == 27
    purse.spend(0, 50)
    assert purse.afford(0) == 4
    assert Budget(8).purse(8, 0).tokens == 0
    assert Budget(8).purse(9, 0).min_chunk == 0


def test_what_no_step_tells_apart_keeps_its_ratio() -> None:
    """One stream on a machine ten times as fast: that a step is short says nothing of what a second row costs."""
    model = CostModel()
    ratio = model.row_seconds / model.decode_seconds(1, 100)
    for _ in range(50):
        model.observe(Work(1, 100), 0.003)
    assert model.decode_seconds(1, 100) == pytest.approx(0.003, rel=0.01)
    assert model.row_seconds / model.decode_seconds(1, 100) == pytest.approx(ratio, rel=0.05)
