"""One run of `octavo serve`, from the bound port to the exit status.

    bind ── start engine, listen (503: loading) ── load tokenizer ── engine ready ── serve ──┐
                                                                                             │ SIGTERM, SIGINT
    exit 0 ◀── stop engine ◀── close connections ◀── drain: no new requests, wait, fail ◀────┘

An engine that dies is replaced meanwhile (`supervisor`); where none is left, the exit status is 1.

uvicorn would close the port at SIGTERM, at once; so it never sees a signal, and drains when it is told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn

from model.errors import ModelError
from model.grammar import Vocabulary
from model.source import ModelSource
from model.tokenizer import GenerationDefaults, Tokenizer, load_tokenizer
from scheduler.messages import Progress, Ready
from server.admission import Admission
from server.app import create_app
from server.connection import Connection
from server.drain import CLOSE_SECONDS, drain
from server.engine_client import EngineClient, EngineFailed
from server.engine_process import EngineProcess
from server.errors import RequestError
from server.metrics import Metrics
from server.parsing.detect import detect
from server.parsing.formats import HERMES
from server.prompts import PromptBuilder, PromptLimits
from server.sampling import Sampling
from server.service import Loaded, Service
from server.settings import Settings
from server.sleep import Sleep
from server.start import StartError, report
from server.structured.compiler import Structures
from server.supervisor import Supervisor
from server.tracing import Tracer

log = logging.getLogger("octavo")

HEADER_BYTES = 64 * 1024
KEEP_ALIVE_SECONDS = 75
"""Longer than load balancers keep an idle connection, so that none of them writes to one that was just closed."""
BACKLOG, AT_ONCE = 2048, 16
"""Connections that wait to be accepted, and those accepted in one go. asyncio has one number for both. It accepts
before it makes connections of what it accepted, and one that is dropped keeps its file for another turn of the loop:
up to four goes are open beyond the limit of `connections`, which leaves OWN_FILES for them."""
SHUT_DOWN = "The server shut down before this request was finished."
GONE_SECONDS = 1.0
"""A server without an engine answers 503 for so long, and ends with an error."""
OK, FAILED = 0, 1


class _Uvicorn(uvicorn.Server):
    """Without signal handlers of its own."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_service(settings: Settings, names: tuple[str, ...]) -> Service:
    """A service whose engine is not connected yet. On a running event loop. Raises StartError."""
    client = EngineClient(settings.max_num_seqs, settings.watchdog_timeout)
    admission = Admission(
        settings.max_num_seqs,
        settings.max_queued_requests,
        settings.max_queued_tokens,
        lambda: client.queued_tokens,
        lambda: client.computed_tokens,
    )
    service = Service(settings, client, admission, Metrics(), names)
    if settings.otlp_traces_endpoint is not None:
        service.tracer = Tracer(settings.otlp_traces_endpoint)
    client.on_progress = report
    client.on_step = service.metrics.step
    client.on_gap = service.metrics.inter_token.observe
    client.on_return = partial(renew, service)
    return service


def make_http(service: Service) -> uvicorn.Server:
    """The HTTP server of a service."""
    http: Any = partial(Connection, service.connections)
    config = uvicorn.Config(
        create_app(service),
        http=http,
        backlog=AT_ONCE,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    return _Uvicorn(config)


def limits_of(ready: Ready) -> PromptLimits:
    pool = ready.num_blocks, ready.block_size, ready.windows, ready.max_num_batched_tokens
    return PromptLimits(ready.max_model_len, ready.vocab_size, *pool)


def renew(service: Service, ready: Ready) -> None:
    """Another engine took the place of the one before; it may hold less, where memory has become short."""
    if service.loaded is not None:
        service.loaded = replace(service.loaded, ready=ready)
        service.loaded.prompts.limits = limits_of(ready)


def make_loaded(settings: Settings, tokenizer: Tokenizer, ready: Ready) -> Loaded:
    """What requests need of the model. Raises StartError where the chat template is of no use."""
    try:
        file = settings.chat_template
        given = None if file is None else file.read_text(encoding="utf-8")
        templates = "\n".join(tokenizer.chat_templates.values()) if given is None else given
        formats = detect(templates, tokenizer, settings.tool_call_parser, settings.reasoning_parser)
        prompts = PromptBuilder(
            tokenizer,
            limits_of(ready),
            template=given,
            tool_format=formats.tools or HERMES,
            allow_special_in_content=settings.allow_special_tokens_in_content,
            trust_templates=settings.trust_request_chat_template,
        )
    except (RequestError, OSError, UnicodeError) as error:
        raise StartError(f"--chat-template {settings.chat_template or 'of the model'}: {error}") from None
    defaults = tokenizer.generation_defaults if settings.generation_config == "auto" else GenerationDefaults()
    if defaults != GenerationDefaults():
        report(Progress("sampling", f"defaults of the model's generation_config: {defaults}"))
    sampling = Sampling(tokenizer, defaults, ready.vocab_size, settings.seed)
    structures = Structures(lambda: Vocabulary.of(tokenizer, ready.vocab_size))
    return Loaded(ready, tokenizer, prompts, sampling, formats, structures)


class Daemon:
    """Owns the service, the engine's supervisor and the HTTP server."""

    def __init__(
        self,
        settings: Settings,
        sock: socket.socket,
        source: ModelSource,
        engine: EngineProcess,
    ) -> None:
        """`engine`: the process that was begun already; another is made where that dies."""
        self.service = make_service(settings, tuple(settings.served_model_name) or (source.name,))
        self._settings = settings
        self._source = source
        self._sock = sock
        self._supervisor = Supervisor(
            self.service.client,
            settings.engine(),
            engine,
            EngineProcess,
            settings.max_engine_restarts,
            self.service.metrics.engine_restarts,
        )
        if settings.enable_sleep_mode:
            client, admission = self.service.client, self.service.admission
            self.service.sleep = Sleep(client, admission, self._supervisor, settings.drain_timeout)
        self._stopping = asyncio.Event()
        self._signals = 0
        self._http = make_http(self.service)

    async def run(self) -> int:
        """Serve until told to stop; the exit status. Raises StartError where the engine cannot start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        if self._settings.api_keys_file is not None:
            loop.add_signal_handler(signal.SIGHUP, self.service.keys.reload)
        http = asyncio.create_task(self._http.serve([self._sock]), name="http")
        self._supervisor.start()
        loading = asyncio.create_task(self._load(), name="load")
        stopping = asyncio.create_task(self._stopping.wait())
        gone = asyncio.create_task(self.service.client.gone.wait())
        try:
            await asyncio.wait((loading, stopping, http), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                await asyncio.wait((stopping, gone, http), return_when=asyncio.FIRST_COMPLETED)
            if http.done():
                http.result()
                return FAILED
            if self.service.client.gone.is_set():
                await asyncio.wait((stopping,), timeout=GONE_SECONDS)
                return FAILED
            await self._drain()
            return OK
        finally:
            for task in (loading, stopping, gone):
                task.cancel()
            self._http.should_exit = True
            await asyncio.gather(http, loading, return_exceptions=True)
            await self._supervisor.stop()
            if self.service.loaded is not None:
                self.service.loaded.close()

    async def _load(self) -> None:
        """Everything between an open port and a server that is ready."""
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, self._source)
            ready = await asyncio.shield(self.service.client.ready)
        except (EngineFailed, ModelError) as error:
            raise StartError(str(error)) from None
        self.service.loaded = make_loaded(self._settings, tokenizer, ready)
        # What is loaded stays; a collector that walks it again and again would only cost pauses.
        gc.freeze()
        host, port = self._sock.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        report(Progress("ready", f"{', '.join(self.service.names)} on http://{name}:{port}/v1"))

    def _on_signal(self) -> None:
        """The first one drains; the next ends the process, and with it, by its closed socket, the engine."""
        self._signals += 1
        if self._signals == 1:
            self.service.draining = True
            self._stopping.set()
            return
        log.warning("second signal: ending at once")
        self._supervisor.kill()
        os._exit(FAILED)

    async def _drain(self) -> None:
        """Let what runs end; after --drain-timeout end it, with an error that its clients can read."""
        service, seconds = self.service, self._settings.drain_timeout
        report(Progress("drain", f"{service.admission.requests} requests in flight, at most {seconds:g} s"))
        await drain(service.client, service.admission, seconds, SHUT_DOWN, service.client.gone.is_set)
