"""OpenVINO GenAI's continuous batching behind just enough HTTP to be measured as the other servers are.

Runs in OpenVINO's own environment, so it imports nothing but that, numpy and the standard library. One thread calls
`step`; the event loop takes requests and writes events, all events of a step woken at once. It neither tokenises nor
detokenises (prompts are ids, and so are answers), which flatters OpenVINO a little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LINE_END = b"\r\n"


@dataclass(slots=True)
class Request:
    """One completion. `events` gets lists of new token ids, then None."""

    ids: list[int]
    max_tokens: int
    ignore_eos: bool
    events: asyncio.Queue[list[int] | None] = field(default_factory=asyncio.Queue)
    gone: bool = False
    """The client hung up."""


class Stepper(threading.Thread):
    """Owns the pipeline: nobody else touches it."""

    def __init__(self, pipeline: Any, start: Callable[[Request], Any], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(daemon=True)
        self.inbox: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._pipeline = pipeline
        self._start = start
        self._loop = loop

    def run(self) -> None:
        try:
            self._work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # else clients would wait for ever

    def _work(self) -> None:
        live: list[tuple[Request, Any]] = []
        while True:
            while not live or not self.inbox.empty():
                request = self.inbox.get()
                live.append((request, self._start(request)))
            self._pipeline.step()
            live = self._deliver(live)

    def _deliver(self, live: list[tuple[Request, Any]]) -> list[tuple[Request, Any]]:
        news: list[tuple[Request, list[int] | None]] = []
        running = []
        for request, handle in live:
            # Status first: what is generated before it says "finished" can all be read after.
            ended = "RUNNING" not in str(handle.get_status())
            while handle.can_read():
                news += [(request, list(output.generated_ids)) for output in handle.read().values()]
            if request.gone:
                handle.cancel()
            elif ended:
                news.append((request, None))
            else:
                running.append((request, handle))
        self._loop.call_soon_threadsafe(_tell, news)
        return running


def _tell(news: list[tuple[Request, list[int] | None]]) -> None:
    for request, ids in news:
        request.events.put_nowait(ids)


class Server:
    """GET /health and /v1/models; POST /v1/completions, streamed, with token ids as the prompt."""

    def __init__(self, stepper: Stepper, model: str, vocab_size: int | None) -> None:
        self._stepper = stepper
        self._card = {"id": model, "object": "model", "vocab_size": vocab_size}

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
            await writer.drain()
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
        request = Request([int(id_) for id_ in body["prompt"]], int(body["max_tokens"]), bool(body.get("ignore_eos")))
        self._stepper.inbox.put(request)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        count = 0
        try:
            while (ids := await request.events.get()) is not None:
                count += len(ids)
                text = "".join(f" {id_}" for id_ in ids)
                writer.write(_event({"choices": [{"index": 0, "text": text, "finish_reason": None}]}))
                await writer.drain()
        finally:
            request.gone = True
        usage = {"prompt_tokens": len(request.ids), "completion_tokens": count}
        writer.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")


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

    stepper = Stepper(pipeline, start, asyncio.get_running_loop())
    stepper.start()
    server = await asyncio.start_server(Server(stepper, args.model, args.vocab_size).serve, "127.0.0.1", args.port)
    print(f"ready on port {args.port}", flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser("openvino_server", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help="an IR folder, or a GGUF file")
    add("--port", type=int, required=True, help="on 127.0.0.1")
    add("--threads", type=int, required=True, help="INFERENCE_NUM_THREADS")
    add("--cache-size", type=int, default=2, help="GB of keys and values")
    add("--max-num-batched-tokens", type=int, default=512, help="tokens of a step")
    add("--max-num-seqs", type=int, default=64, help="requests of a step")
    add("--vocab-size", type=int, help="what /v1/models says")
    add("--property", action="append", default=[], metavar="NAME=VALUE", help="of the CPU plugin; repeatable")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
