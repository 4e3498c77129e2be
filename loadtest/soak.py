"""octavo bench soak: a server of its own under mixed traffic with faults, for as long as one likes.

    warm-up ── idle: memory and files ── main run, engine killed now and then ── idle: what has not come back?

Clients ask for everything there is, some again and again what must always get the same text; some leave, some do not
read, some send what is no request, some come all at once. It is broken where an error is explained by none of that, a
text changes, or blocks, files or memory do not come back; then the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np

from loadtest.extras import MissingExtra, extra
from loadtest.options import Flags, Help, byte_count, positive, shell_words
from loadtest.peers import PORT, Peer
from loadtest.running import Died, Running, running, tree
from loadtest.soak_clients import START_SECONDS, Clients, Seen
from loadtest.soak_traffic import Traffic

FLAGS = (
    *("--max-num-seqs", "32", "--max-queued-requests", "32", "--max-model-len", "2048"),
    *("--kv-cache-memory", "256MiB", "--send-timeout", "5", "--log-level", "warning"),
)
WARM_UP = 0.2
"""Share of the time."""
IDLE_SECONDS = 10.0
SPARE_FILES = 8
MIB = 1 << 20
BROKEN, BAD_START, INTERRUPTED = 1, 2, 130
GAUGES = ("octavo_requests_running", "octavo_requests_waiting", "octavo_requests_in_flight", "octavo_kv_blocks, active")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of server and engine together."""

    resident: int = 0
    """Bytes."""
    files: int = 0

    @classmethod
    def of(cls, server: Running) -> Footprint:
        resident = files = 0
        for process in tree(server.process.pid):
            with contextlib.suppress(extra("psutil").Error):
                resident += process.memory_info().rss
                files += process.num_fds()
        return cls(resident, files)


async def scrape(base_url: str) -> dict[str, float]:
    """Sums of the samples of each name, by state where they have one; empty where nobody answers."""
    found: dict[str, float] = {}
    timeout = aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(base_url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    for line in lines:
        series, _, value = line.rpartition(" ")
        name, _, labels = series.partition("{")
        if name.startswith("octavo_"):
            state = labels.partition('state="')[2].partition('"')[0]
            key = f"{name}, {state}" if state else name
            found[key] = found.get(key, 0.0) + float(value)
    return found


async def idle(base_url: str) -> dict[str, float]:
    """Wait until the server rests; what does not come to zero."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        values = await scrape(base_url)
        busy = {name: values[name] for name in GAUGES if values[name] != 0}
        if not busy or time.monotonic() > deadline:
            return busy
        await asyncio.sleep(0.2)


async def call_checkers(base_url: str) -> None:
    """The processes that check grammars start with the first of them. A short warm-up may ask for none; then their
    files would look like a leak."""
    body = {"prompt": "x", "max_tokens": 1, "structured_outputs": {"regex": "a"}}
    async with aiohttp.ClientSession() as session, session.post(f"{base_url}/v1/completions", json=body) as response:
        await response.read()


class Watch:
    """Prints a line now and then, and keeps sums and peaks."""

    def __init__(self, server: Running, clients: Clients, interval: float) -> None:
        self.total = Seen()
        self.peak = Footprint()
        self._server = server
        self._clients = clients
        self._interval = interval

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            self.look()

    def look(self) -> None:
        seen, self._clients.seen = self._clients.seen, Seen()
        self.total.add(seen)
        now, here, total = time.monotonic(), Footprint.of(self._server), self.total
        self.peak = Footprint(max(self.peak.resident, here.resident), max(self.peak.files, here.files))
        print(
            f"{now - total.began:5.0f} s  {seen.tokens / max(0.1, now - seen.began):5.0f} tokens/s  "
            f"TTFT {_times(seen.ttft)}  {here.resident / MIB:.0f} MiB  {here.files} files  "
            f"{_counts(total.ends)}, {total.bursts} bursts, {total.kills} kills",
            flush=True,
        )
        for what, count in seen.broken.items():
            print(f"        BROKEN: {count} x {what}", flush=True)


async def soak(args: argparse.Namespace, log: Path) -> list[str]:
    """One run; what is broken. Raises Died where the server does not start."""
    command = (sys.executable, "-m", "server", "serve", "--port", PORT, *FLAGS, *args.serve_flags)
    async with running(Peer("octavo", "octavo", command), log, START_SECONDS) as server:
        clients = Clients(server, Traffic(args.seed), args.concurrency)
        watch = Watch(server, clients, args.interval)
        watching = asyncio.create_task(watch.run())
        try:
            await clients.run(WARM_UP * args.duration, WARM_UP * args.duration / 2, None)
            await call_checkers(server.base_url)
            await idle(server.base_url)
            before = Footprint.of(server)
            kills = None if args.no_kill else args.kill_every
            await clients.run((1 - WARM_UP) * args.duration, args.burst_every, kills)
            busy = await idle(server.base_url)
        except Died as error:
            watch.look()
            return [*_faults(watch.total), f"the server has died: {error}"]
        finally:
            watching.cancel()
        watch.look()
        after, values = Footprint.of(server), await scrape(server.base_url)
        broken = [*_faults(watch.total), *(f"{name} is {value:g} on an idle server" for name, value in busy.items())]
        if (grown := after.resident - before.resident) > args.max_growth:
            broken.append(f"{grown / MIB:.0f} MiB more than behind the warm-up, {args.max_growth / MIB:.0f} allowed")
        if (more := after.files - before.files) > SPARE_FILES:
            broken.append(f"{more} open files more than behind the warm-up, {SPARE_FILES} allowed")
        for line in _figures(watch, before, after, values):
            print(line)
    if (status := server.process.returncode) != 0:
        broken.append(f"exit status {status} after SIGTERM")
    return broken


def _faults(total: Seen) -> list[str]:
    return [f"{count} x {what}" for what, count in total.broken.items()]


def _figures(watch: Watch, before: Footprint, after: Footprint, values: dict[str, float]) -> list[str]:
    total, peak = watch.total, watch.peak
    seconds = time.monotonic() - total.began
    restarts = values.get("octavo_engine_restarts_total")
    rows = {
        "requests": f"{total.kinds.total()} in {seconds:.0f} s: {_counts(total.kinds)}",
        "ends": _counts(total.ends),
        "output": f"{total.tokens / seconds:.1f} tokens/s",
        "TTFT": _times(total.ttft),
        "memory": f"{before.resident / MIB:.0f} MiB behind the warm-up, {peak.resident / MIB:.0f} at the peak, "
        f"{after.resident / MIB:.0f} at the end",
        "open files": f"{before.files} behind the warm-up, {peak.files} at the peak, {after.files} at the end",
        "blocks": f"{values['octavo_kv_blocks, active']:g} in use at the end",
        "faults": f"{total.bursts} bursts, {total.kills} kills, "
        f"{'unknown' if restarts is None else f'{restarts:g}'} restarts of the engine; "
        f"{values['octavo_connections_dropped_total']:g} connections dropped by the server",
    }
    return [f"{name:<11} {value}" for name, value in rows.items()]


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counter.most_common())


def _times(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    return f"p50 {np.percentile(seconds, 50):.2f} s, p99 {np.percentile(seconds, 99):.2f} s"


# ---- the command ----


def make_parser() -> argparse.ArgumentParser:
    parser = Flags(
        "octavo bench soak",
        description="Start a server, treat it badly for a while, and see whether anything is lost.",
        formatter_class=Help,
    )
    add = parser.add_argument
    add("--duration", type=positive(float), default=600.0, help="seconds, a fifth of them as a warm-up")
    add("--concurrency", type=positive(int), default=24, help="clients")
    add("--interval", type=positive(float), default=30.0, help="seconds between two lines")
    add("--burst-every", type=positive(float), default=60.0, help="seconds between bursts")
    add("--kill-every", type=positive(float), default=90.0, help="seconds between kills of the engine")
    add("--no-kill", action="store_true", help="leave the engine alone")
    add("--max-growth", type=byte_count, default=128 * MIB, metavar="BYTES", help="of memory behind the warm-up")
    serve = "more flags of `octavo serve`, in one string"
    add("--serve-flags", type=shell_words, default=[], metavar="FLAGS", help=serve)
    add("--seed", type=int, default=0, help="of all that is drawn")
    return parser


def main(argv: Sequence[str]) -> int:
    """The exit status: 0; 1 where something is broken; 2 where the run could not start, with one line why."""
    args = make_parser().parse_args(argv)
    log = Path(tempfile.mkstemp(prefix="octavo-soak-", suffix=".log")[1])
    try:
        broken = asyncio.run(soak(args, log))
    except (Died, MissingExtra) as error:
        print(f"octavo bench soak: {error}", file=sys.stderr)
        return BAD_START
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED
    if broken:
        print("\n".join(f"BROKEN: {what}" for what in broken))
        print(f"the server's log: {log}")
        return BROKEN
    log.unlink()
    print("nothing is broken")
    return 0
