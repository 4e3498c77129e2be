"""What streams feel of a long prompt: their gaps while it is computed, beside their gaps before it came.

streams   | | | | | | | |  |  |  |  |  |  | | | |
long                     ├─── prefill ───┤
          └─ usual gap ─┘ └─ worst gap ─┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from loadtest.client import clock
from loadtest.outcome import Outcome
from loadtest.report import row
from loadtest.traffic import Send
from loadtest.workloads import Prompt

SETTLE_SECONDS = 5.0
"""From the streams' first content to the long prompt: long enough to know their usual gap."""


@dataclass(frozen=True, slots=True)
class Interference:
    """Seconds; one entry per stream."""

    usual: list[float]
    """Median gap before the long prompt."""
    worst: list[float]
    """Longest gap that overlaps the long prompt's prefill."""
    long: Outcome

    @property
    def ratio(self) -> float:
        """Of the stream that suffers most."""
        return max(worst / usual for worst, usual in zip(self.worst, self.usual, strict=True))

    def lines(self) -> str:
        gaps = [
            row("Usual gap of a stream, median (ms)", median(self.usual) * 1000),
            row("Worst gap beside the long prompt (ms)", max(self.worst) * 1000),
            row("Worst gap / usual gap, worst stream", self.ratio),
        ]
        return "\n".join([*gaps, row("TTFT of the long prompt (s)", self.long.ttft)])


async def interfere(send: Send, streams: Sequence[Prompt], long: Prompt) -> tuple[list[Outcome], Interference | None]:
    """Start the streams, then the long prompt; all outcomes, the long one last, and what they say.

    None where a request failed, or a stream ended before the long prompt's first content: its answer was too short.
    """
    running = [asyncio.ensure_future(send(prompt, clock())) for prompt in streams]
    await asyncio.sleep(SETTLE_SECONDS)
    sent = clock()
    last = await send(long, sent)
    outcomes = [*await asyncio.gather(*running), last]
    return outcomes, measure(outcomes[:-1], last)


def measure(streams: Sequence[Outcome], long: Outcome) -> Interference | None:
    """See `interfere`. The first content of each stream is no gap: it ends the stream's own prefill."""
    if long.failure is not None or not long.arrivals:
        return None
    begun = max((outcome.arrivals[0] for outcome in streams if outcome.arrivals), default=long.sent)
    first = long.arrivals[0]
    usual: list[float] = []
    worst: list[float] = []
    for outcome in streams:
        gaps = list(pairwise(outcome.arrivals))
        before = [b - a for a, b in gaps if begun <= a and b <= long.sent]
        during = [b - a for a, b in gaps if b > long.sent and a < first]
        if outcome.failure is not None or not before or not during or outcome.arrivals[-1] < first:
            return None
        usual.append(median(before))
        worst.append(max(during))
    return Interference(usual, worst, long)
