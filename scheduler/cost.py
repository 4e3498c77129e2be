"""What a step costs on a CPU, learned from the steps that ran.

    seconds ≈ a + b · decode rows + e · context tokens read by them        fitted on steps that only decode
            + c · prefill tokens + d · (prefill tokens · their context)    fitted on what is left of the others
            + f · context tokens read by the prompts' rows

Two small least-squares fits with exponential forgetting, each fed only by the steps that say something about it: a
long time without prompts must not make it forget what prompts cost. Each has a pace, which all its coefficients share
and which follows the machine within a dozen steps, and a shape, the ratios of its coefficients, which remembers a
hundred: contexts grow by one token a step, and a slope taken from a dozen noisy steps may be ten times too steep. What
steps hardly tell apart is pulled to the ratios of the first guess (Tikhonov's regularisation), and no coefficient is
negative (projected Gauss-Seidel on the normal equations). Errors are relative to the geometric mean of what was
expected and what was measured, so a step that stalled for a minute moves little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from operator import mul

PACE_FORGETTING, SHAPE_FORGETTING = 0.93, 0.99
"""Weight of a step after the next one: some fourteen steps count, and some hundred."""
TRUST = 0.05
"""How much the first guess of a coefficient counts, in units of what the steps say about it alone."""
DISTRUST = 0.003
"""The same, of those that steps tell apart: they come with few rows and with many."""
SWEEPS = 4
FLOOR = 1e-3
"""A coefficient stays above this share of its prior: a free prompt token would ask for endless chunks."""
TRUSTED = 8
"""Steps without a prompt, before what decoding costs is known well enough to be subtracted."""
MAX_RATIO = 10.0
"""Expectations that are further off say nothing about how much a step should count."""
SHORTEST = 1e-5
"""Seconds; a step that took less is taken for one that took so much."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one step computes."""

    rows: int = 0
    """Tokens of rows that decode: one each, and their drafts."""
    context: int = 0
    """Tokens in the pool that those rows read."""
    prefill: int = 0
    """Tokens of longer rows."""
    product: float = 0.0
    """Σ over those tokens of the tokens each one attends to."""
    reach: int = 0
    """Tokens in the pool that the longer rows read, once each, however many tokens of theirs attend to them."""


class Fit:
    """value ≈ pace · shape · features, both ≥ 0."""

    __slots__ = ("_expected", "_gram", "_measured", "_pace", "_prior", "_right", "_shape", "_trust")

    def __init__(self, prior: list[float], trust: tuple[float, ...]) -> None:
        """`prior`: first guess of each coefficient, > 0, and how much it counts."""
        self._pace = 1.0
        self._expected = self._measured = 0.0
        self._prior = prior
        self._trust = trust
        self._shape = prior.copy()
        self._gram = [[0.0] * len(prior) for _ in prior]
        self._right = [0.0] * len(prior)

    @property
    def theta(self) -> list[float]:
        """Value per unit of each feature."""
        return [self._pace * s for s in self._shape]

    def predict(self, features: tuple[float, ...]) -> float:
        return self._pace * _dot(self._shape, features)

    def observe(self, features: tuple[float, ...], value: float, scale: float) -> None:
        """`value` was measured; an error of `scale` > 0 counts as 100 %."""
        x = [f / scale for f in features]
        shape = self._shape
        expected, measured = _dot(shape, x), value / scale
        self._expected = PACE_FORGETTING * self._expected + expected * expected
        self._measured = PACE_FORGETTING * self._measured + expected * measured
        if self._expected > 0:
            self._pace = max(self._measured / self._expected, FLOOR)
        measured /= self._pace
        for i, row in enumerate(self._gram):
            self._right[i] = SHAPE_FORGETTING * self._right[i] + x[i] * measured
            for j, other in enumerate(x):
                row[j] = SHAPE_FORGETTING * row[j] + x[i] * other
        for _ in range(SWEEPS):
            for i, row in enumerate(self._gram):
                weight = row[i]
                if weight > 0:
                    # Not `_dot`: this is the inner loop, and the lengths are the same by construction.
                    missing = self._right[i] - sum(map(mul, row, shape))
                    pull = self._trust[i] * weight * (self._prior[i] - shape[i])
                    step = (missing + pull) / ((1 + self._trust[i]) * weight)
                    shape[i] = max(shape[i] + step, FLOOR * self._prior[i])


class CostModel:
    """Seconds of a step. Coefficients in seconds per unit."""

    __slots__ = ("_decode", "_decoded", "_prefill")

    def __init__(self, weight_bytes: int = 270_000_000) -> None:
        """The first guess takes a machine that reads 10 GB/s and does 60 GFLOP/s, two per 16-bit weight and token;
        attention costs as much as the weights at a context of 4,000."""
        weights = max(weight_bytes, 1_000_000)
        token = weights / 60e9
        self._decode = Fit([weights / 10e9, weights / 100e9, token / 4000], (DISTRUST, DISTRUST, TRUST))
        self._decoded = 0
        """Steps without a prompt that were seen."""
        self._prefill = Fit([token, token / 4000, token / 400], (TRUST, TRUST, TRUST))

    def decode_seconds(self, rows: int, context: int) -> float:
        """A step of `rows` single tokens, which read `context` tokens together. 0 rows: what any step costs."""
        base, row, read = self._decode.theta
        return base + row * rows + read * context

    @property
    def row_seconds(self) -> float:
        """Of one decoding row more, or one token more in such a row; reading the context aside."""
        return self._decode.theta[1]

    @property
    def read_seconds(self) -> float:
        """Of one token more of context that a decoding row reads."""
        return self._decode.theta[2]

    @property
    def token_seconds(self) -> float:
        """Of one prompt token, its attention aside."""
        return self._prefill.theta[0]

    @property
    def pair_seconds(self) -> float:
        """Of one prompt token attending to one token."""
        return self._prefill.theta[1]

    @property
    def reach_seconds(self) -> float:
        """Of reading one token of a prompt's context out of the pool, for a whole chunk."""
        return self._prefill.theta[2]

    def prompt_seconds(self, start: int, count: int) -> float:
        """Of `count` prompt tokens behind `start` others, beside what their steps cost anyway."""
        return self.token_seconds * count + self.pair_seconds * count * (start + count / 2)

    def seconds(self, work: Work) -> float:
        return self.decode_seconds(work.rows, work.context) + self._prefill.predict(_prefill(work))

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from a step that took `seconds` ≥ 0."""
        seconds = max(seconds, SHORTEST)
        decode = (1.0, float(work.rows), float(work.context))
        alone = self._decode.predict(decode)
        whole = self.seconds(work)
        scale = sqrt(seconds * min(max(whole, seconds / MAX_RATIO), seconds * MAX_RATIO))
        if not work.prefill:
            self._decode.observe(decode, seconds, scale)
            self._decoded += 1
            return
        # The prompt's part is what decoding leaves; never next to nothing, for a free prompt would be a huge chunk.
        rest = max(seconds - alone, seconds * (1 - alone / whole) / 4)
        if self._decoded < TRUSTED:
            # Decoding was hardly seen yet: the whole guess was off, so both parts of it were.
            rest = seconds * (1 - alone / whole)
            self._decode.observe(decode, seconds - rest, scale)
        self._prefill.observe(_prefill(work), rest, scale)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum([x * y for x, y in zip(a, b, strict=True)])


def _prefill(work: Work) -> tuple[float, ...]:
    return float(work.prefill), work.product, float(work.reach)
