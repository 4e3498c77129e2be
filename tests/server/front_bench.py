"""What an event costs the API process: the real server on a real port, a fake engine process, many reading clients.

    python -m tests.server.front_bench --streams 32 --path chat [--profile]

    this process: clients ◀── HTTP ── API process (measured) ◀── socket pair ── fake engine, one token a step and stream

The figure is events per second of the API process's own CPU time, so that a busy machine matters less. The engine's
pace leaves the process time to spare: then every token is an event of its own, and no figure is flattered by merged
tokens. `--profile` runs it once more under cProfile, which slows it but shows where the time goes.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from server.engine_process import EngineProcess
from server.logs import start_logging
from server.settings import Settings
from server.start import serve
from tests.server.running import CHAT, COMPLETIONS

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 900
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
    "completions": (COMPLETIONS, {"prompt": "Once"}),
}


class Reader(asyncio.Protocol):
    """One client: sends its request, counts the events that come."""

    def __init__(self, request: bytes) -> None:
        self.events = 0
        self.ended = asyncio.get_running_loop().create_future()
        self._request = request
        self._last = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.events += (self._last + data).count(b"\n\n")  # JSON has no newline, and HTTP's are not alone
        self._last = data[-1:] if data[-1:] == b"\n" != data[-2:-1] else b""

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)


@dataclass(frozen=True, slots=True)
class Window:
    """Some seconds in the middle of a run, with all streams running."""

    events: int
    seconds: float
    cpu: float
    """Of the API process, all its threads, user and system."""
    merged: int
    """Tokens of the whole run that shared an event with another."""

    def __str__(self) -> str:
        return (
            f"{self.events / self.cpu:8.0f} events per CPU second, {self.cpu / self.events * 1e6:5.1f} µs an event "
            f"({self.events / self.seconds:.0f} events/s offered, {self.cpu / self.seconds:.0%} of a core, "
            f"{self.merged} tokens merged)"
        )


def cpu_seconds(pid: int) -> float:
    """All threads of a process: the kernel's number for its CPU clock, see clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


async def read(port: int, pid: int, path: str, streams: int, seconds: float) -> Window:
    """Open the streams, measure while all of them run, wait for their ends."""
    route, fields = BODIES[path]
    body = json.dumps({**fields, "stream": True, "max_tokens": TOKENS, "ignore_eos": True}).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    opened = [loop.create_connection(lambda: Reader(head.encode() + body), "127.0.0.1", port) for _ in range(streams)]
    readers = [reader for _, reader in await asyncio.gather(*opened)]
    while min(reader.events for reader in readers) < 50:
        await asyncio.sleep(0.01)
    began, cpu, events = time.monotonic(), cpu_seconds(pid), sum(reader.events for reader in readers)
    await asyncio.sleep(seconds)
    window = time.monotonic() - began, cpu_seconds(pid) - cpu, sum(reader.events for reader in readers) - events
    assert not any(reader.ended.done() for reader in readers), "streams ended in the window: make it shorter"
    await asyncio.gather(*(reader.ended for reader in readers))
    extra = 3 if path == "chat" else 1  # chat: role and end; both: [DONE]
    merged = streams * (TOKENS + extra) - sum(reader.events for reader in readers)
    return Window(window[2], window[0], window[1], merged)


def measure(path: str, streams: int, step: float, seconds: float, repeat: int, profile: Path | None) -> list[Window]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    server = [sys.executable, "-m", "tests.server.front_bench", "--serve", str(port)]
    file = ["--profile-file", str(profile)] if profile else []
    process = subprocess.Popen([*server, "--streams", str(streams), "--step", str(step), *file], cwd=ROOT)
    try:
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                assert process.poll() is None, "the server ended"
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        return [asyncio.run(read(port, process.pid, path, streams, seconds)) for _ in range(repeat)]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def profile_lines(profile: Path, events: int) -> list[str]:
    """The functions with the most time of their own, per event."""
    stats = pstats.Stats(str(profile))
    rows = sorted(stats.stats.items(), key=lambda item: -item[1][2])  # type: ignore[attr-defined]
    lines = ["  µs of its own, calls; per event, under the profiler"]
    for (file, line, name), (_, calls, own, _, _) in rows[:40]:
        where = name if file == "~" else f"{'/'.join(Path(file).parts[-2:])}:{line} {name}"
        lines.append(f"{own / events * 1e6:10.2f} {calls / events:8.2f}  {where}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--path", choices=BODIES, default="chat")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--step", type=float, default=0.012, help="seconds of the engine's steps")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long the measured window is")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--serve", type=int, metavar="PORT", help="be the API process")
    parser.add_argument("--profile-file", help="where the API process writes its profile")
    args = parser.parse_args()
    if args.serve:
        start_logging("warning", "text")
        worker = (
            sys.executable,
            "-m",
            "tests.server.fake_engine",
            "--interval",
            str(args.step),
            "--max-running",
            "999",
        )
        profiler = cProfile.Profile()
        signal.signal(signal.SIGUSR1, lambda *_: profiler.enable() if args.profile_file else None)
        with EngineProcess(worker) as engine:
            status = serve(Settings(port=args.serve, max_num_seqs=args.streams, log_level="warning"), engine)
        if args.profile_file:
            profiler.disable()
            profiler.dump_stats(args.profile_file)
        sys.exit(status)
    windows = measure(args.path, args.streams, args.step, args.seconds, args.repeat, None)
    median = statistics.median(window.events / window.cpu for window in windows)
    lines = [*map(str, windows), f"median {median:.0f} events per CPU second"]
    if args.profile:
        with tempfile.NamedTemporaryFile() as file:
            measure(args.path, args.streams, args.step * 2, args.seconds, 1, Path(file.name))
            lines += profile_lines(Path(file.name), args.streams * TOKENS)
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
