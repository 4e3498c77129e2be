"""The command against real processes that speak HTTP: rounds, figures, failures, going on, leaving nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

from loadtest import comparison
from loadtest.compare import main
from loadtest.comparison import Comparison

ROOT = Path(__file__).resolve().parents[2]
LONG = 60


class Bench:
    """Runs `octavo bench compare` on the tiny model with fake servers, and reads what it leaves."""

    def __init__(self, folder: Path, model: Path, weights: Path) -> None:
        self.out = folder / "out"
        self.journal = folder / "journal"
        program = folder / "llama-server"
        program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m tests.loadtest.fake_peer "$@"\n')
        program.chmod(0o755)
        places = ("--out", self.out, "--model", model, "--weights", weights, "--llama-server", program)
        self.flags = [*map(str, places), "--servers", "llama"]

    def server(self, label: str, *flags: str) -> list[str]:
        return ["--llama", f"{label}: --label {label} --journal {self.journal} {' '.join(flags)}"]

    def __call__(self, *flags: str) -> int:
        return main([*self.flags, *flags])

    @property
    def result(self) -> Comparison:
        return comparison.load(self.out / "results.json")

    @property
    def table(self) -> str:
        return (self.out / "results.md").read_text()

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        return [line for line in map(json.loads, lines) if line["event"] in kinds]


@pytest.fixture
def bench(tmp_path: Path, tiny_gguf: Path, tiny_weights: Path) -> Bench:
    return Bench(tmp_path, tiny_gguf, tiny_weights)


def test_rounds_figures_and_what_is_missing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PYTHON", raising=False)
    servers = [*bench.server("fast"), *bench.server("slow", "--gap", "0.02"), "--servers", "llama,vllm"]
    assert bench(*servers, "--cells", "8/6@1,2", "4+8/6@2", "--repeat", "2") == 0

    turns = [(event["label"], event["event"]) for event in bench.events("start", "stop")]
    assert turns == [(name, what) for _ in range(2) for name in ("fast", "slow") for what in ("start", "stop")]

    requests = {
        name: [(event["prompt"], event["max_tokens"]) for event in bench.events("request") if event["label"] == name]
        for name in ("fast", "slow")
    }
    per_round = (1 + 3) + (2 + 6) + (2 + 6)
    assert len(requests["fast"]) == 2 * per_round
    assert sorted(requests["fast"]) == sorted(requests["slow"]), "all are asked the same"
    assert len({tuple(prompt) for prompt, _ in requests["fast"]}) == 2 * per_round, "nothing is asked twice"
    shared = [prompt for prompt, _ in requests["fast"] if len(prompt) == 12]
    assert len({tuple(prompt[:4]) for prompt in shared}) == 4, "one beginning a round, and another for its warm-up"
    for event in bench.events("request"):
        assert (event["ignore_eos"], event["temperature"], event["stream"], event["model"]) == (True, 0, True, "fake")

    result = bench.result
    assert [entry.missing for entry in result.servers][:2] == [None, None]
    assert "name the Python of its environment with --vllm-python" in (result.servers[2].missing or "")
    assert result.cells == ["8/6@1", "8/6@2", "4+8/6@2"]
    assert len(result.runs) == 2 * 2 * 3
    for cell in result.cells:
        fast, slow = (row for row in result.summary if row.cell == cell)
        assert (fast.server, slow.server, fast.rounds) == ("fast", "slow", 2)
        assert fast.ratio == 1.0
        assert slow.ratio == pytest.approx(slow.median.output_tok_s / fast.median.output_tok_s)
        assert slow.median.output_tok_s == median(slow.output_tok_s_rounds)
        assert slow.median.itl_median_ms >= 20
        assert slow.median.output_tok_s <= 6 / (6 * 0.02) * int(cell[-1])
        assert (slow.median.input_tokens, slow.median.output_tokens) == (12 if "+" in cell else 8, 6)
        assert 10 < slow.median.peak_rss_mib < 500
        assert slow.median.start_s > 0
    rate = result.summary[0].median.output_tok_s
    assert f"| fast | **{rate:.1f} (1.00)** |" in bench.table
    assert "* vLLM was not compared: no vllm here" in bench.table
    picture = (bench.out / "plot.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


def test_one_that_fails_stops_nothing(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    servers = [
        *bench.server("refuses", "--refuse", "no-such-model"),
        *bench.server("dies", "--die-after", "7"),
        *bench.server("errs", "--status", "500"),
        *bench.server("works"),
    ]
    assert bench(*servers, "--cells", "8/4@1,2", "--no-plot") == 0
    found = {(run.server, run.cell): run for run in bench.result.runs}
    assert {place for place, run in found.items() if run.figures} == {
        *(("works", "8/4@1"), ("works", "8/4@2"), ("dies", "8/4@1"))
    }
    for cell in ("8/4@1", "8/4@2"):
        assert found["refuses", cell].error == "exit status 1: no-such-model"
        assert (
            found["errs", cell].error
            == f"{cell[-1]} of {cell[-1]} requests of the warm-up failed, the first: HTTP 500: cannot"
        )
    assert found["dies", "8/4@2"].error == "exit status 7: RuntimeError: out of luck"
    assert "out of luck" in Path(found["dies", "8/4@2"].log or "").read_text()
    assert f"* refuses, round 1, 8/4@1, 8/4@2: exit status 1: no-such-model; log: {bench.out}" in bench.table
    assert not (bench.out / "plot.png").exists()
    assert "refuses: exit status 1: no-such-model" in capsys.readouterr().err


def test_a_server_with_weights_of_its_own(bench: Bench, tmp_path: Path) -> None:
    """What the servers read of the exported weights is made, and nothing else."""
    weights = tmp_path / "new"
    flags = ("--weights", str(weights), "--cells", "8/4@1", "--no-plot")
    assert bench(*bench.server("q8_0", "-m {weights}/q8_0.gguf"), *flags) == 0
    assert bench.events("start")[0]["model"] == str(weights / "q8_0.gguf")
    assert sorted(path.name for path in weights.glob("*.gguf")) == ["bf16.gguf", "q8_0.gguf"]
    assert (weights / "model.safetensors").exists()


def test_weights_of_another_model(
    bench: Bench, tmp_path: Path, tiny_weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "other"
    shutil.copytree(tiny_weights, weights)
    config = weights / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": ', '"rms_norm_eps": 1'))
    assert bench(*bench.server("one"), "--weights", str(weights)) == 2
    assert f"{weights} holds another model than" in capsys.readouterr().err


def test_nothing_measured(bench: Bench) -> None:
    assert bench(*bench.server("refuses", "--refuse", "no"), "--cells", "8/4@1") == 1
    assert bench.result.summary == []


def test_an_answer_that_never_ends(bench: Bench) -> None:
    """The server hangs, so nothing more is asked of it."""
    flags = ("--cells", "8/4@1,2", "--request-timeout", "0.5", "--no-plot")
    assert bench(*bench.server("stalls", "--stall"), *bench.server("works"), *flags) == 0
    errors = {run.cell: run.error or "" for run in bench.result.runs if run.server == "stalls"}
    assert set(errors) == {"8/4@1", "8/4@2"}
    assert all("timeout: no complete answer within 0.5 s" in error for error in errors.values())
    assert len([event for event in bench.events("request") if event["label"] == "stalls"]) == 1
    assert not alive(bench)


def alive(bench: Bench) -> list[int]:
    """Processes of fake servers, and of what they started, that still are."""
    pids = [pid for event in bench.events("start") for pid in event["pids"]]
    assert pids
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_resume(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    first = [*bench.server("one"), *bench.server("two", "--status", "500"), "--no-plot"]
    assert bench(*first, "--cells", "8/4@2") == 0
    before = bench.result
    count = len(bench.events("request"))

    assert bench(*first, "--cells", "8/4@1") == 2
    assert "is there already: --resume goes on with it" in capsys.readouterr().err

    assert bench(*first, "--cells", "8/4@2", "8/4@1", "--resume") == 0
    after = bench.result
    new = bench.events("request")[count:]
    assert after.started == before.started
    assert after.runs[0] == before.runs[0], "what was measured stays"
    assert [event["label"] for event in new].count("one") == 1 + 3, "and is not measured again"
    assert [event["label"] for event in new].count("two") == 2 + 1, "what failed is tried again"
    assert len(after.runs) == 4

    assert bench(*bench.server("one", "--gap", "0.1"), "--cells", "8/4@1", "--resume") == 2
    assert "one was started with other flags" in capsys.readouterr().err
    assert bench(*first, "--cells", "8/4@1", "--resume", "--seed", "5") == 2
    assert "settings was {'seed': 0" in capsys.readouterr().err
    (bench.out / "results.json").write_text('{"version": 1}')
    assert bench(*first, "--cells", "8/4@1", "--resume") == 2
    assert "is no comparison of this version" in capsys.readouterr().err


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_broken_off(bench: Bench, sign: signal.Signals) -> None:
    """Every process is gone, even one that left the group, and what was measured is on disk."""
    flags = [*bench.flags, *bench.server("works"), *bench.server("stalls", "--stall"), "--cells", "8/4@1", "--no-plot"]
    process = subprocess.Popen(
        [sys.executable, "-m", "loadtest", "compare", *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        wait(lambda: any(event["label"] == "stalls" for event in bench.events("request")))
        assert len(alive(bench)) == 2
        os.kill(process.pid, sign)
        out, err = process.communicate(timeout=LONG)
    finally:
        process.kill()
    assert process.returncode == 130, err.decode()
    assert not alive(bench)
    assert [run.server for run in bench.result.runs] == ["works"]
    assert b"| works |" in out
    assert err.decode().rstrip().endswith("--resume goes on")


def wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--cells", "8/4"], "'8/4' is not IN/OUT@CLIENTS"),
        (["--cells", "8/0@1"], "'8/0@1' is not IN/OUT@CLIENTS"),
        (["--repeat", "0"], "--repeat: 0 is not above 0"),
        (["--servers", "llama,tgi"], "'tgi' is none of octavo, llama, vllm, openvino, transformers"),
        (["--octavo", ": --dtype float32"], "has no label in front of a colon"),
    ],
)
def test_bad_flags(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(flags)
    assert exit.value.code == 2
    assert words in capsys.readouterr().err


def test_two_of_one_name(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*bench.server("one"), *bench.server("one")) == 2
    assert "two servers are called 'one'" in capsys.readouterr().err


def test_a_missing_library_is_one_line(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench(*bench.server("one")) == 2
    said = capsys.readouterr().err
    assert said.startswith("octavo bench compare: matplotlib cannot be imported")
    assert said.endswith("pip install -e '.[bench]'\n")
    assert said.count("\n") == 1
