"""Servers whose engines can be made to fail."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from tests.e2e.daemon import Daemon, serve

SERVER = ("-m", "tests.faults.server")


def engine(daemon: Daemon) -> psutil.Process:
    """The engine's process that is now."""
    found = [p for p in daemon.processes()[1:] if "tests.faults.worker" in p.cmdline()]
    assert len(found) == 1, found
    return found[0]


def restarts(daemon: Daemon) -> int:
    return int(daemon.metric("octavo_engine_restarts_total"))


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One for all tests of a module; whatever they do to its engine, it serves."""
    with serve("--max-num-seqs", "40", "--watchdog-timeout", "3", program=SERVER) as running:
        yield running
