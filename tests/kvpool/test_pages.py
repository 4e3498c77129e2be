"""The pool's memory: zero, backed in the background, given back."""

from __future__ import annotations

import gc
import sys
import threading

import psutil
import pytest

from kvpool.pages import BACKER, PIECE, zeroed


def settle() -> None:
    for thread in threading.enumerate():
        if thread.name == BACKER:
            thread.join(60)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for its pages")
def test_memory_is_zero_backed_soon_and_given_back() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    size = 40 * PIECE + 12_345
    data = zeroed(size)
    settle()
    assert data.shape == (size,)
    assert process.memory_info().rss - before > 0.9 * size
    assert not data.any()
    data[-1] = 7
    del data
    gc.collect()
    assert process.memory_info().rss - before < 0.2 * size


def test_memory_that_is_given_back_at_once_is_not_asked_for() -> None:
    del_me = zeroed(8 * PIECE)
    del del_me
    gc.collect()
    settle()  # it must not touch what may be somebody else's by now


def test_more_than_there_is_room_for_is_refused() -> None:
    with pytest.raises(OSError, match="memory"):
        zeroed(1 << 60)
