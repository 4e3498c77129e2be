"""octavo bench fairness against a server that is slower while the hostile tenant is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.__main__ import main
from loadtest.fairness import Fairness
from loadtest.outcome import Failure, Outcome
from tests.loadtest.scripted import Reply, Scripted, completion_events, serving

FEW = ("--requests", "3", "--input-len", "8", "--output-len", "4", "--hostile-requests", "5", "--settle", "0.2")


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


class Town:
    """Answers the polite tenant after 20 ms, after 300 ms once the hostile one has come; and that one for ever."""

    def __init__(self, hostile: Reply | None = None) -> None:
        self.hostile = hostile or Reply([(0.01, piece) for piece in completion_events(["x"] * 1000, 4000, 1000)])
        self.flooded = False

    def __call__(self, path: str, body: dict[str, Any]) -> Reply:
        if body["user"] == "hostile":
            self.flooded = True
            return self.hostile
        first, *rest = completion_events(["a", "b"], 8, 4)
        return Reply([(0.3 if self.flooded else 0.02, first), *((0.005, piece) for piece in rest)])


def bench(server: Scripted, tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "r.json"
    status = main(["fairness", "--base-url", server.url, *FEW, *flags, "--result-file", str(file)])
    return status, json.loads(file.read_bytes())


def test_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Town()) as server:
        status, result = bench(server, tmp_path)
    assert status == 0
    assert [body["user"] for body in server.bodies] == ["polite"] * 4 + ["hostile"] * 5 + ["polite"] * 3
    assert all(body["ignore_eos"] and body["stream"] and body["model"] == "owner/model" for body in server.bodies)
    lengths = [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies]
    assert lengths == [(8, 4)] * 4 + [(4000, 4000)] * 5 + [(8, 4)] * 3
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 12, "nothing comes from a cache"
    assert 20 <= result["fairness_ttft_alone_ms"] < 300 <= result["fairness_ttft_beside_ms"]
    assert result["fairness_ttft_ratio"] == pytest.approx(
        result["fairness_ttft_beside_ms"] / result["fairness_ttft_alone_ms"]
    )
    assert result["fairness_gap_alone_ms"] > 1, "5 ms, less what the first of two pieces was late"
    assert (result["fairness_hostile"], result["fairness_hostile_ended"], result["fairness_warning"]) == (5, 0, None)
    printed = capsys.readouterr().out
    assert "TTFT, beside / alone:" in printed
    assert "WARNING" not in printed


def test_each_tenant_has_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "p")
    with serving(Town()) as server:
        assert bench(server, tmp_path, "--hostile-api-key", "h")[0] == 0
    asked = [(body["user"], key) for body, key in zip(server.bodies, server.keys, strict=True)]
    assert set(asked) == {("polite", "Bearer p"), ("hostile", "Bearer h")}


@pytest.mark.parametrize(
    "flags", [["--api-key", "p"], ["--hostile-api-key", "h"], ["--api-key=k", "--hostile-api-key=k"]]
)
def test_one_key_is_no_two_tenants(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["fairness", *flags])
    assert exit.value.code == 2
    assert "each tenant needs its own" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hostile", "said"),
    [
        (Reply([(0.0, piece) for piece in completion_events(["x"], 4000, 1)]), "5 of 5 hostile requests had ended"),
        (Reply([(0.0, b"{}")], status=429), "5 of 5 hostile requests failed: HTTP 429"),
    ],
)
def test_a_flood_that_was_none(hostile: Reply, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Town(hostile)) as server:
        status, result = bench(server, tmp_path)
    assert status == 0
    assert said in result["fairness_warning"]
    assert "WARNING: " + said in capsys.readouterr().out


def test_nothing_measured() -> None:
    failed = Outcome(0.0, 0.0, 8, failure=Failure("HTTP 500", "no"))
    good = Outcome(0.0, 0.0, 8, arrivals=[1.0, 2.0], end=2.0)
    found = Fairness([good], [failed], 5, 0, {})
    assert (found.ttft_ratio, found.gap_ratio) == (None, None)
    assert found.warning == "1 polite requests failed"
    assert found.fields()["fairness_ttft_beside_ms"] is None
    assert found.lines() == "WARNING: 1 polite requests failed"


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fairness", "--base-url", "http://127.0.0.1:9"]) == 2
    assert "cannot reach" in capsys.readouterr().err
