"""Where a step's time goes: a clock that is told, and a real engine over a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.__main__ import main
from loadtest.profile import PHASES, Stopwatch, profile_fields, profile_table
from tests.loadtest.tiny import write


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


class Work:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def outer(self, inner: int) -> str:
        self.clock.now += 3
        for _ in range(inner):
            self.inner(20)
        self.clock.now += 4
        return "done"

    def inner(self, time: int) -> None:
        self.clock.now += time
        if time > 100:
            raise ValueError("too much")


def test_time_counts_for_the_innermost() -> None:
    clock = Clock()
    stopwatch, work = Stopwatch(clock), Work(clock)
    stopwatch.wrap(work, "outer", "a")
    stopwatch.wrap(work, "inner", "b")
    clock.now += 1000
    assert work.outer(2) == "done"
    clock.now += 1000
    work.inner(5)
    assert stopwatch.take() == {"a": 7, "b": 45}
    assert stopwatch.take() == {}
    with pytest.raises(ValueError, match="too much"):
        work.inner(200)
    clock.now += 1000
    assert stopwatch.take() == {"b": 200}, "a call that raises ends too"


def test_the_figures() -> None:
    laps = [{"layers": 3000, "plan": 500}, {"layers": 5000, "sampling": 1500, "layers: qkv": 2500}]
    fields = profile_fields({"Decode-only": laps, "none": []})
    assert fields.keys() == {"Decode-only"}
    table = profile_table({"Decode-only": laps, "none": []}).splitlines()
    figures = {line[:26].strip(): line[26:].split() for line in table[2:-1]}
    assert figures.keys() == {*PHASES.values(), "layers: qkv", "step", "all but the model"}
    assert figures["layers: qkv"][:2] == ["1.2", "25.0"]
    assert figures["layers"] == ["4.0", "80.0", "5.0"]
    assert figures["step"][:2] == ["5.0", "100.0"]
    assert figures["all but the model"][:2] == ["1.0", "20.0"]
    assert figures["output"] == ["0.0", "0.0", "0.0"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every phase of a real engine takes time, and together no more than the steps did."""
    model = write(tmp_path / "tiny.gguf")
    flags = ["--engine", str(model), "--profile", "--kv-cache-memory", "4MiB", "--max-concurrency", "3"]
    lengths = ["--num-prompts", "4", "--random-input-len", "20", "--random-output-len", "6", "--disable-tqdm"]
    save = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    assert main([*flags, *lengths, *save]) == 0
    saved = json.loads((tmp_path / "r.json").read_bytes())
    spent = 0.0
    for kind, prompted in (("Decode-only", False), ("Steps with prompt tokens", True)):
        steps = sum(bool(count) == prompted for count in saved["step_prompt_tokens"])
        means = {name: value["mean_us"] for name, value in saved["profile"][kind].items()}
        assert all(means[label] > 0 for label in PHASES.values()), means
        assert means["step"] == pytest.approx(sum(means[label] for label in PHASES.values()))
        parts = [value for name, value in means.items() if name.startswith("layers: ")]
        assert sum(parts) <= means["layers"]
        assert all(parts[:-1])  # waiting may be too short to be seen
        spent += means["step"] * steps
    whole = sum(saved["step_seconds"]) * 1e6
    assert 0.5 * whole < spent <= whole
    assert "all but the model" in capsys.readouterr().out


def test_it_needs_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--profile"])
    assert "--engine" in capsys.readouterr().err
