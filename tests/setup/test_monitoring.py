"""Prometheus' own tools read the configuration, the alerts and every expression of the dashboard."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.admission import Admission
from server.engine_client import EngineClient
from server.exposition import make_registry
from server.metrics import Metrics
from server.service import Service
from server.settings import Settings
from tests.setup.conftest import Tool

# What Grafana puts in the place of its variables.
VARIABLES = {"$__rate_interval": "1m", "$job": "octavo", "$instance": ".*"}
METRIC = re.compile(r"\b((?:octavo|process|vllm)[_:][a-z_:]+)\b")


@pytest.fixture(scope="module")
def dashboard(root: Path) -> dict[str, Any]:
    path = root / "docs" / "monitoring" / "grafana" / "dashboards" / "octavo.json"
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


@pytest.fixture(scope="module")
def expressions(dashboard: dict[str, Any]) -> dict[str, str]:
    """By panel and series, as Prometheus would get them."""
    found = {}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for variable, value in VARIABLES.items():
                expression = expression.replace(variable, value)
            found[f"{panel['title']}: {target['refId']}"] = expression
    assert len(found) > 40
    return found


@pytest.fixture
async def served_names() -> set[str]:
    """Every name that a server's /metrics has from its start."""
    client = EngineClient()
    service = Service(Settings(), client, Admission(1, 1, 1, lambda: 0), Metrics(), ("m",))
    names = {sample.name for family in make_registry(service).collect() for sample in family.samples}
    client.ready.cancel()
    return names | {"octavo_http_requests_total"}  # exists from the first request on, and a scrape is one


def parse(promtool: Tool, folder: Path, expressions: dict[str, str]) -> str:
    """promtool's complaints about the expressions, each as a recording rule."""
    rules = [{"record": f"check:{number}", "expr": text} for number, text in enumerate(expressions.values())]
    path = folder / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = promtool("check", "rules", str(path))
    return "" if checked.returncode == 0 else checked.stdout + checked.stderr


def test_prometheus_accepts_its_configuration(promtool: Tool) -> None:
    checked = promtool("check", "config", "docs/monitoring/prometheus.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "6 rules found" in checked.stdout


def test_every_expression_parses(promtool: Tool, tmp_path: Path, expressions: dict[str, str]) -> None:
    assert parse(promtool, tmp_path, expressions) == ""
    assert "parse error" in parse(promtool, tmp_path, {"broken": "rate(octavo_steps_total[1m)"})


def test_every_metric_is_served(root: Path, expressions: dict[str, str], served_names: set[str]) -> None:
    alerts = (root / "docs" / "monitoring" / "alerts.yml").read_text()
    texts = [*expressions.values(), *re.findall(r"expr: (.*)", alerts)]
    used = {name for text in texts for name in METRIC.findall(text)}
    assert len(used) > 20
    assert used - served_names == set()


def test_documented_metrics_are_those_served(root: Path, served_names: set[str]) -> None:
    """The table in docs/operations.md; histograms and counters by their name without a suffix."""
    text = (root / "docs" / "operations.md").read_text()
    documented = set(re.findall(r"`(octavo_[a-z_]+)`", text))
    stems = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in served_names if name.startswith("octavo_")}
    late = {"octavo_model_info", "octavo_model_weight_bytes", "octavo_kv_pool_bytes", "octavo_model_load_seconds"}
    late |= {"octavo_kv_divergence_nats", "octavo_kv_agreement_ratio"}
    assert {re.sub(r"_total$", "", name) for name in documented} == stems | late


def test_panels_have_places_of_their_own(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["title"], *(panel["gridPos"][side] for side in "xywh")) for panel in panels]
    for (one, x, y, w, h), (two, x2, y2, w2, h2) in combinations(places, 2):
        assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y, f"{one} covers {two}"
    assert all(x + w <= 24 for _, x, _, w, _ in places)


def test_grafana_finds_source_and_dashboards(root: Path, dashboard: dict[str, Any]) -> None:
    provisioning = root / "docs" / "monitoring" / "grafana" / "provisioning"
    sources = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert [(source["type"], source["url"]) for source in sources] == [("prometheus", "http://prometheus:9090")]
    assert [v["name"] for v in dashboard["templating"]["list"]] == ["datasource", "job", "instance"]
    mounts = (root / "docker-compose.yml").read_text()
    provider = yaml.safe_load((provisioning / "dashboards" / "octavo.yml").read_text())["providers"][0]
    assert f"./docs/monitoring/grafana/dashboards:{provider['options']['path']}:ro" in mounts


DOWN = "1x5 0x40"
EACH_SECOND = "0+60x45"


@pytest.mark.parametrize(
    ("alert", "series"),
    [
        ("OctavoEngineDown", {"octavo_engine_up": DOWN}),
        ("OctavoEngineDown", {'up{job="octavo"}': DOWN}),
        ("OctavoStepStalled", {"octavo_step_stalled": "0x5 1x40"}),
        ("OctavoRefuses", {'octavo_rejected_total{reason="max_queued_requests"}': EACH_SECOND}),
        ("OctavoPreempts", {"octavo_preemptions_total": EACH_SECOND}),
        ("OctavoErrors", {'octavo_requests_total{finish_reason="error"}': EACH_SECOND}),
        (
            "OctavoSlowFirstToken",
            {
                f'octavo_time_to_first_token_seconds_bucket{{le="{le}"}}': n
                for le, n in (("10", "0x45"), ("20", EACH_SECOND), ("+Inf", EACH_SECOND))
            },
        ),
    ],
)
def test_alert_fires_alone(promtool: Tool, root: Path, tmp_path: Path, alert: str, series: dict[str, str]) -> None:
    """Silent after a minute, firing half an hour later, and no other with it. One value a minute."""
    query = 'count by (alertname) (ALERTS{alertstate="firing"})'
    firing = [{"labels": f'{{alertname="{alert}"}}', "value": 1}]
    scenario = {
        "rule_files": [str(root / "docs" / "monitoring" / "alerts.yml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {"expr": query, "eval_time": "1m", "exp_samples": []},
                    {"expr": query, "eval_time": "40m", "exp_samples": firing},
                ],
            }
        ],
    }
    path = tmp_path / "scenario.yml"
    path.write_text(yaml.safe_dump(scenario))
    tested = promtool("test", "rules", str(path))
    assert tested.returncode == 0, tested.stdout + tested.stderr
