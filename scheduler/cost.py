"""What a step costs on a CPU, learned from the steps that ran.

    seconds ≈ a + b · decode rows + e · context tokens read by them        fitted on steps that only decode
            + c · prefill tokens + d · (prefill tokens · their context)    fitted on what is left of the others

Two small recursive least-squares filters (Haykin, Adaptive Filter Theory, ch. 9) with exponential forgetting, each fed
only by the steps that say something about it: a long time without prompts must not make it forget what prompts cost.
Errors are relative (a step's noise grows with its length) and clipped at three deviations, so that one stalled step
moves the estimate by little more than an ordinary one, while a machine that stays slower is followed in about twenty.
"""

from __future__ import annotations

from dataclasses import dataclass

FORGETTING = 0.98
NOISE = 0.02
"""Variance of a step's relative error, as the filter assumes it."""
CLIP = 3.0
MIN_DEVIATION = 0.05
PRIOR_VARIANCE = 4.0
"""Of each coefficient, in units of its prior: we know its order of magnitude."""
MAX_VARIANCE = 16.0
FLOOR = 1e-3
"""A coefficient stays above this share of its prior: a free prompt token would ask for endless chunks."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one step computes."""

    rows: int = 0
    """Rows of one token."""
    context: int = 0
    """Tokens in the pool that those rows read."""
    prefill: int = 0
    """Tokens of longer rows."""
    product: float = 0.0
    """Σ over those tokens of the tokens each one attends to."""


class Filter:
    """Recursive least squares with forgetting over coefficients that are never negative."""

    __slots__ = ("_cov", "_deviation", "_prior", "theta")

    def __init__(self, prior: list[float]) -> None:
        """`prior`: first guess of each coefficient, > 0."""
        self.theta = prior.copy()
        self._prior = prior
        size = range(len(prior))
        self._cov = [[PRIOR_VARIANCE * prior[i] ** 2 if i == j else 0.0 for j in size] for i in size]
        self._deviation = 1.0

    def predict(self, features: tuple[float, ...]) -> float:
        return sum(t * x for t, x in zip(self.theta, features, strict=True))

    def observe(self, features: tuple[float, ...], value: float, scale: float) -> None:
        """`value` was measured where predict(features) was expected; `scale` > 0: what an error of 100 % is."""
        x = [f / scale for f in features]
        size = range(len(x))
        gain = [sum(row[j] * x[j] for j in size) for row in self._cov]
        spread = FORGETTING * NOISE + sum(x[i] * gain[i] for i in size)
        error = (value - self.predict(features)) / scale
        bound = CLIP * self._deviation
        self._deviation = max(MIN_DEVIATION, 0.9 * self._deviation + 0.1 * min(abs(error), 4 * self._deviation))
        error = min(max(error, -bound), bound)
        # Windup: directions that no step excites would grow without end.
        excess = sum(self._cov[i][i] / self._prior[i] ** 2 for i in size) / (MAX_VARIANCE * len(x))
        memory = FORGETTING if excess < 1 else 1.0
        for i in size:
            self.theta[i] = max(self.theta[i] + gain[i] / spread * error, FLOOR * self._prior[i])
            row = self._cov[i]
            for j in size:
                row[j] = (row[j] - gain[i] * gain[j] / spread) / memory


class CostModel:
    """Seconds of a step. Coefficients in seconds per unit."""

    __slots__ = ("_decode", "_prefill", "samples")

    def __init__(self, weight_bytes: int = 270_000_000) -> None:
        """The first guess takes a machine that reads 10 GB/s and does 60 GFLOP/s, two per 16-bit weight and token;
        attention costs as much as the weights at a context of 4,000."""
        weights = max(weight_bytes, 1_000_000)
        token = weights / 60e9
        self._decode = Filter([weights / 10e9, weights / 100e9, token / 4000])
        self._prefill = Filter([token, token / 4000])
        self.samples = 0

    def decode_seconds(self, rows: int, context: int) -> float:
        """A step of `rows` single tokens, which read `context` tokens together. 0 rows: what any step costs."""
        base, row, read = self._decode.theta
        return base + row * rows + read * context

    @property
    def token_seconds(self) -> float:
        """Of one prompt token, its attention aside."""
        return self._prefill.theta[0]

    @property
    def pair_seconds(self) -> float:
        """Of one prompt token attending to one token."""
        return self._prefill.theta[1]

    def seconds(self, work: Work) -> float:
        prefill = self.token_seconds * work.prefill + self.pair_seconds * work.product
        return self.decode_seconds(work.rows, work.context) + prefill

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from a step that took `seconds` ≥ 0."""
        self.samples += 1
        decode = (1.0, float(work.rows), float(work.context))
        expected = self.seconds(work)
        if work.prefill:
            rest = seconds - self._decode.predict(decode)
            self._prefill.observe((float(work.prefill), work.product), rest, expected)
        else:
            self._decode.observe(decode, seconds, expected)
