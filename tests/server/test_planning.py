"""`octavo plan`, as a command."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.__main__ import main


def test_the_demo_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    assert main(["plan", "--kv-cache-memory", "256MiB", "--tokens", "1000", "--picture", str(picture)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("SmolLM2-135M-Instruct: 30 layers x 3 KV heads x 64, a context of 8,192 tokens; 256 MiB")
    assert any(line.split()[:2] == ["bfloat16", "23,040"] for line in shown)
    assert picture.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kv-cache-memory", "lots"], "--kv-cache-memory: 'lots' is not a size"),
        (["--kv-cache-memory", "1KiB"], "raise --kv-cache-memory"),
        (["--tokens", "9000"], "--tokens: 9000 tokens: must be between 1 and the model's 8192"),
        (["/nowhere"], "no model '/nowhere'"),
        (["--picture", "/nowhere/plan.svg"], "--picture /nowhere/plan.svg: No such file"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("octavo: ")
    assert words in line
