"""Faults at start: one clear line, exit code 2, no traceback."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest


def start(*flags: str) -> tuple[int, str]:
    """Exit code and stderr of `octavo serve FLAGS`, which is expected to end by itself."""
    done = subprocess.run(
        [sys.executable, "-m", "server", "serve", *flags], capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["./no-such-folder"], "no-such-folder"),
        (["/no/such/model.gguf"], "model.gguf"),
        (["--kv-cache-memory", "1000"], "--kv-cache-memory"),
        (["--kv-cache-memory", "lots"], "kv-cache-memory"),
        (["--port", "70000"], "port"),
        (["--dtype", "int3"], "dtype"),
        (["--no-such-flag"], "no-such-flag"),
        (["--prot", "8123"], "unrecognized arguments: --prot"),
        (["--host", "no host"], "--host no host: "),
    ],
)
def test_a_fault_is_one_line(flags: list[str], named: str) -> None:
    code, err = start(*flags)
    last = err.strip().splitlines()[-1]
    assert code == 2, err
    assert named in last
    assert "Traceback" not in err


def test_an_unreadable_file(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 64)
    code, err = start(str(broken))
    assert code == 2, err
    assert "broken.gguf" in err.strip().splitlines()[-1]
    assert "Traceback" not in err


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, err = start("--port", str(port))
    assert code == 2, err
    (line,) = err.splitlines()
    assert line == (
        f"octavo: cannot listen on 127.0.0.1 port {port}: Address already in use; --port takes another one, "
        "0 any that is free"
    )
