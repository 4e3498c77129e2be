"""Perplexity of a slice of text: against plain arithmetic and the engine's own logprobs; the command."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loadtest.likelihood import Reader, Score, Setting, compare, load, windows
from loadtest.perplexity import main
from model.batch import Batch, Row
from model.params import SamplingParams
from model.runner import RunnerOptions, load_runner
from model.source import resolve
from model.tokenizer import load_tokenizer

TEXT = (
    "The river runs past the old mill and the quiet town. It rises in the hills to the north, where rain falls on most "
    "days of the year, and it reaches the sea after some two hundred miles. In summer children swim below the weir.\n"
)


class Fixed(Reader):
    """Says the same of every position."""

    def __init__(self, *probabilities: float) -> None:
        self.score = Score("fixed")
        self.row = torch.tensor(probabilities, dtype=torch.float64).log()

    def hidden(self, window: list[int]) -> Tensor:
        return torch.zeros(len(window) - 1, 1)

    def logprobs(self, hidden: Tensor) -> Tensor:
        return self.row.expand(len(hidden), -1)


def test_windows_cut_a_text_without_overlap_and_begin_with_the_prefix() -> None:
    assert windows(list(range(10)), [], 4, 9) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert windows(list(range(10)), [99], 4, 9) == [[99, 0, 1, 2], [99, 3, 4, 5], [99, 6, 7, 8]]
    assert windows(list(range(10)), [], 4, 1) == [[0, 1, 2, 3]]
    assert windows([1, 2], [], 4, 9) == []


def test_sums_are_those_of_the_definitions() -> None:
    first, same, other = Fixed(0.5, 0.25, 0.25, 0.0), Fixed(0.5, 0.25, 0.25, 0.0), Fixed(0.25, 0.25, 0.5, 0.0)
    for _ in range(2):
        compare([first, same, other], [0] * 30 + [2] * 50)
    assert [reader.score.tokens for reader in (first, same, other)] == [158] * 3
    assert first.score.perplexity == same.score.perplexity == pytest.approx(2 ** ((29 + 2 * 50) / 79))
    assert other.score.perplexity == pytest.approx(2 ** ((2 * 29 + 50) / 79))
    assert other.score.ratio == pytest.approx(other.score.perplexity / first.score.perplexity)
    assert (same.score.ratio, same.score.uncertainty, same.score.divergence, same.score.agreed) == (1.0, 0.0, 0.0, 158)
    # 0.5 ln 2 + 0 - 0.25 ln 2; and what nobody ever says (probability 0) adds nothing.
    assert other.score.divergence / 158 == pytest.approx(0.25 * math.log(2))
    assert other.score.agreed == 0
    excess = [math.log(2)] * 58 + [-math.log(2)] * 100
    mean = sum(excess) / 158
    deviation = math.sqrt(sum((value - mean) ** 2 for value in excess) / 158)
    assert other.score.uncertainty == pytest.approx(other.score.ratio * 1.96 * deviation / math.sqrt(158))


def test_it_is_what_prompt_logprobs_say() -> None:
    """Of the engine's own way to the same numbers, though the chunks are others."""
    ids = load_tokenizer(resolve(None)).encode(TEXT, add_special_tokens=False)
    (part,) = windows(ids, [], 40, 1)
    runner = load_runner(RunnerOptions(dtype="float32", kv_cache_memory=64 << 20)).runner
    params = SamplingParams(max_tokens=1, seed=0, prompt_logprobs=0)
    (values,) = runner.execute(Batch([Row(part, 40, 0, 40, [1, 2, 3], params)])).result().prompt_logprobs
    assert values is not None
    nats = -sum(value.logprob for value in values)
    (reader,) = load(None, "cpu", [Setting("float32")], 40, 7, lambda stage, detail: None)
    compare([reader], part)
    assert reader.score.tokens == 39
    assert reader.score.nats == pytest.approx(nats, rel=1e-5)
    assert reader.score.seconds > 0


def test_the_command(tmp_path: Path, tiny_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """16 bits are near float32 and int8 is not far; without a text it is Python's own."""
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    flags = ["--window", "24", "--num-tokens", "48", "--dtype", "float32", "bfloat16", "--quantization", "none", "int8"]
    assert main([*flags, "--text", str(file), "--kv-cache-dtype", "float32"]) == 0
    about, header, *rows = capsys.readouterr().out.splitlines()
    assert about.startswith(f"{file}: 2 windows of 24 tokens, digest ")
    assert header.split()[:3] == ["setting", "tokens", "perplexity"]
    names = ["float32", "int8 of float32", "bfloat16", "int8 of bfloat16"]
    assert [row.partition(", KV float32")[0] for row in rows] == names
    figures = [row.partition(", KV float32")[2].split() for row in rows]
    assert {row[0] for row in figures} == {"46"}
    ratios = [float(row[2]) for row in figures]
    assert ratios[0] == 1.0
    assert all(abs(ratio - 1) < 0.1 for ratio in ratios), ratios
    divergences = [float(row[4]) for row in figures]
    assert 0.0 == divergences[0] < divergences[2] < divergences[1] < 0.1
    assert main(["--window", "16", "--num-tokens", "16", "--model", str(tiny_gguf)]) == 0
    assert "language reference: 1 windows of 16 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--window", "9000", "--num-tokens", "9000"], "--window 9000: the model's context has 8192 tokens"),
        (["--text", "{folder}"], "Is a directory"),
        (["--text", "{folder}/latin"], "not UTF-8 at byte 3"),
        (["--text", "{folder}/short"], "has 2 tokens, a --window has 1,024"),
        (["--kv-cache-dtype", "int3"], "--kv-cache-dtype int3: must be auto, "),
    ],
)
def test_refusals(flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin").write_bytes("abcé".encode("latin-1"))
    (tmp_path / "short").write_text("Hello world")
    assert main([flag.replace("{folder}", str(tmp_path)) for flag in flags]) == 2
    out, err = capsys.readouterr()
    assert message in err.splitlines()[-1]
    assert out == ""


@pytest.mark.parametrize(("flags", "message"), [("--window 1", "at least 2"), ("--num-tokens 9", "less than one")])
def test_flags_that_contradict_each_other(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(flags.split())
    assert message in capsys.readouterr().err
