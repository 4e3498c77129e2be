"""Every expression of the Grafana dashboard, run by a real Prometheus over a real server, has data."""

from __future__ import annotations

import json
import math
from pathlib import Path

import httpx

from tests.e2e.daemon import MODEL, Daemon
from tests.e2e.test_prometheus import prometheus, query

DASHBOARD = Path(__file__).parents[2] / "docs" / "monitoring" / "grafana" / "dashboards" / "octavo.json"
VARIABLES = {"$__rate_interval": "1m", "$job": "octavo", "$instance": ".*"}


def expressions() -> dict[str, str]:
    """By panel and number, as Grafana would send them; without the one that shows only failures of the server."""
    found = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for number, target in enumerate(panel.get("targets", [])):
            expression = target["expr"]
            for variable, value in VARIABLES.items():
                expression = expression.replace(variable, value)
            if 'status=~"5.."' not in expression:
                found[f"{panel['title']} {number}"] = expression
    return found


def test_every_panel_has_data(daemon: Daemon, tmp_path: Path) -> None:
    with prometheus(f"127.0.0.1:{daemon.port}", tmp_path) as client:
        daemon.wait(lambda: query(client, "octavo_engine_up") == [1.0], 30, "the first scrape")
        # Twice, so that the second one hits the prefix cache.
        for _ in range(2):
            body = {"model": MODEL, "prompt": "Once upon a time " * 20, "max_tokens": 8, "ignore_eos": True}
            reply = httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=120)
            assert reply.status_code == 200, reply.text
        empty = expressions()
        assert len(empty) > 40

        def all_have_data() -> bool:
            for name, expression in list(empty.items()):
                values = query(client, expression)
                if values and not any(map(math.isnan, values)):
                    del empty[name]
            return not empty

        daemon.wait(all_have_data, 30, f"data for {empty}")
