"""Zeroed memory for the pool: mapped at once, in huge pages where the system grants them, and backed in the background.

A pool of gigabytes takes seconds to back, and a step that meets a page without memory waits for it. So a thread asks
for the pages, a piece at a time and in no hurry, without writing to them.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
import weakref

import torch
from torch import Tensor

PIECE = 4 << 20
"""Bytes asked for at a time: some milliseconds, in which nobody else in this process can map or unmap memory."""
REST = 9
"""A piece's time is rested so many times before the next: where a hypervisor has to find the memory, whoever asks holds
its processor for so long, however nice it is, and steps wait for both."""
BACKER = "backs the pool"
"""The thread's name."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, Linux 5.14; what is older backs pages when they are first written."""


def zeroed(nbytes: int) -> Tensor:
    """uint8 [nbytes], all zero; backed within a minute. Raises OSError where so much address space cannot be had."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    if sys.platform == "linux":
        asked = data.data_ptr(), nbytes, weakref.ref(memory)
        threading.Thread(target=_back, args=asked, name=BACKER, daemon=True).start()
    return data


def _back(address: int, nbytes: int, alive: weakref.ref[mmap.mmap]) -> None:
    """Ask for every page, until the memory is gone. ctypes lets others run meanwhile."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for begin in range(0, nbytes, PIECE):
        began, memory = time.perf_counter(), alive()
        if memory is None or madvise(address + begin, min(PIECE, nbytes - begin), _POPULATE_WRITE) != 0:
            return
        del memory
        time.sleep(REST * (time.perf_counter() - began))
