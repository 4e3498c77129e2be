"""When requests are sent in an open loop: a schedule that does not wait for answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True, slots=True)
class RampUp:
    """Requests per second grow from the first request to the last."""

    strategy: Literal["linear", "exponential"]
    start: float
    end: float


def send_offsets(
    count: int, rate: float, burstiness: float, generator: np.random.Generator, ramp_up: RampUp | None = None
) -> list[float]:
    """Seconds from the start at which each request is due, in order.

    Gaps are gamma distributed with shape `burstiness` and mean 1 / rate: 1 is a Poisson process, smaller is burstier,
    larger more even. An infinite rate sends all at once. Without a ramp the gaps are scaled so that the last request is
    due at count / rate: the rate of a short run would else be off by 1 / sqrt(count).
    """
    if ramp_up is not None:
        share = np.arange(count) / max(count - 1, 1)
        if ramp_up.strategy == "linear":
            rates = ramp_up.start + (ramp_up.end - ramp_up.start) * share
        else:
            rates = ramp_up.start * (ramp_up.end / ramp_up.start) ** share
    elif np.isinf(rate):
        return [0.0] * count
    else:
        rates = np.full(count, rate)
    gaps = generator.gamma(burstiness, 1 / burstiness, count) / rates
    offsets = np.cumsum(gaps)
    if ramp_up is None and count:
        offsets *= count / rate / offsets[-1]
    result: list[float] = offsets.tolist()
    return result
