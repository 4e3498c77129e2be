"""How each server is found and started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loadtest.peers import KINDS, TITLES, Conditions, NotFound, Peer, version_of


def on(tmp_path: Path, **programs: str) -> Conditions:
    return Conditions(weights=tmp_path, concurrency=32, context=768, threads=3, programs=programs)


def following(peer: Peer, flag: str) -> str:
    command = peer.started_on(4321)
    return command[command.index(flag) + 1]


@pytest.fixture
def python(tmp_path: Path) -> str:
    (tmp_path / "transformers").touch()
    return str(tmp_path / "python")


def test_every_kind_gets_the_port_the_weights_and_the_threads(tmp_path: Path, python: str) -> None:
    conditions = on(tmp_path, llama="llama-server", vllm=python, openvino=python, transformers=python)
    assert KINDS.keys() == TITLES.keys()
    for kind, make in KINDS.items():
        peer = make("label", conditions)
        assert (peer.name, peer.kind) == ("label", kind)
        assert following(peer, "--port") == "4321"
        assert any(part.startswith(str(tmp_path)) for part in peer.command[1:]), kind
    vllm, openvino = KINDS["vllm"]("v", conditions), KINDS["openvino"]("o", conditions)
    llama, transformers = KINDS["llama"]("l", conditions), KINDS["transformers"]("t", conditions)
    assert vllm.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-2"
    assert (following(llama, "-t"), following(llama, "--parallel"), following(llama, "-c")) == ("3", "32", "24576")
    assert following(openvino, "--threads") == transformers.environment["OMP_NUM_THREADS"] == "3"
    assert not transformers.takes_tokens
    assert "ignore_eos" not in transformers.body


def test_openvino_prefers_its_own_format(tmp_path: Path) -> None:
    conditions = on(tmp_path, openvino="python")
    assert following(KINDS["openvino"]("o", conditions), "--model") == str(tmp_path / "f16.gguf")
    (tmp_path / "openvino").mkdir()
    assert following(KINDS["openvino"]("o", conditions), "--model") == str(tmp_path / "openvino")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("llama", "--llama-server"),
        ("vllm", "--vllm-python"),
        ("openvino", "--openvino-python"),
        ("transformers", "no "),
    ],
)
def test_not_found(kind: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(NotFound, match=words):
        KINDS[kind]("x", on(tmp_path))


def test_versions() -> None:
    def asked(*script: str) -> str | None:
        return version_of(Peer("x", "x", (), version=(sys.executable, "-c", *script)))

    assert asked("print('hello'); print('version: 1.2')") == "version: 1.2"
    assert asked("import sys; sys.exit('version 1')") is None
    assert version_of(Peer("x", "x", (), version=("/no/such/program",))) is None
    assert version_of(Peer("x", "x", ())) is None
