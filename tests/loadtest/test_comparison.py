"""Medians, ratios and tables from made-up runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.comparison import Comparison, Entry, Figures, Run, load, markdown, save, summarise, this_machine
from loadtest.workloads import BadWorkload


def figures(rate: float, memory: float = 100.0, tokens: float = 4.0) -> Figures:
    return Figures(
        output_tok_s=rate,
        ttft_median_ms=rate * 10,
        ttft_p99_ms=rate * 20,
        itl_median_ms=rate / 10,
        itl_p99_ms=rate / 5,
        start_s=1.5,
        peak_rss_mib=memory,
        requests=6,
        input_tokens=8.0,
        output_tokens=tokens,
        duration_s=2.0,
    )


def entry(name: str, kind: str, missing: str | None = None) -> Entry:
    return Entry(name=name, kind=kind, command=[kind, "--port", "{port}"], version="1.2", missing=missing)


def run(server: str, cell: str, number: int, rate: float | None, **more: float) -> Run:
    if rate is None:
        return Run(server=server, cell=cell, round=number, error="broke", log="x.log")
    return Run(server=server, cell=cell, round=number, figures=figures(rate, **more))


SERVERS = [entry("Octavo", "octavo"), entry("L", "llama"), entry("V", "vllm"), entry("T", "transformers", "not here")]
CELLS = ["8/4@1", "8/4@2", "8/4@9"]
RUNS = [
    *(
        run("Octavo", "8/4@1", n, rate, memory=m)
        for n, rate, m in [(1, 30.0, 90.0), (2, 90.0, 300.0), (3, 60.0, 200.0)]
    ),
    *(run("L", "8/4@1", n, rate) for n, rate in [(1, 50.0), (2, 30.0), (3, 40.0)]),
    *(run("V", "8/4@1", n, rate) for n, rate in [(1, 20.0), (2, None), (3, 10.0)]),
    run("Octavo", "8/4@2", 1, 7.0, tokens=3.5),
]


def made() -> Comparison:
    return Comparison(
        started="2026-01-02 03:04+00:00",
        machine={"processor": "P", "cores": "2 cores"},
        model="M",
        settings={"seed": 0},
        servers=SERVERS,
        cells=CELLS,
        runs=RUNS,
        summary=summarise(SERVERS, CELLS, RUNS),
    )


def test_medians_and_ratios() -> None:
    octavo, llama, vllm, alone = summarise(SERVERS, CELLS, RUNS)
    assert (octavo.server, octavo.cell, octavo.rounds, octavo.output_tok_s_rounds) == (
        "Octavo",
        "8/4@1",
        3,
        [30, 90, 60],
    )
    assert octavo.median == figures(60.0, memory=300.0), "of memory the most"
    assert octavo.ratio == 60 / 40, "to the best peer: a server is no peer of itself"
    assert (llama.ratio, vllm.ratio) == (1.0, 15 / 40)
    assert vllm.rounds == 2
    assert (alone.cell, alone.ratio) == ("8/4@2", 1.0)


def test_tables() -> None:
    text = markdown(made())
    assert "M, 2026-01-02 03:04+00:00. P, 2 cores." in text
    assert "| Octavo | **60.0 (1.50)** | **7.0 (1.00)** | — |" in text
    assert "| V | 15.0 (0.38) | — | — |" in text
    assert "| 8/4@1 | Octavo | 60.0 | 30.0 to 90.0 | 1.50 | 600 / 1200 | 6.0 / 12.0 | 1.5 | 300 | 3 |" in text
    assert "* T was not compared: not here." in text
    assert "* V, round 2, 8/4@1: broke; log: x.log." in text
    assert "* Octavo, 8/4@2: 8 tokens in, 3.5 out on average, by its count." in text
    assert text.count("by its count") == 1
    assert "* L (1.2): `llama --port {port}`" in text


def test_saved_and_loaded(tmp_path: Path) -> None:
    save(made(), tmp_path)
    assert load(tmp_path / "results.json") == made()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "results.md"]
    saved = json.loads((tmp_path / "results.json").read_bytes())
    assert set(saved) == {"version", "started", "machine", "model", "settings", "servers", "cells", "runs", "summary"}
    assert saved["version"] == 1
    assert set(saved["servers"][0]) == {"name", "kind", "command", "version", "missing"}
    assert set(saved["runs"][0]) == {"server", "cell", "round", "figures", "error", "log"}
    assert set(saved["summary"][0]) == {"server", "cell", "rounds", "median", "output_tok_s_rounds", "ratio"}
    assert saved["summary"][0]["median"] == saved["runs"][0]["figures"] | {
        "output_tok_s": 60,
        "ttft_median_ms": 600,
        "ttft_p99_ms": 1200,
        "itl_median_ms": 6,
        "itl_p99_ms": 12,
        "peak_rss_mib": 300,
    }


@pytest.mark.parametrize("text", ["", "[]", '{"version": 2}', '{"version": 1, "runs": 5}'])
def test_what_is_no_comparison(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(BadWorkload, match="is no comparison of this version"):
        load(path)
    with pytest.raises(BadWorkload, match="No such file"):
        load(tmp_path / "y.json")


def test_this_machine() -> None:
    facts = this_machine()
    assert set(facts) == {"processor", "cores", "instructions", "memory"}
    assert all(facts.values())
