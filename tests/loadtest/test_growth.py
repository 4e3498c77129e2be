"""The fit, the grid and the command; that nothing grows is counted in tests/scheduler and tests/kvpool."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest import growth
from loadtest.growth import Cell, Idle, Line, grid, main
from model.batch import Batch


def test_a_line_through_cells_that_lie_on_it() -> None:
    cells = [
        Cell(rows, rows * each, 0.02 + 0.003 * rows + 1e-6 * rows * each) for rows in (1, 2, 8) for each in (9, 90)
    ]
    line = Line.through(cells)
    assert (line.fixed, line.row, line.token) == pytest.approx((0.02, 0.003, 1e-6))
    assert line.r_squared == pytest.approx(1.0)
    assert line.worst == pytest.approx(0.0, abs=1e-9)
    bent = Line.through([*cells, Cell(8, 720, 1.0)])
    assert bent.r_squared < 0.9
    assert bent.worst > 0.3


class Recording(Idle):
    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def execute(self, batch: Batch) -> Idle.Done:
        self.batches.append(batch)
        return super().execute(batch)


def test_the_grid_is_what_the_pool_holds_and_shares_no_block() -> None:
    runner = Recording()
    cells = grid(runner, num_blocks=13, rows=[1, 3], contexts=[16, 33, 80], repeat=2)
    assert [(cell.rows, cell.context) for cell in cells] == [(1, 16), (1, 33), (1, 80), (3, 48), (3, 99)]
    assert len(runner.batches) == 5 * 3, "one to warm up, two that are timed"
    for batch in runner.batches:
        blocks = [block for row in batch.rows for block in row.blocks]
        assert len(set(blocks)) == len(blocks)
        assert 0 < min(blocks) <= max(blocks) < 13
        assert all(row.start + row.count == len(row.tokens) <= 16 * len(row.blocks) for row in batch.rows)


def test_the_command(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(growth, "CACHED", (100, 1_000))
    flags = ["--model", str(tiny_gguf), "--rows", "1", "4", "--contexts", "16", "256", "4000", "--repeat", "1"]
    assert main([*flags, "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[-2:] == ["16", "256"], "4,000 are more than the model's context"
    assert lines[3].split()[:2] == ["4", "rows"]
    assert lines[4].startswith("ms = ")
    assert lines[5].startswith("R² ")
    queue = [line.split() for line in lines if line.startswith(("plan", "step"))]
    assert [row[-3:] for row in lines_with(lines, "waiting:")] == [["0", "200", "2,000"]]
    assert len(queue) == 4
    assert all(float(value) > 0 for row in queue for value in row[-3:])
    assert len(lines_with(lines, "match")) == 2


def lines_with(lines: list[str], word: str) -> list[list[str]]:
    return [line.split() for line in lines if word in line]


def test_too_small_a_grid_is_refused(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tiny_gguf), "--rows", "2", "--device", "cpu"]) == 2
    assert "two numbers of --rows and two of --contexts" in capsys.readouterr().err
