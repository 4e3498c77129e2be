"""The first second of `octavo serve`: what can be refused at once.

Nothing here may bring in FastAPI and the routes: that takes longer than all this, and the engine is on its way.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket

from model.errors import ModelError
from model.source import resolve
from scheduler.messages import Progress
from server.connections import allow_files
from server.engine_process import EngineProcess
from server.settings import Settings

log = logging.getLogger("octavo")


class StartError(Exception):
    """The server cannot start; one line says why."""


def bind(host: str, port: int) -> socket.socket:
    """The listening socket, taken before anything is loaded. Raises StartError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except socket.gaierror as error:
        raise StartError(f"--host {host}: {error.strerror}") from None
    except UnicodeError as error:
        raise StartError(f"--host {host}: {error}") from None
    except OSError as error:
        # Not its own words, which name the address a second time.
        reason = os.strerror(error.errno) if error.errno else str(error)
        hint = "; --port takes another one, 0 any that is free" if error.errno == errno.EADDRINUSE else ""
        raise StartError(f"cannot listen on {host} port {port}: {reason}{hint}") from None


def report(progress: Progress) -> None:
    """One line per stage; the stage "warning" is one."""
    if progress.stage == "warning":
        warn(progress.detail)
    else:
        log.info("%-9s %s", progress.stage, progress.detail)


def warn(text: str) -> None:
    log.warning("%s", text)


def serve(settings: Settings, engine: EngineProcess) -> int:
    """Run the server; the exit status. `engine` waits for its configuration. Raises StartError."""
    with bind(settings.host, settings.port) as sock:
        try:
            source = resolve(settings.model)
        except ModelError as error:
            raise StartError(str(error)) from None
        from server.daemon import Daemon

        if (room := allow_files()) < settings.max_connections:
            warn(f"--max-connections {settings.max_connections}: open files are limited, so that {room} remain")
        report(Progress("model", f"{source.name}: {source.kind} {source.path}"))
        report(Progress("import", "torch and the model code"))

        async def run() -> int:
            return await Daemon(settings, sock, source, engine).run()

        return asyncio.run(run())
