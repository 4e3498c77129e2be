"""Figures computed by hand."""

from __future__ import annotations

import pytest

from loadtest.outcome import Failure, Outcome
from loadtest.report import Spread, result, summarise, table

# Due at 0, sent late. TTFT 1.0, gaps 0.5 and 1.0, TPOT 1.5 / 4, E2EL 2.5.
SLOW = Outcome(0.0, 0.1, 10, output_tokens=5, cached_tokens=4, counted=True, arrivals=[1.0, 1.5, 2.5], end=2.5)
# One token: no TPOT, no gap. TTFT and E2EL 0.2.
SHORT = Outcome(1.0, 1.0, 20, output_tokens=1, counted=True, arrivals=[1.2], end=1.2)
FAILED = [
    Outcome(2.0, 2.0, 30, end=2.1, failure=Failure("HTTP 429", "busy")),
    Outcome(2.0, 2.0, 30, end=2.2, failure=Failure("connection", "refused")),
    Outcome(2.0, 2.0, 30, end=2.3, failure=Failure("HTTP 429", "still busy")),
]
ALL = [SLOW, FAILED[0], SHORT, *FAILED[1:]]
METRICS = ["ttft", "tpot", "itl", "e2el"]


def test_summary() -> None:
    summary = summarise(ALL, 4.0, [50.0, 99.0], {})
    assert (summary.completed, summary.failed) == (2, 3)
    assert (summary.input_tokens, summary.cached_tokens, summary.output_tokens) == (30, 4, 6)
    assert summary.uncounted == 0
    assert summary.goodput is None
    assert summary.failures == [("HTTP 429", 2, "busy"), ("connection", 1, "refused")]
    ttft = summary.spreads["ttft"]
    assert (ttft.mean, ttft.median, ttft.std) == pytest.approx((600, 600, 400))
    assert ttft.percentiles == pytest.approx({50.0: 600, 99.0: 200 + 0.99 * 800})
    assert summary.spreads["tpot"].mean == pytest.approx(1500 / 4)
    assert summary.spreads["itl"].mean == pytest.approx(750)
    assert summary.spreads["e2el"].mean == pytest.approx((2500 + 200) / 2)
    # Seconds from 0.1 on: [0.1, 1.1) holds 5/3 of a token, [1.1, 2.1) 5/3 and 1, [2.1, 3.1) 5/3.
    assert summary.peak_tokens == pytest.approx(5 / 3 + 1)
    assert summary.peak_requests == 2


def test_peak_counts_half_open_intervals() -> None:
    """One that starts as another ends is not beside it."""
    chain = [Outcome(t, t, 1, output_tokens=1, arrivals=[t + 1], end=t + 1.0) for t in (0.0, 1.0, 2.0)]
    assert summarise(chain, 3.0, [], {}).peak_requests == 1


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 1000}, 2),
        ({"ttft": 999}, 1),
        ({"tpot": 375}, 2),
        ({"tpot": 374}, 1),
        ({"e2el": 2500, "ttft": 500}, 1),
        ({"e2el": 100}, 0),
    ],
)
def test_goodput(limits: dict[str, float], good: int) -> None:
    assert summarise(ALL, 4.0, [99.0], limits).goodput == good / 4


def test_nothing_measured_is_zero() -> None:
    summary = summarise(FAILED, 1.0, [99.0], {"ttft": 10})
    assert (summary.completed, summary.peak_tokens, summary.peak_requests, summary.goodput) == (0, 0, 0, 0)
    assert summary.spreads["itl"] == Spread(0, 0, 0, {99.0: 0})
    assert "Successful requests:                     0" in table(summary, METRICS)


def test_table() -> None:
    summary = summarise(ALL, 4.0, [50.0, 99.9], {"ttft": 500})
    lines = table(summary, ["ttft", "itl"], rate=2.0, concurrency=8).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    figures = {line[:40].strip(): line[40:].strip() for line in lines if ":" in line[:41]}
    assert figures == {
        "Successful requests:": "2",
        "Failed requests:": "3",
        "Maximum request concurrency:": "8",
        "Request rate configured (RPS):": "2.00",
        "Benchmark duration (s):": "4.00",
        "Total input tokens:": "30",
        "Input tokens from the server's cache:": "4",
        "Total generated tokens:": "6",
        "Request throughput (req/s):": "0.50",
        "Request goodput (req/s):": "0.25",
        "Output token throughput (tok/s):": "1.50",
        "Peak output token throughput (tok/s):": "2.67",
        "Peak concurrent requests:": "2",
        "Total token throughput (tok/s):": "9.00",
        "Mean TTFT (ms):": "600.00",
        "Median TTFT (ms):": "600.00",
        "P50 TTFT (ms):": "600.00",
        "P99.9 TTFT (ms):": "999.20",
        "Mean ITL (ms):": "750.00",
        "Median ITL (ms):": "750.00",
        "P50 ITL (ms):": "750.00",
        "P99.9 ITL (ms):": "999.50",
        "2 failed: HTTP 429, the first: busy": "",
        "1 failed: connection, the first: refused": "",
    }
    assert "---------------Time to First Token----------------" in lines


def test_json_keys() -> None:
    """Those that readers of `vllm bench serve` look for."""
    summary = summarise(ALL, 4.0, [99.0], {"ttft": 500})
    brief = result(summary, ALL, METRICS, detailed=False)
    rates = {"request_throughput", "request_goodput", "output_throughput", "total_token_throughput"}
    totals = {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens"}
    spreads = {f"{kind}_{metric}_ms" for kind in ("mean", "median", "std", "p99") for metric in METRICS}
    peaks = {"max_output_tokens_per_s", "max_concurrent_requests"}
    assert brief.keys() == rates | totals | spreads | peaks | {"total_cached_tokens"}
    assert (brief["output_throughput"], brief["request_goodput"], brief["completed"]) == (1.5, 0.25, 2)
    detailed = result(summary, ALL, METRICS, detailed=True)
    assert detailed["input_lens"] == [10, 30, 20, 30, 30]
    assert detailed["output_lens"] == [5, 0, 1, 0, 0]
    assert detailed["ttfts"] == pytest.approx([1.0, 0, 0.2, 0, 0])
    assert detailed["itls"] == [[0.5, 1.0], [], [], [], []]
    assert detailed["queue_times"] == pytest.approx([0.1, 0, 0, 0, 0])
    assert detailed["errors"] == ["", "HTTP 429: busy", "", "connection: refused", "HTTP 429: still busy"]


def test_answers_without_usage_are_mentioned() -> None:
    chunks = Outcome(0.0, 0.0, 1, output_tokens=2, arrivals=[1.0, 2.0], end=2.0)
    assert "1 answers came without usage" in table(summarise([chunks], 2.0, [99.0], {}), METRICS)
