"""Schedules: exact rate, right variance, ramps."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.arrivals import RampUp, send_offsets


def gaps(count: int, rate: float, burstiness: float, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.diff([0.0, *send_offsets(count, rate, burstiness, np.random.default_rng(seed))])


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma(burstiness: float) -> None:
    """Mean 1 / rate exactly; the variance is the mean squared over burstiness, within what 20,000 gaps allow."""
    values = gaps(20_000, 8.0, burstiness)
    assert values.min() >= 0
    assert values.mean() == pytest.approx(1 / 8)
    assert values.std() / values.mean() == pytest.approx(burstiness**-0.5, rel=0.06)


def test_poisson() -> None:
    """Exponential gaps: chi-square over ten equally likely cells, 9 degrees of freedom."""
    values = gaps(10_000, 3.0, 1.0)
    cells = np.floor((1 - np.exp(-3.0 * values)) * 10).clip(0, 9)
    counts = np.bincount(cells.astype(int), minlength=10)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 9 + 6 * 18**0.5


def test_short_runs_keep_the_rate() -> None:
    for seed in range(20):
        offsets = send_offsets(10, 5.0, 1.0, np.random.default_rng(seed))
        assert offsets[-1] == pytest.approx(2.0)
        assert offsets == sorted(offsets)


def test_infinite_rate_and_seeds() -> None:
    assert send_offsets(3, float("inf"), 1.0, np.random.default_rng(0)) == [0, 0, 0]
    assert send_offsets(0, 5.0, 1.0, np.random.default_rng(0)) == []
    assert gaps(50, 2.0, 1.0, seed=1).tolist() == gaps(50, 2.0, 1.0, seed=1).tolist()
    assert gaps(50, 2.0, 1.0, seed=1).tolist() != gaps(50, 2.0, 1.0, seed=2).tolist()


def test_ramps() -> None:
    """Even gaps show the rate: it goes from 1 to 9, halfway through at 5 or at 3."""
    for strategy, middle in (("linear", 5.0), ("exponential", 3.0)):
        ramp = RampUp(strategy, 1.0, 9.0)  # type: ignore[arg-type]
        offsets = send_offsets(1001, float("inf"), 1e9, np.random.default_rng(0), ramp)
        rates = 1 / np.diff([0.0, *offsets])
        assert rates[[0, 500, 1000]] == pytest.approx([1, middle, 9], rel=1e-3)
