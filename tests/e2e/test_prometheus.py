"""A real Prometheus scrapes a real server, and the gauges are right after all clients hung up at once."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.daemon import MODEL, Daemon, free_port

if shutil.which("prometheus") is None and "CI" not in os.environ:
    pytest.skip("prometheus is not installed", allow_module_level=True)


@contextlib.contextmanager
def prometheus(target: str, folder: Path) -> Iterator[httpx.Client]:
    """Prometheus scraping `target` twice a second; yields a client of it."""
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 500ms}\n"
        f"scrape_configs: [{{job_name: octavo, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    listen = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={listen}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with httpx.Client(base_url=f"http://{listen}", timeout=5) as client:
            yield client
    finally:
        process.terminate()
        process.wait(20)


def query(client: httpx.Client, expression: str) -> list[float]:
    """Values of an instant query; empty while Prometheus starts."""
    try:
        reply = client.get("/api/v1/query", params={"query": expression})
    except httpx.TransportError:
        return []
    if reply.status_code != 200:
        return []
    return [float(series["value"][1]) for series in reply.json()["data"]["result"]]


def test_prometheus_scrapes_and_gauges_are_right_after_a_mass_abort(daemon: Daemon, tmp_path: Path) -> None:
    with prometheus(f"127.0.0.1:{daemon.port}", tmp_path) as client:
        daemon.wait(lambda: query(client, 'up{job="octavo"}') == [1.0], 30, "the target is up")
        request = {"model": MODEL, "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        aborts = daemon.metric("octavo_requests_total", ("finish_reason", "abort"))
        with contextlib.ExitStack() as stack:
            users = stack.enter_context(httpx.Client(base_url=daemon.url, timeout=60))
            streams = []
            for _ in range(16):
                stream = stack.enter_context(users.stream("POST", "/v1/completions", json=request))
                streams.append(stream.iter_raw())
                next(streams[-1])
            assert daemon.metric("octavo_requests_running") == 16
            daemon.wait(lambda: query(client, "octavo_requests_running") == [16.0], 10, "Prometheus sees 16 running")
        daemon.wait(daemon.at_rest, 1, "blocks freed")
        assert daemon.metric("octavo_requests_total", ("finish_reason", "abort")) == aborts + 16
        assert daemon.metric("octavo_kv_usage_ratio") == 0
        assert daemon.metric("vllm:kv_cache_usage_perc") == 0
        assert daemon.metric("vllm:num_requests_running") == daemon.metric("vllm:num_requests_waiting") == 0
        daemon.wait(
            lambda: query(client, "sum(octavo_requests_running + octavo_requests_waiting)") == [0.0], 10, "seen idle"
        )
        assert query(client, "rate(octavo_generation_tokens_total[1m])")[0] > 0


def test_promtool_accepts_the_clean_names(daemon: Daemon) -> None:
    text = httpx.get(f"{daemon.url}/metrics").text
    kept: list[str] = []
    for line in text.splitlines():
        name = line.split()[2] if line.startswith("#") else line
        if not name.startswith("vllm:"):
            kept.append(line)
    done = subprocess.run(
        ["promtool", "check", "metrics"], input="\n".join(kept) + "\n", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr.strip()
