"""What a refusal costs: many clients connect, then all ask at once for a seat that is not there.

    python -m tests.server.crowd_bench

The clients are in the server's own process here, so each time holds some of theirs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from statistics import median

from model.source import resolve
from model.tokenizer import load_tokenizer
from server.connections import allow_files
from tests.server.running import CHAT, Running, running

CROWD = 500


@dataclass(frozen=True, slots=True)
class Refusal:
    head: bytes
    seconds: float
    """From the moment at which all began to ask."""

    @property
    def status(self) -> bytes:
        return self.head.partition(b"\r\n")[0]

    @property
    def milliseconds(self) -> int:
        """What the server says that it spent."""
        return int(self.head.partition(b"openai-processing-ms: ")[2].split()[0])


async def ask(port: int, body: bytes) -> list[Refusal]:
    """Everybody says the whole head and only the beginning of the body."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CROWD)]
    began = time.perf_counter()
    for _, writer in streams:
        writer.write(head.encode() + body[:1000])

    async def answer(reader: asyncio.StreamReader) -> Refusal:
        return Refusal(await reader.readuntil(b"\r\n\r\n"), time.perf_counter() - began)

    try:
        return await asyncio.gather(*(answer(reader) for reader, _ in streams))
    finally:
        for _, writer in streams:
            writer.transport.abort()


def refused(server: Running) -> list[Refusal]:
    """By a server of one seat and no queue, whose seat is taken."""
    allow_files()
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 100_000}]}).encode()
    server.call(lambda: server.service.admission.reserve(1))
    try:
        return asyncio.run(ask(server.port, body))
    finally:
        server.call(lambda: server.service.admission.release(1))


def main() -> None:
    with running(load_tokenizer(resolve(None)), max_num_seqs=1, max_queued_requests=0) as server:
        for _ in range(3):
            found = refused(server)
            spent = [refusal.milliseconds for refusal in found]
            last = max(refusal.seconds for refusal in found)
            sys.stdout.write(
                f"{len(found)} refused: {median(spent):.0f} ms of the server's time each (worst {max(spent)}), "
                f"the last answer after {last * 1e3:.0f} ms, {last / len(found) * 1e3:.2f} ms apart\n"
            )


if __name__ == "__main__":
    main()
