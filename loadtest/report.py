"""From outcomes to figures: pure functions, with the names and keys of `vllm bench serve`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.outcome import Outcome

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
DEFINITIONS = """\
TTFT: from when a request was due to its first content; an empty chunk that only names the role is none.
ITL:  every gap between two pieces of content of one request; a piece may hold more than one token.
TPOT: (E2EL - TTFT) / (output tokens - 1) of each request with two tokens or more.
E2EL: from when a request was due to the end of its stream. Due: sent, in a closed loop; scheduled, in an open one.
Tokens are counted from the server's usage, not from chunks. Goodput: requests within every limit, per second."""
_WIDTH = 50


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one metric over all requests, in milliseconds."""

    mean: float
    median: float
    std: float
    percentiles: dict[float, float]

    @classmethod
    def of(cls, seconds: Sequence[float], percentiles: Sequence[float]) -> Spread:
        """Zeros where nothing was measured. Percentiles interpolate linearly."""
        values = np.array(seconds or [0.0]) * 1000
        cuts = {p: float(np.percentile(values, p)) for p in percentiles}
        return cls(float(values.mean()), float(np.median(values)), float(values.std()), cuts)


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. Rates are per second of `duration`."""

    duration: float
    completed: int
    failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    uncounted: int
    """Completed requests without usage; their tokens were counted from chunks."""
    goodput: float | None
    peak_tokens: float
    """Most output tokens in any second, counted from the first request on."""
    peak_requests: int
    """Most completed requests in flight at one moment."""
    spreads: dict[str, Spread]
    failures: list[tuple[str, int, str]]
    """(kind, how many, the first one's message), commonest first."""


def summarise(
    outcomes: Sequence[Outcome], duration: float, percentiles: Sequence[float], goodput: Mapping[str, float]
) -> Summary:
    """goodput: limits in milliseconds by metric (ttft, tpot, e2el); empty: none asked for."""
    good = [o for o in outcomes if o.failure is None]
    values = {
        "ttft": [o.ttft for o in good],
        "tpot": [tpot for o in good if (tpot := o.tpot) is not None],
        "itl": [gap for o in good for gap in o.itls],
        "e2el": [o.e2el for o in good],
    }
    return Summary(
        duration=duration,
        completed=len(good),
        failed=len(outcomes) - len(good),
        input_tokens=sum(o.input_tokens for o in good),
        cached_tokens=sum(o.cached_tokens for o in good),
        output_tokens=sum(o.output_tokens for o in good),
        uncounted=sum(not o.counted for o in good),
        goodput=sum(_within(o, goodput) for o in good) / duration if goodput else None,
        peak_tokens=_peak_tokens(good),
        peak_requests=_peak_requests(good),
        spreads={name: Spread.of(seconds, percentiles) for name, seconds in values.items()},
        failures=_failures(outcomes),
    )


def _within(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    reached = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.e2el}
    return all(reached[name] * 1000 <= limit for name, limit in limits.items())


def _peak_tokens(good: Sequence[Outcome]) -> float:
    """A request's tokens are spread evenly over its pieces of content."""
    if not good:
        return 0.0
    start = min(o.sent for o in good)
    seconds = [int(at - start) for o in good for at in o.arrivals]
    weights = [o.output_tokens / len(o.arrivals) for o in good for _ in o.arrivals]
    return float(np.bincount(seconds, weights).max()) if seconds else 0.0


def _peak_requests(good: Sequence[Outcome]) -> int:
    # An end sorts before a start at the same moment: [sent, end) is half open.
    moments = sorted([(o.sent, 1) for o in good] + [(o.end, -1) for o in good])
    return int(np.cumsum([step for _, step in moments]).max()) if moments else 0


def _failures(outcomes: Sequence[Outcome]) -> list[tuple[str, int, str]]:
    found = [o.failure for o in outcomes if o.failure is not None]
    first = {failure.kind: failure.message for failure in reversed(found)}
    return [(kind, count, first[kind]) for kind, count in Counter(f.kind for f in found).most_common()]


def table(summary: Summary, metrics: Sequence[str], rate: float = float("inf"), concurrency: int | None = None) -> str:
    """The table of `vllm bench serve`."""
    s, seconds = summary, summary.duration
    lines = [
        f"{' Serving Benchmark Result ':=^{_WIDTH}}",
        row("Successful requests:", s.completed),
        row("Failed requests:", s.failed),
    ]
    if concurrency is not None:
        lines.append(row("Maximum request concurrency:", concurrency))
    if rate != float("inf"):
        lines.append(row("Request rate configured (RPS):", float(rate)))
    lines += [row("Benchmark duration (s):", seconds), row("Total input tokens:", s.input_tokens)]
    if s.cached_tokens:
        lines.append(row("Input tokens from the server's cache:", s.cached_tokens))
    lines += [
        row("Total generated tokens:", s.output_tokens),
        row("Request throughput (req/s):", s.completed / seconds),
    ]
    if s.goodput is not None:
        lines.append(row("Request goodput (req/s):", s.goodput))
    lines += [
        row("Output token throughput (tok/s):", s.output_tokens / seconds),
        row("Peak output token throughput (tok/s):", s.peak_tokens),
        row("Peak concurrent requests:", s.peak_requests),
        row("Total token throughput (tok/s):", (s.input_tokens + s.output_tokens) / seconds),
    ]
    for name in metrics:
        short, long = METRICS[name]
        spread = s.spreads[name]
        lines += [
            f"{long:-^{_WIDTH}}",
            row(f"Mean {short} (ms):", spread.mean),
            row(f"Median {short} (ms):", spread.median),
            *(row(f"P{p:g} {short} (ms):", value) for p, value in spread.percentiles.items()),
        ]
    lines.append("=" * _WIDTH)
    if s.uncounted:
        lines.append(f"{s.uncounted} answers came without usage: their tokens are counted from chunks.")
    lines += [f"{count} failed: {kind}, the first: {message}" for kind, count, message in s.failures]
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def row(name: str, value: float) -> str:
    """One line of a table: whole numbers as they are, others with two digits."""
    return f"{name:<40} {value:<10}" if isinstance(value, int) else f"{name:<40} {value:<10.2f}"


def result(summary: Summary, outcomes: Sequence[Outcome], metrics: Sequence[str], detailed: bool) -> dict[str, object]:
    """The JSON of `vllm bench serve`. detailed: with one entry per request (times in seconds)."""
    s = summary
    fields: dict[str, object] = {
        "duration": s.duration,
        "completed": s.completed,
        "failed": s.failed,
        "total_input_tokens": s.input_tokens,
        "total_cached_tokens": s.cached_tokens,
        "total_output_tokens": s.output_tokens,
        "request_throughput": s.completed / s.duration,
        "request_goodput": s.goodput,
        "output_throughput": s.output_tokens / s.duration,
        "total_token_throughput": (s.input_tokens + s.output_tokens) / s.duration,
        "max_output_tokens_per_s": s.peak_tokens,
        "max_concurrent_requests": s.peak_requests,
    }
    for name in metrics:
        spread = s.spreads[name]
        fields |= {f"mean_{name}_ms": spread.mean, f"median_{name}_ms": spread.median, f"std_{name}_ms": spread.std}
        fields |= {f"p{p:g}_{name}_ms": value for p, value in spread.percentiles.items()}
    if detailed:
        fields |= {
            "input_lens": [o.input_tokens for o in outcomes],
            "output_lens": [o.output_tokens for o in outcomes],
            "ttfts": [0.0 if o.failure else o.ttft for o in outcomes],
            "itls": [o.itls for o in outcomes],
            "latencies": [0.0 if o.failure else o.e2el for o in outcomes],
            "start_times": [o.sent for o in outcomes],
            "queue_times": [o.sent - o.scheduled for o in outcomes],
            "errors": ["" if o.failure is None else f"{o.failure.kind}: {o.failure.message}" for o in outcomes],
        }
    return fields
