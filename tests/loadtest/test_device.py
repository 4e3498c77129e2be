"""The script for a GPU, on a model of no size in Triton's interpreter: it runs to its end and says what it should."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the kernels for a GPU need triton: make triton")

from loadtest import device
from loadtest.device import Case, Cell, verdicts
from loadtest.kernel_checks import Check

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMALL = [*("--device", "cpu", "--dtype", "float32", "--model", "tiny", "--kv", "tq4", "--batch", "1", "2")]
SMALL += [*("--context", "8", "--answer", "3", "--no-transformers")]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert device.main(SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("ok") for line in lines) >= 8
    cells = [line.split() for line in lines[lines.index(device.HEAD) + 1 :]]
    assert [cell[:4] for cell in cells] == [["tiny", "tq4", "1", "8"], ["tiny", "tq4", "2", "8"]]
    for cell in cells:
        assert len(cell) == 12, "none failed"
        prefill, step, launch, *_, rate, overall = map(float, cell[4:])
        assert min(prefill, rate, overall) > 0
        assert 0 < launch < step


def test_a_wrong_kernel_ends_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(device, "checks", lambda *_, **__: [Check("a", float("nan"), 1.0), Check("b", 0.0, 1.0)])
    assert device.main(SMALL) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("WRONG")
    assert captured.err == "1 checks failed\n"


def test_verdicts() -> None:
    """Of the large shape only, against the shares of the floor that are wanted."""

    def cell(model: str, pool: str, batch: int, step: float, idle: float = 0.01) -> Cell:
        return Cell(Case(model, pool, batch, 1024), 1.0, step, 0.1, idle, 1.0, 1.0, 0)

    found = [cell("llama-3.1-8b", *case) for case in (("bfloat16", 1, 1.4), ("bfloat16", 256, 1.7), ("tq4", 256, 1.6))]
    lines = list(verdicts([*found, cell("qwen3-0.6b", "bfloat16", 1, 9.0, 0.9)]))
    assert [line.split()[0] for line in lines] == ["reached", "MISSED", "reached", "reached"]
    lines = list(verdicts([found[1], cell("llama-3.1-8b", "tq4", 256, 1.8, idle=0.06)]))
    assert [line.split()[0] for line in lines] == ["MISSED"] * 3
    assert not list(verdicts([cell("qwen3-0.6b", "bfloat16", 1, 9.0)]))
