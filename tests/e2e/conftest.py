"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.daemon import Daemon, serve


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """One server for all tests that leave it as they found it."""
    with serve("--max-num-seqs", "32") as running:
        yield running
