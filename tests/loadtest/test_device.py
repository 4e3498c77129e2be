"""The script for a GPU, on a model of no size in Triton's interpreter: it runs to its end and says what it should."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="the kernels for a GPU need triton: make triton")

import torch
from transformers import GenerationConfig

from loadtest import device, kernel_checks
from loadtest.device import Case, Cell, theirs, verdicts
from loadtest.kernel_checks import Check
from model.attention.triton import TritonAttention
from model.decoder import Decoder
from model.gpu.launch import Launch
from tests.test_layout import ROOT, WEB

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


def test_it_needs_no_web_framework() -> None:
    script = f"import sys, loadtest.device; found = {WEB!r} & sys.modules.keys(); assert not found, found"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_a_wrong_kernel_ends_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(device, "checks", lambda *_, **__: [Check("a", float("nan"), 1.0), Check("b", 0.0, 1.0)])
    assert device.main(SMALL) == 1
    captured = capsys.readouterr()
    assert [line.split()[0] for line in captured.out.splitlines()[1:]] == ["WRONG", "ok"]
    assert captured.err == "1 checks failed\n"


def test_what_raises_costs_nobody_else_his_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ours(model: Decoder, case: Case, *_: object) -> Cell:
        if case.batch == 1:
            raise RuntimeError("no two steps\nof it")
        return Cell(case, 1.0, 1.0, 0.1, 0.1, 1.0, 1.0, 0)

    monkeypatch.setattr(device, "ours", ours)
    assert device.main([*SMALL, "--no-checks"]) == 1
    captured = capsys.readouterr()
    first, second = captured.out.splitlines()[-2:]
    assert first.endswith("  RuntimeError: no two steps")
    assert second == Cell(Case("tiny", "tq4", 2, 8), 1.0, 1.0, 0.1, 0.1, 1.0, 1.0, 0).line()
    assert "Traceback" in captured.err


def test_a_kernel_that_raises_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def gating(*_: object) -> Launch:
        raise RuntimeError("out of resource\nshared memory")

    monkeypatch.setattr(kernel_checks, "gating", gating)
    monkeypatch.setattr(kernel_checks, "FORMATS", ())  # attention has its turn in the table's test
    cpu = torch.device("cpu")
    *others, last = kernel_checks.checks(TritonAttention(cpu), torch.float32, cpu, small=True)
    assert [check.passed for check in others] == [True]
    assert not last.passed
    assert last.name == "width 96: RuntimeError: out of resource"


class Answers:
    """A model that begins a prompt each second, and takes two for it."""

    def __init__(self, lost: int) -> None:
        self.lost = lost

    def generate_batch(self, inputs: list[list[int]], generation_config: GenerationConfig) -> dict[str, object]:
        tokens = [7] * (generation_config.max_new_tokens or 0)
        return {
            str(number): SimpleNamespace(generated_tokens=tokens, error=None, lifespan=(5.0 + number, 7.0 + number))
            for number in range(len(inputs) - self.lost)
        }


def test_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    case, cpu = Case("tiny", "transformers", 4, 8), torch.device("cpu")
    monkeypatch.setattr(device, "random_transformer", lambda *_: Answers(0))
    assert theirs(case, 3, torch.float32, cpu) == 4 * 3 / (3 + 2)
    monkeypatch.setattr(device, "random_transformer", lambda *_: Answers(1))
    with pytest.raises(RuntimeError, match="3 of 4 prompts answered"):
        theirs(case, 3, torch.float32, cpu)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--device", "cuda"], "--device cuda: TRITON_INTERPRET=1 must be set for cpu, and not for cuda"),
        (["--device", "cpu"], "--dtype bfloat16: must be float32 for cpu"),
        ([*SMALL, "--answer", "1"], "--answer 1: must be at least 2 and less than every --context"),
        ([*SMALL, "--answer", "8"], "--answer 8: must be at least 2 and less than every --context"),
        ([*SMALL, "--batch", "32", "0"], "--batch 0: must be between 1 and 8192"),
    ],
)
def test_what_cannot_be_run(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        device.main(argv)
    assert capsys.readouterr().err.splitlines()[-1] == f"python -m loadtest.device: error: {words}"


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
