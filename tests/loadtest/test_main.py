"""The command against a real HTTP server: figures, exit status, what is sent, and every way to fail."""

from __future__ import annotations

import itertools
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from loadtest import interference
from loadtest.__main__ import BENCHES, main
from tests.loadtest.scripted import Reply, completion_events, event, serving, stream_of


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def bench(url: str, tmp_path: Path, *flags: object, prompts: int = 6) -> tuple[int, dict[str, Any]]:
    """Exit status and the saved, detailed result."""
    status = main(
        [
            *("--base-url", url, "--num-prompts", str(prompts), "--random-input-len", "8", "--random-output-len", "4"),
            *("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json"),
            *map(str, flags),
        ]
    )
    return status, json.loads((tmp_path / "r.json").read_bytes())


def test_closed_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(stream_of(["a", "b", "c"], tokens=4)) as server:
        status, result = bench(server.url, tmp_path, "--max-concurrency", 2, "--metadata", "gpu=none", "--top-p", 0.9)
    assert status == 0
    assert (result["completed"], result["failed"], result["model_id"]) == (6, 0, "owner/model")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (48, 24), "from usage, not from chunks"
    assert result["total_cached_tokens"] == 6 * 16
    assert result["output_lens"] == [4] * 6
    assert [len(itl) for itl in result["itls"]] == [2] * 6
    assert (result["request_rate"], result["max_concurrency"], result["gpu"]) == ("inf", 2, "none")
    assert server.most_in_flight <= 2
    for body in server.bodies:
        prompt = body.pop("prompt")
        assert len(prompt) == 8
        assert all(62 <= id < 469 for id in prompt), "ordinary ids of the 500 that the server names"
        assert body == {
            "model": "owner/model",
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "top_p": 0.9,
            "ignore_eos": True,
        }
    printed = capsys.readouterr().out
    assert "Output token throughput (tok/s):" in printed
    assert "TTFT: from when a request was due" in printed


@pytest.mark.parametrize(
    ("card", "flags", "low", "high"),
    [
        ({"vocab_size": 40}, [], 5, 38),
        ({"meta": {"n_vocab": 40}}, [], 5, 38),
        ({"vocab_size": 40}, ["--vocab-size", 80_000], 1000, 75_000),
        ({"vocab_size": "many"}, [], 1000, 31_000),
        ({}, [], 1000, 31_000),
    ],
)
def test_prompts_are_of_the_served_vocabulary(
    card: dict[str, Any], flags: list[object], low: int, high: int, tmp_path: Path
) -> None:
    """Unless the flag says another; where the server says none, of a common one."""
    with serving(stream_of(["x"]), models={"data": [{"id": "m", **card}]}) as server:
        bench(server.url, tmp_path, "--random-input-len", 500, *flags, prompts=1)
    (body,) = server.bodies
    assert low <= min(body["prompt"]) <= max(body["prompt"]) < high
    assert max(body["prompt"]) > low + (high - low) / 2


def test_open_loop_is_timed_from_the_schedule(tmp_path: Path) -> None:
    """The server takes 30 ms a request, one is allowed in flight, and all are due within 12 ms."""

    def answer(path: str, body: dict[str, Any]) -> Reply:
        first, *rest = completion_events(["a"], 8, 1)
        return Reply([(0.03, first), *((0, piece) for piece in rest)])

    with serving(answer) as server:
        status, result = bench(server.url, tmp_path, "--request-rate", 500, "--max-concurrency", 1)
    assert status == 0
    assert result["max_concurrent_requests"] == 1
    ttfts, waits = result["ttfts"], result["queue_times"]
    assert [ttft >= 0.03 * (n + 1) - 0.013 for n, ttft in enumerate(ttfts)] == [True] * 6
    assert waits[5] >= 0.03 * 5 - 0.013
    assert result["mean_ttft_ms"] == pytest.approx(1000 * sum(ttfts) / 6)


@pytest.mark.parametrize(("short", "status"), [((), 0), ((0,), 0), ((0, 1), 1)])
def test_streams_beside_a_long_prompt(
    short: tuple[int, ...],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two streams of which some end before the long prompt's first token; it takes half a second."""
    monkeypatch.setattr(interference, "SETTLE_SECONDS", 0.5)
    streams = itertools.count()

    def answer(path: str, body: dict[str, Any]) -> Reply:
        if len(body["prompt"]) == 50:
            return Reply([(0.5, b""), *((0, piece) for piece in completion_events(["a"], 50, 1))])
        pieces = completion_events(["a"] * (8 if next(streams) in short else 100), 8, 4)
        return Reply([(0.02, piece) for piece in pieces])

    with serving(answer) as server:
        flags = ("--long-prompt-len", 50, "--max-concurrency", 2)
        got, result = bench(server.url, tmp_path, *flags)
    assert got == status
    assert (result["completed"], result["interference_streams"]) == (3, 2)
    assert result["interference_streams_measured"] == 2 - len(short)
    assert result["interference_streams_ended"] == len(short)
    assert (result["interference_warning"] is None) == (not short)
    assert ("WARNING: " in capsys.readouterr().out) == bool(short)
    assert result["interference_long_prompt_ttft_ms"] >= 500
    if status == 0:
        assert result["interference_worst_gap_ms"] >= 15, "a piece every 20 ms or more"


def test_timing_of_a_scripted_stream(tmp_path: Path) -> None:
    """An empty role chunk at once, content after 50 ms, the rest in two gaps of 30 ms."""

    def answer(path: str, body: dict[str, Any]) -> Reply:
        role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        texts = [event({"choices": [{"delta": {"content": t}}]}) for t in "abc"]
        usage = event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}})
        return Reply(
            [(0, role), (0.05, texts[0]), (0.03, texts[1]), (0.03, texts[2]), (0, usage + b"data: [DONE]\n\n")]
        )

    data = tmp_path / "s.json"
    data.write_text(
        json.dumps([{"conversations": [{"value": f"question {n} " * 8}, {"value": "word " * 20}]} for n in range(9)])
    )
    with serving(answer) as server:
        flags = ("--endpoint", "/v1/chat/completions", "--dataset-name", "sharegpt", "--dataset-path", data)
        status, result = bench(server.url, tmp_path, *flags, "--goodput", "ttft:49", prompts=3)
    assert status == 0
    assert all(ttft >= 0.05 for ttft in result["ttfts"])
    assert result["request_goodput"] == 0
    assert [len(itl) for itl in result["itls"]] == [2, 2, 2]
    assert result["input_lens"] == [9, 9, 9]
    # The last piece comes no sooner than 110 ms after the request, however the client's reads fall.
    lasts = [ttft + sum(itl) for ttft, itl in zip(result["ttfts"], result["itls"], strict=True)]
    assert min(lasts) >= 0.11
    assert all(e2el >= last - 1e-9 for e2el, last in zip(result["latencies"], lasts, strict=True))
    tpots = [(e2el - ttft) / 4 for e2el, ttft in zip(result["latencies"], result["ttfts"], strict=True)]
    assert result["mean_tpot_ms"] == pytest.approx(1000 * sum(tpots) / 3)
    body = server.bodies[0]
    assert body["messages"][0]["content"].startswith("question ")
    assert body["max_tokens"] == 25, "100 bytes: no /tokenize here that answers"
    assert "ignore_eos" not in body


def test_lengths_come_from_the_servers_tokenizer(tmp_path: Path) -> None:
    def answer(path: str, body: dict[str, Any]) -> Reply:
        if path == "/tokenize":
            return Reply([(0, json.dumps({"tokens": body["prompt"].split()}).encode())])
        return stream_of(["x"])(path, body)

    data = tmp_path / "s.json"
    turns = [("one two three four five", "a b c d e f g"), ("too short", "a b c d e f g")]
    data.write_text(json.dumps([{"conversations": [{"value": q}, {"value": a}]} for q, a in turns]))
    with serving(answer) as server:
        status, result = bench(server.url, tmp_path, "--dataset-name", "sharegpt", "--dataset-path", data, prompts=5)
    assert status == 0
    assert [(body["prompt"], body["max_tokens"]) for body in server.bodies] == [("one two three four five", 7)]
    assert result["completed"] == 1


def test_tokens_become_text_for_chat(tmp_path: Path) -> None:
    def answer(path: str, body: dict[str, Any]) -> Reply:
        if path == "/detokenize":
            return Reply([(0, json.dumps({"prompt": " ".join(map(str, body["tokens"]))}).encode())])
        return stream_of(["x"])(path, body)

    with serving(answer) as server:
        status, _ = bench(server.url, tmp_path, "--endpoint", "/v1/chat/completions", prompts=2)
    assert status == 0
    assert [len(body["messages"][0]["content"].split()) for body in server.bodies] == [8, 8]


def test_warm_ups_have_prompts_of_their_own(tmp_path: Path) -> None:
    with serving(stream_of(["x"])) as server:
        status, result = bench(server.url, tmp_path, "--num-warmups", 3, "--max-concurrency", 1, prompts=2)
    assert (status, result["completed"], len(server.bodies)) == (0, 2, 5)
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 5


def test_key_headers_and_body(tmp_path: Path) -> None:
    with serving(stream_of(["x"])) as server:
        flags = ("--api-key", "sk-1", "--header", "X-Team=a", "--extra-body", '{"priority": 3}', "--no-ignore-eos")
        bench(server.url + "/v1/", tmp_path, *flags, "--model", "mine", prompts=1)
    assert (server.bodies[0]["model"], server.bodies[0]["priority"]) == ("mine", 3)
    assert "ignore_eos" not in server.bodies[0]
    assert server.headers[0]["Authorization"] == "Bearer sk-1"
    assert server.headers[0]["X-Team"] == "a"


def test_some_requests_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every kind is counted and shown by its first message; the others' figures stand."""
    seen: list[int] = []

    def answer(path: str, body: dict[str, Any]) -> Reply:
        seen.append(1)
        busy = Reply([(0, json.dumps({"error": {"message": f"busy {len(seen)}"}}).encode())], status=429)
        broken = Reply([(0, event({"choices": [{"text": "a"}]})), (0, event({"error": {"message": "died"}}))])
        cut = Reply([(0, event({"choices": [{"text": "a"}]}))], cut=True)
        return {1: busy, 2: broken, 3: busy, 4: cut}.get(len(seen)) or stream_of(["a", "b"])(path, body)

    with serving(answer) as server:
        status, result = bench(server.url, tmp_path, "--max-concurrency", 1)
    assert status == 0
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (2, 4, 4)
    printed = capsys.readouterr().out
    assert "2 failed: HTTP 429, the first: busy 1" in printed
    assert "1 failed: error event, the first: died" in printed
    assert "1 failed: connection, the first: " in printed


def test_all_requests_fail(tmp_path: Path) -> None:
    with serving(lambda path, body: Reply([(0, b"oops")], status=500)) as server:
        status, result = bench(server.url, tmp_path, prompts=2)
    assert (status, result["completed"], result["errors"]) == (1, 0, ["HTTP 500: oops"] * 2)


def test_timeout(tmp_path: Path) -> None:
    with serving(lambda path, body: Reply([(0, event({"choices": []})), (30, b"")])) as server:
        status, result = bench(server.url, tmp_path, "--request-timeout", 0.3, prompts=1)
    assert (status, result["errors"]) == (1, ["timeout: no complete answer within 0.3 s"])


def test_unreachable_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert main(["--base-url", url, "--model", "m"]) == 2
    assert capsys.readouterr().err == f"octavo bench: cannot reach {url}: Connection refused\n"


def test_server_without_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --model it does without; else it says what is missing."""
    with serving(stream_of(["x"]), hide_models=True) as server:
        assert main(["--base-url", server.url]) == 2
        assert capsys.readouterr().err == (f"octavo bench: {server.url}/v1/models answers HTTP 404: no such route\n")
        status, _ = bench(server.url, tmp_path, "--model", "m", prompts=1)
    assert status == 0
    assert min(server.bodies[0]["prompt"]) >= 1000
    with serving(stream_of(["x"]), models={"data": []}) as server:
        assert main(["--base-url", server.url]) == 2
    assert "names no model; give one with --model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num-prompts", "0"], "--num-prompts: 0 is not above 0"),
        (["--max-concurrency", "-1"], "--max-concurrency: -1 is not above 0"),
        (["--request-rate", "nan"], "--request-rate: nan is not above 0"),
        (["--goodput", "itl:5"], "'itl:5' does not begin with ttft, tpot, e2el"),
        (["--goodput", "ttft:x"], "--goodput"),
        (["--metric-percentiles", "50,101"], "outside 0 to 100"),
        (["--percentile-metrics", "ttft,foo"], "'foo' is none of ttft, tpot, itl, e2el"),
        (["--base-url", "localhost:8000"], "does not begin with http://"),
        (["--extra-body", "[1]"], "not a JSON object"),
        (["--ramp-up-strategy", "linear"], "--ramp-up-start-rps"),
        (["--dataset-path", "x.json"], "--dataset-name sharegpt"),
        (["--engine", "--request-rate", "3"], "closed loop"),
        (["--kv-cache-memory", "lots"], "'lots' is not a size"),
        (["compre"], "no benchmark 'compre': name one of compare, export, "),
        (["--num-prompt", "3"], "unrecognized arguments: --num-prompt 3"),
    ],
)
def test_bad_flags(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(flags)
    assert exit.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("octavo bench: ")
    assert words in line


def test_help_shows_the_defaults_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "(default: 1000)" in text
    assert "(default: None)" not in text
    assert "(default: [])" not in text
    assert "(default: ttft tpot itl e2el)" in text


@pytest.mark.parametrize("name", BENCHES)
def test_every_benchmark_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main([name, "--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: octavo bench {name} ")
    assert not re.search(r"%%|default: (\)|\[|False)", text)


def test_a_chat_without_texts_names_the_missing_file_first(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(stream_of(["x"])) as server:
        flags = ["--base-url", server.url, "--endpoint", "/v1/chat/completions", "--num-prompts", "1"]
        assert main([*flags, "--dataset-name", "sharegpt"]) == 2
        assert capsys.readouterr().err.startswith("octavo bench: --dataset-path is missing: ")
        assert main(flags) == 2
        assert capsys.readouterr().err.startswith("octavo bench: /v1/chat/completions takes no tokens")


def test_missing_file_and_unwritable_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(stream_of(["x"])) as server:
        assert main(["--base-url", server.url, "--dataset-name", "sharegpt", "--dataset-path", "missing.json"]) == 2
        assert capsys.readouterr().err == "octavo bench: --dataset-path missing.json: No such file or directory\n"
        file = tmp_path / "file"
        file.write_text("")
        common = ["--base-url", server.url, "--num-prompts", "1", "--random-input-len", "4", "--save-result"]
        assert main([*common, "--result-dir", str(file)]) == 2
        assert "octavo bench: cannot write" in capsys.readouterr().err
        assert main([*common, "--result-dir", str(tmp_path), "--label", "mine"]) == 0
    (saved,) = tmp_path.glob("mine-infqps-model-*.json")
    assert "ttfts" not in json.loads(saved.read_bytes())


def test_ramp_up(tmp_path: Path) -> None:
    with serving(stream_of(["x"])) as server:
        flags = ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", 100, "--ramp-up-end-rps", 900)
        status, result = bench(server.url, tmp_path, *flags, prompts=20)
    assert (status, result["completed"]) == (0, 20)
    assert result["start_times"] == sorted(result["start_times"])
