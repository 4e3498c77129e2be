"""What streams feel of a long prompt: their gaps while it is computed, beside their gaps before it came.

Only a stream that ran from before the long prompt to its first content says something of all of it. Gaps are those
between tokens where the server names them, else between pieces of text: an emoji may take four tokens, and so four
usual gaps, on the quietest machine.

streams   | | | | | | | |  |  |  |  |  |  | | | |
long                     ├─── prefill ───┤
          └─ usual gap ─┘ └─ worst gap ─┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import median

from loadtest.client import clock
from loadtest.outcome import Outcome
from loadtest.report import row
from loadtest.traffic import Send
from loadtest.workloads import Prompt

SETTLE_SECONDS = 5.0
"""From the streams' start to the long prompt: long enough to know their usual gap."""


@dataclass(frozen=True, slots=True)
class Interference:
    """What was found. Seconds; `usual` and `worst` have one entry per stream that was measured."""

    long: Outcome
    streams: int
    """Started."""
    usual: list[float]
    """Median gap before the long prompt."""
    worst: list[float]
    """Longest gap that overlaps the long prompt's prefill."""
    ended: int
    """Streams whose last content came before the long prompt's first: their answers were too short."""
    late: int
    """Streams that had no gap yet when the long prompt was sent."""

    @property
    def ratio(self) -> float:
        """Of the stream that suffers most; infinite where most of its pieces came several at once."""
        return max(worst / usual if usual else inf for worst, usual in zip(self.worst, self.usual, strict=True))

    @property
    def warning(self) -> str | None:
        """Why less than every stream was measured; None where all were."""
        if self.long.failure is not None:
            return "the long prompt failed: nothing is measured"
        measured = len(self.worst)
        reasons = {
            "ended before its first token (raise --random-output-len)": self.ended,
            "had no usual gap yet (lower --max-concurrency or --random-input-len)": self.late,
            "failed": self.streams - measured - self.ended - self.late,
        }
        missing = ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
        return f"{measured} of {self.streams} streams ran beside the long prompt: {missing}" if missing else None

    def lines(self) -> str:
        """For people."""
        lines = [
            row("Streams started:", self.streams),
            row("Streams that ran throughout the prefill:", len(self.worst)),
        ]
        if self.worst:
            lines += [
                row("Usual gap of a stream, median (ms):", median(self.usual) * 1000),
                row("Worst gap beside the long prompt (ms):", max(self.worst) * 1000),
                row("Worst gap / usual gap, worst stream:", self.ratio),
            ]
        if self.long.failure is None:
            lines.append(row("TTFT of the long prompt (ms):", self.long.ttft * 1000))
        return "\n".join([*lines, *([f"WARNING: {self.warning}"] if self.warning else [])])

    def fields(self) -> dict[str, object]:
        """The same for the JSON file (docs/operations.md); null where nothing was measured."""
        fields: dict[str, object] = {
            "streams": self.streams,
            "streams_measured": len(self.worst),
            "streams_ended": self.ended,
            "streams_late": self.late,
            "usual_gap_ms": median(self.usual) * 1000 if self.usual else None,
            "worst_gap_ms": max(self.worst) * 1000 if self.worst else None,
            "worst_gap_ratio": self.ratio if self.worst else None,
            "long_prompt_len": self.long.input_tokens,
            "long_prompt_ttft_ms": self.long.ttft * 1000 if self.long.failure is None else None,
            "warning": self.warning,
        }
        return {f"interference_{name}": value for name, value in fields.items()}


async def interfere(send: Send, streams: Sequence[Prompt], long: Prompt) -> tuple[list[Outcome], Interference]:
    """Start the streams, then the long prompt; all outcomes, the long one last, and what they say."""
    running = [asyncio.ensure_future(send(prompt, clock())) for prompt in streams]
    await asyncio.sleep(SETTLE_SECONDS)
    last = await send(long, clock())
    outcomes = [*await asyncio.gather(*running), last]
    return outcomes, measure(outcomes[:-1], last)


def measure(streams: Sequence[Outcome], long: Outcome) -> Interference:
    """See `interfere`. The first content of each stream is no gap: it ends the stream's own prefill."""
    usual: list[float] = []
    worst: list[float] = []
    if long.failure is not None:
        return Interference(long, len(streams), usual, worst, 0, 0)
    first = long.scheduled + long.ttft
    ended = late = 0
    begun = max((begin for o in streams if o.arrivals and (begin := o.arrivals[0]) < long.sent), default=long.sent)
    for outcome in (o for o in streams if o.failure is None):
        gaps = list(pairwise(outcome.beats or outcome.arrivals))
        before = [b - a for a, b in gaps if begun <= a and b <= long.sent]
        if outcome.arrivals and outcome.arrivals[-1] < first:
            ended += 1
        elif not before:
            late += 1
        else:
            usual.append(median(before))
            worst.append(max(b - a for a, b in gaps if b > long.sent and a < first))
    return Interference(long, len(streams), usual, worst, ended, late)
