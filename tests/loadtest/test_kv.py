"""The table of KV formats: greedy answers, turns, and the command on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.greedy import Agreement, continued, followed
from loadtest.kv import main
from loadtest.likelihood import Setting, load
from loadtest.relay import Times, take_turns


def test_a_reader_follows_its_own_answer_and_leaves_a_changed_one(tiny_gguf: Path) -> None:
    (reader,) = load(str(tiny_gguf), "cpu", [Setting(kv_cache_dtype="tq4")], 64, 8, lambda stage, detail: None)
    prompt = list(range(300, 321))
    answer = continued(reader.loaded.runner, prompt[:5], 20)
    assert len(answer) == 25
    assert answer[:5] == prompt[:5]
    assert followed(reader, answer, 5) == [True] * 20
    changed = [*answer[:12], (answer[12] + 1) % 300, *answer[13:]]
    found = followed(reader, changed, 5)
    assert found[:8] == [True] * 7 + [False]
    agreement = Agreement()
    agreement.add([True] * 20)
    agreement.add(found)
    assert (agreement.places, agreement.same, agreement.texts) == (40, 20 + sum(found), 1)


def test_turns_time_every_prompt_and_every_step(tiny_gguf: Path) -> None:
    settings = [Setting(kv_cache_dtype=name) for name in ("bfloat16", "int8")]
    readers = load(str(tiny_gguf), "cpu", settings, 40, 16, lambda stage, detail: None, streams=3)
    turns: list[int] = []
    times = take_turns([reader.loaded for reader in readers], 3, 37, 4, lambda: turns.append(1))
    assert len(turns) == 3 + 1 + 4
    assert [(len(own.prefill), len(own.decode)) for own in times] == [(3, 4)] * 2
    assert Times([1.0, 2.0, 4.0], [0.5, 0.25]).rates(streams=3, context=37) == (18.5, 8.0)


def test_the_command(tmp_path: Path, tiny_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "kv.json"
    sizes = "--window 32 --num-tokens 64 --context 30 --streams 2 --steps 2 --new-tokens 6 --budget 1MiB"
    assert main(["--model", str(tiny_gguf), "--device", "cpu", "--out", str(out), *sizes.split()]) == 0
    about, _, head, rule, *rows, _, saved = capsys.readouterr().out.splitlines()
    assert about.startswith("tiny, weights bfloat16, on cpu (")
    assert saved == f"saved to {out}"
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert {len(row) for row in cells} == {head.count("|") - 1} == {rule.count("|") - 1}
    assert [row[:2] for row in cells] == [["bfloat16", "256"], ["int8", "144"], ["k8v4", "112"], ["tq4", "80"]]
    assert cells[0][4:8] == ["1", "0.0000", "100.0%", "20 of 20"]
    found = json.loads(out.read_bytes())["formats"]
    assert [row["tokens"] for row in found] == [(1 << 20) // (16 * size) * 16 - 16 for size in (256, 144, 112, 80)]
    first, *others = [row["divergence"] for row in found]
    assert first == 0.0 < others[0] < min(others[1:])
    assert all(row["prefill"] > 0 and row["decode"] > 0 for row in found)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--context 2000", "--window 1024 must be at least 2, and --context 2000"),
        ("--window 1000 --new-tokens 1000", "--window 1000 must be more than --new-tokens 1000"),
        ("--num-tokens 9", "--num-tokens 9 is less than one --window"),
        ("--kv-cache-dtype int3", "invalid choice: 'int3'"),
    ],
)
def test_flags_that_cannot_be(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(flags.split())
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", "/dev/null/kv.json"]) == 2
    assert capsys.readouterr().err == "octavo bench kv: cannot write /dev/null/kv.json: File exists\n"
