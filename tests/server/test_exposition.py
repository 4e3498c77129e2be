from __future__ import annotations

import shutil
import subprocess
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from model.tokenizer import Tokenizer
from server.metrics import Histogram, one_two_five
from tests.server.running import CHAT, COMPLETIONS, Running, running

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")

DASHBOARD = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_preemptions_total"),
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:cache_config_info"),
    *("vllm:e2e_request_latency_seconds_bucket", "vllm:inter_token_latency_seconds_bucket"),
    *("vllm:request_time_per_output_token_seconds_bucket", "vllm:time_to_first_token_seconds_bucket"),
    *("vllm:request_decode_time_seconds_sum", "vllm:request_prefill_time_seconds_sum"),
    *("vllm:request_queue_time_seconds_sum", "vllm:request_prompt_tokens_bucket"),
    *("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total"),
    "vllm:spec_decode_num_accepted_tokens_total",
    *("vllm:request_generation_tokens_bucket", "vllm:iteration_tokens_total_count"),
)


def series(text: str) -> list[str]:
    return [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]


@needs_promtool
def test_promtool_has_nothing_to_say(server: Running) -> None:
    server.complete(n=2)
    server.stream(COMPLETIONS, prompt="x", max_tokens=3)
    text = server.client.get("/metrics").text
    clean = "".join(line + "\n" for line in text.splitlines() if "vllm:" not in line)
    check = subprocess.run(["promtool", "check", "metrics"], input=clean, capture_output=True, text=True, check=False)
    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")
    assert list(text_string_to_metric_families(text))


def test_what_dashboards_read_is_there(server: Running) -> None:
    server.complete()
    text = server.client.get("/metrics").text
    names = {one.partition("{")[0] for one in series(text)}
    assert set(DASHBOARD) <= names
    for reason in ("stop", "length", "abort", "error"):
        assert server.metric("vllm:request_success_total", finished_reason=reason) >= 0
    for line in series(text):
        if line.startswith("vllm:") and "admission_rejections" not in line:
            assert 'model_name="owner/fake"' in line
            assert 'engine="0"' in line
    assert 'block_size="16"' in next(line for line in series(text) if line.startswith("vllm:cache_config_info"))
    figures = [server.metric(f"octavo_kv_{name}") for name in ("divergence_nats", "agreement_ratio")]
    assert figures == [0.03125, 0.875]
    assert {"process_resident_memory_bytes", "process_start_time_seconds", "octavo_build_info"} <= names


def test_without_aliases(smol: Tokenizer) -> None:
    with running(smol, metrics_alias="none") as server:
        assert "vllm" not in server.client.get("/metrics").text


def test_strange_names_make_no_new_series(server: Running) -> None:
    def strange(number: int) -> None:
        server.chat(model=f"m{number}", user=f"u{number}")
        server.chat(user=f"u{number}", max_tokens=1)
        server.client.get(f"/v1/{number}")
        server.client.get(f"/{number}/x")
        server.client.request(f"M{number}", "/v1/models")

    strange(0)
    before = Counter(series(server.client.get("/metrics").text))
    for number in range(1, 6):
        strange(number)
    assert Counter(series(server.client.get("/metrics").text)) == before


def test_counters_of_requests(server: Running) -> None:
    ended = server.metric("octavo_requests_total")
    queries = {
        "octavo_generation_tokens_total": 4 * 2 + 6,
        "vllm:generation_tokens_total": 4 * 2 + 6,
        "octavo_request_generation_tokens_sum": 4 * 2 + 6,
        "octavo_request_generation_tokens_count": 2,
        "octavo_prompt_tokens_total": 3 + 2,
        "vllm:request_prompt_tokens_sum": 3 + 2,
        "octavo_request_latency_seconds_count": 2,
        "octavo_time_to_first_token_seconds_count": 2,
        "octavo_queue_time_seconds_count": 2,
        "octavo_request_choices_sum": 3,
    }
    before = {name: server.metric(name) for name in queries}
    server.complete(prompt=[5, 6, 7], n=2)
    server.stream(COMPLETIONS, prompt=[5, 6], max_tokens=6)
    server.wait(lambda: server.metric("octavo_requests_total") == ended + 2)
    assert {name: server.metric(name) - before[name] for name in queries} == queries


def test_running_streams_count_already(server: Running) -> None:
    """The counter moves with the tokens, not with the ends; and with many at once no token counts twice."""
    before = server.metric("octavo_generation_tokens_total")
    server.engine.interval = 0.01
    body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", COMPLETIONS, json=body) as stream:
        lines = stream.iter_lines()  # kept: dropping it would close the stream
        assert next(lines)
        server.wait(lambda: server.metric("octavo_generation_tokens_total") > before)
        assert server.metric("octavo_requests_running") == 1
        assert server.metric("octavo_requests_in_flight") == 1
        assert server.metric("octavo_kv_blocks", state="active") > 0
        assert server.metric("vllm:kv_cache_usage_perc") > 0
    server.wait(lambda: server.metric("vllm:kv_cache_usage_perc") == 0)
    server.wait(lambda: server.metric("octavo_requests_in_flight") == 0)
    assert server.metric("octavo_generation_tokens_total") == server.metric("octavo_request_generation_tokens_sum")


def test_http_requests_by_route_and_status(server: Running) -> None:
    route = {"route": CHAT, "method": "POST"}
    before = {status: server.metric("octavo_http_requests_total", status=status, **route) for status in ("200", "400")}
    server.chat()
    server.chat(temperature=-1)
    server.client.get("/health")

    def now() -> dict[str, float]:
        return {status: server.metric("octavo_http_requests_total", status=status, **route) for status in before}

    server.wait(lambda: now() == {status: count + 1 for status, count in before.items()})
    text = server.client.get("/metrics").text
    assert 'route="/health"' not in text
    assert "nope" not in text


def test_openmetrics_when_asked_for(server: Running) -> None:
    reply = server.client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    assert reply.text.endswith("# EOF\n")


def test_buckets() -> None:
    histogram = Histogram((1, 2.5, 5))
    for value in (0.5, 1, 1.1, 2.5, 4, 9):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1, 1]
    assert histogram.total == pytest.approx(18.1)
    assert one_two_five(60) == (1, 2, 5, 10, 20, 50)
