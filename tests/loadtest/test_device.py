"""The script for a GPU, on a model of no size in Triton's interpreter: it runs to its end and says what it should."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the kernels for a GPU need triton: make triton")

from loadtest import device
from loadtest.kernel_checks import Check

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMALL = [*("--device", "cpu", "--dtype", "float32", "--model", "tiny", "--kv", "tq4", "--batch", "1", "2")]
SMALL += [*("--context", "20", "--answer", "2", "--steps", "1", "--no-transformers")]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert device.main(SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("ok") for line in lines) >= 8
    cells = lines[lines.index(device.HEAD) + 1 :]
    assert [cell.split()[:4] for cell in cells[:2]] == [["tiny", "tq4", "1", "20"], ["tiny", "tq4", "2", "20"]]
    assert cells[2].endswith("tokens/s")
    assert "failed" not in cells[2]


def test_a_wrong_kernel_ends_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(device, "checks", lambda *_, **__: [Check("a", float("nan"), 1.0), Check("b", 0.0, 1.0)])
    assert device.main(SMALL) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("WRONG")
    assert captured.err == "1 checks failed\n"
