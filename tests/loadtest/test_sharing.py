"""octavo bench sharing: its table, the whole command on a real server, and how it fails."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from loadtest import sharing
from loadtest.arrangement import ARRANGEMENTS
from loadtest.peers import PORT, Peer
from loadtest.running import Died
from loadtest.sharing import Sample, Sharing, main, make_parser, run

TINY = ("--input-len", "8", "--output-len", "4", "--requests", "1")
FAKE = (sys.executable, "-m", "tests.loadtest.fake_peer", "--port", PORT, *("-m", "m", "-t", "1", "-c", "1"))


def arguments(*flags: str) -> argparse.Namespace:
    args = make_parser().parse_args([*TINY, *flags])
    args.arrangements = ARRANGEMENTS[:1]
    return args


def fake(*flags: str) -> Peer:
    return Peer("fake", "llama", (*FAKE, "--parallel", "1", *flags))


def sample(name: str, streams: int, number: int, rate: float) -> Sample:
    return Sample(name, streams, number, rate, 1000 / rate, 10.0, 0.0)


def test_the_table() -> None:
    """A round in which the machine was half as fast changes no ratio; one that was broken off counts for none."""
    usual, other = "as started", "API niced by 5"
    rates = [(usual, 1, 100.0), (other, 1, 110.0), (other, 2, 55.0), (usual, 2, 50.0), (other, 3, 90.0)]
    found = Sharing(2, 2, [sample(name, 8, number, rate) for name, number, rate in rates])
    found.samples.append(sample(other, 1, 3, 7.0))
    head, titles, *rows = found.lines().splitlines()[:5]
    assert head == "2 cores, 2 compute threads"
    assert titles.split()[2:] == [
        "tok/s",
        "±",
        "x",
        "TTFT",
        "±",
        "x",
        *("ITL", "p50", "±", "x", "ITL", "p99", "±", "x"),
    ]
    # No ratio to what was not measured, nor to zero.
    assert rows[0].split() == ["1,", *other.split(), "7.0", "0%", "142.9", "0%", "10.0", "0%", "0.0", "0%"]
    assert rows[1].split() == f"8, {usual} 75.0 33% 1.000 15.0 33% 1.000 10.0 0% 1.000 0.0 0%".split()
    assert rows[2].split() == f"8, {other} 90.0 31% 1.100 11.1 41% 0.909 10.0 0% 1.000 0.0 0%".split()


def test_the_command(tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    serve = f"{tiny_gguf} --device cpu --kv-cache-memory 16MiB"
    flags = ["--concurrency", "1", "3", "--repeat", "2", "--threads", "1", "--result-file", str(path)]
    assert main([*TINY, *flags, "--serve-flags", serve, "--arrangements", "API on the last core"]) == 0
    fields = json.loads(path.read_bytes())
    assert fields["sharing_serve_flags"] == serve
    assert fields["sharing_threads"] == 1
    first, second = "as started", "API on the last core"
    order = [(first, 1), (second, 1), (second, 2), (first, 2)]
    samples = fields["sharing_samples"]
    assert [(one["arrangement"], one["round"], one["streams"]) for one in samples] == [
        (name, number, streams) for name, number in order for streams in (1, 3)
    ]
    # Four tokens may come in one piece, without a gap.
    assert all(one["output_tok_s"] > 0 < one["ttft_ms"] for one in samples)
    said = capsys.readouterr()
    assert [line.split("  ")[0] for line in said.out.splitlines()[2:6]] == [
        f"{streams}, {name}" for streams in (1, 3) for name in (first, second)
    ]
    assert said.err.count(" tok/s") == 8, "progress, cell by cell"


def test_what_cannot_be_taken_back_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def note(peer: Peer, args: argparse.Namespace) -> int:
        asked.extend(one.name for one in args.arrangements)
        return 0

    monkeypatch.setattr(sharing, "may_raise", lambda: False)
    monkeypatch.setattr(sharing, "run", note)
    assert main([]) == 0
    assert asked == ["as started", "API on the last core", "engine one to a core"]
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["--arrangements", "engine one to a core"]) == 0
    assert asked[3:] == ["as started", "engine one to a core"], "the first is always there"
    assert not capsys.readouterr().err, "nothing was left out"


def test_flags_that_no_shell_understands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--serve-flags", "--dtype 'float32"])
    assert stopped.value.code == 2
    assert '--serve-flags: "--dtype \'float32": No closing quotation' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [((), "no process of an engine"), (("--stall",), "3 of 3 requests failed, the first: timeout")],
)
def test_a_server_that_cannot_be_measured(
    flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(fake(*flags), arguments("--concurrency", "3", "--request-timeout", "0.5")) == 1
    said = capsys.readouterr()
    assert words in said.err
    assert not said.out


def test_what_was_found_before_a_failure_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measure(peer: Peer, args: argparse.Namespace, log: Path, found: Sharing) -> None:
        found.samples.append(sample("as started", 1, 1, 50.0))
        raise Died("exit status 7")

    monkeypatch.setattr(sharing, "measure", measure)
    assert run(fake(), arguments("--result-file", str(tmp_path / "found.json"))) == 1
    said = capsys.readouterr()
    assert said.err == "octavo bench sharing: exit status 7\n"
    assert said.out.splitlines()[2].split()[:4] == ["1,", "as", "started", "50.0"]
    assert len(json.loads((tmp_path / "found.json").read_bytes())["sharing_samples"]) == 1
    assert run(fake(), arguments("--result-file", str(tmp_path / "nowhere" / "found.json"))) == 2
    assert "cannot write" in capsys.readouterr().err
