"""OpenVINO GenAI's continuous batching behind just enough HTTP to be measured as the other servers are.

Runs in OpenVINO's own environment, so it imports nothing but that, numpy and the standard library. `step` holds
Python's lock while it computes, so a second thread would not help: sockets are served between two steps. Nothing is
tokenised or detokenised (prompts are ids, and so are answers), which flatters OpenVINO a little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LINE_END = b"\r\n"
TURNS = 6
"""Of the event loop between two steps: a connection is accepted, read, parsed and submitted within them."""


@dataclass(slots=True)
class Request:
    """One completion, streamed to its client as it is made."""

    ids: list[int]
    max_tokens: int
    ignore_eos: bool
    writer: asyncio.StreamWriter
    ended: asyncio.Event
    made: int = 0
    """Tokens sent."""

    def send(self, ids: list[int]) -> None:
        self.made += len(ids)
        text = "".join(f" {id_}" for id_ in ids)
        self.writer.write(_event({"choices": [{"index": 0, "text": text, "finish_reason": None}]}))

    def finish(self) -> None:
        usage = {"prompt_tokens": len(self.ids), "completion_tokens": self.made}
        self.writer.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        self.ended.set()


class Server:
    """GET /health and /v1/models; POST /v1/completions, streamed, with token ids as the prompt.

    start: submits a request to the pipeline; the handle.
    """

    def __init__(self, pipeline: Any, start: Callable[[Request], Any], model: str) -> None:
        self._pipeline = pipeline
        self._start = start
        self._card = {"id": model, "object": "model"}
        self._live: list[tuple[Request, Any]] = []
        self._woken = asyncio.Event()

    async def work(self) -> None:
        """Steps for ever; an error of the pipeline comes out here."""
        while True:
            self._woken.clear()
            if not self._live:
                await self._woken.wait()
            self._pipeline.step()
            self._live = [(request, handle) for request, handle in self._live if self._deliver(request, handle)]
            for _ in range(TURNS):
                await asyncio.sleep(0)

    @staticmethod
    def _deliver(request: Request, handle: Any) -> bool:
        """Send what a step made; whether there is more to come."""
        if request.writer.is_closing():
            handle.cancel()
            request.ended.set()
            return False
        while handle.can_read():
            for output in handle.read().values():
                request.send(list(output.generated_ids))
        if "RUNNING" in str(handle.get_status()):
            return True
        request.finish()
        return False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, then the connection is closed."""
        try:
            head = (await reader.readuntil(LINE_END * 2)).decode("latin-1")
            method, path, _ = head.split("\r\n", 1)[0].split(" ")
            lengths = [line[15:] for line in head.lower().split("\r\n") if line.startswith("content-length:")]
            body = await reader.readexactly(int(lengths[0]) if lengths else 0)
            if (method, path) == ("POST", "/v1/completions"):
                await self._complete(json.loads(body), writer)
            elif (method, path) == ("GET", "/v1/models"):
                self._answer(writer, 200, {"object": "list", "data": [self._card]})
            else:
                self._answer(writer, 200 if path == "/health" else 404, {})
        except (ValueError, KeyError, TypeError) as error:
            self._answer(writer, 400, {"error": {"message": f"{type(error).__name__}: {error}"}})
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    @staticmethod
    def _answer(writer: asyncio.StreamWriter, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} .\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + data)

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        ids, max_tokens = [int(id_) for id_ in body["prompt"]], int(body["max_tokens"])
        request = Request(ids, max_tokens, bool(body.get("ignore_eos")), writer, asyncio.Event())
        handle = self._start(request)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        self._live.append((request, handle))
        self._woken.set()
        await request.ended.wait()


def _event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


async def run(args: argparse.Namespace) -> None:
    """Load, then listen: whoever can connect can be served."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduling = genai.SchedulerConfig()
    scheduling.cache_size = args.cache_size
    scheduling.max_num_batched_tokens = args.max_num_batched_tokens
    scheduling.max_num_seqs = args.max_num_seqs
    scheduling.dynamic_split_fuse = True
    scheduling.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": args.threads} | dict(pair.split("=", 1) for pair in args.property)
    pipeline = genai.ContinuousBatchingPipeline(args.model, scheduling, "CPU", properties)
    numbers = iter(range(sys.maxsize))

    def start(request: Request) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = request.max_tokens, request.ignore_eos, False
        return pipeline.add_request(next(numbers), openvino.Tensor(np.array([request.ids], np.int64)), config)

    server = Server(pipeline, start, args.model)
    async with await asyncio.start_server(server.serve, "127.0.0.1", args.port):
        print(f"ready on port {args.port}", flush=True)
        await server.work()


def main() -> None:
    parser = argparse.ArgumentParser("openvino_server", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help="an IR folder, or a GGUF file")
    add("--port", type=int, required=True, help="on 127.0.0.1")
    add("--threads", type=int, required=True, help="INFERENCE_NUM_THREADS")
    add("--cache-size", type=int, default=2, help="GB of keys and values")
    add("--max-num-batched-tokens", type=int, default=512, help="tokens of a step")
    add("--max-num-seqs", type=int, default=64, help="requests of a step")
    add("--property", action="append", default=[], metavar="NAME=VALUE", help="of the CPU plugin; repeatable")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
