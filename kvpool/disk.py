"""DiskSlots: a tier in a file, which the next process finds again.

    header   4 KiB: magic, version, sizes, identity of the model, a checksum
    index    one entry a slot: stamp | checksum of what follows | head | sum of the content
    slots    the contents, each at a multiple of 4 KiB

A content is written before its entry. Whatever is between when the process is killed, the entry found later fails its
own checksum, or the content the entry's sum, and counts as absent. Read and written by calls and not through a mapping:
a full disk or a torn file is then an exception and not a signal, and other threads run meanwhile.

The content is keys and values of users' prompts, and the entries have their tokens: the file is its owner's alone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from kvpool.budget import format_bytes
from kvpool.tier import Bytes, head_bytes

MAGIC, VERSION = b"OCTAVOKV", 1
PAGE = 4096
STAMP = 8
CHECK_BYTES, SUM_BYTES = 8, 16
DISK_BANDWIDTH = 500e6
READERS = 4
"""Threads that read and sum: both let others run, and a disk likes to be asked for several things at once."""
WAITING_BYTES = 64 << 20
"""Of contents that wait to be written; whoever brings more waits."""
_HEADER = struct.Struct("<8sIIQQ32s")


class TierError(Exception):
    """The tier cannot be had. One line that names the flag."""


@dataclass(frozen=True, slots=True)
class DiskLayout:
    """Where things lie in a file of at most `size` bytes."""

    size: int
    block_size: int
    block_bytes: int
    identity: bytes
    """32 bytes: of whose keys and values they are."""

    @property
    def entry_bytes(self) -> int:
        return STAMP + CHECK_BYTES + head_bytes(self.block_size) + SUM_BYTES

    @property
    def stride(self) -> int:
        return -(-self.block_bytes // PAGE) * PAGE

    @property
    def count(self) -> int:
        return max(0, (self.size - 2 * PAGE) // (self.entry_bytes + self.stride))

    def entry(self, slot: int) -> int:
        """Offset."""
        return PAGE + slot * self.entry_bytes

    def content(self, slot: int) -> int:
        """Offset."""
        return -(-self.entry(self.count) // PAGE) * PAGE + slot * self.stride

    @property
    def end(self) -> int:
        """At most `size`."""
        return self.content(self.count)

    @property
    def header(self) -> bytes:
        packed = _HEADER.pack(MAGIC, VERSION, self.entry_bytes, self.block_bytes, self.count, self.identity)
        return (packed + _check(packed)).ljust(PAGE, b"\0")


class DiskSlots:
    """See `kvpool.tier.Slots`. Owns the file, and a lock on it."""

    persistent = True
    bandwidth = DISK_BANDWIDTH

    def __init__(self, path: str, layout: DiskLayout, claimed: int | None = None) -> None:
        """`claimed`: the descriptor from claim(), where that was called before. TierError where the file cannot be used
        as one of this layout."""
        self.count, self.block_bytes = layout.count, layout.block_bytes
        self.emptied: str | None = None
        """Why what lay there was thrown away."""
        self._layout = layout
        self._fd = claim(path) if claimed is None else claimed
        try:
            if self.count < 1:
                least = 2 * PAGE + layout.entry_bytes + layout.stride
                raise TierError(f"--kv-disk-size {format_bytes(layout.size)}: needs at least {format_bytes(least)}")
            self._found = self._entries(self._adopt(path))
        except BaseException:
            os.close(self._fd)
            raise
        self._stamp = self._found[-1][0] + 1 if self._found else 1
        self._writer = ThreadPoolExecutor(1, "tier-write")
        self._readers = ThreadPoolExecutor(READERS, "tier-read")
        self._jobs: deque[Future[None]] = deque()
        self._most = max(2, WAITING_BYTES // self.block_bytes)

    def found(self) -> list[tuple[int, bytes]]:
        found, self._found = self._found, []
        return [(slot, head) for _, slot, head in found]

    def put(self, slot: int, head: bytes, content: Bytes) -> None:
        while self._jobs and (self._jobs[0].done() or len(self._jobs) >= self._most):
            self._jobs.popleft().result()
        self._jobs.append(self._writer.submit(self._write, slot, head, self._stamp, content))
        self._stamp += 1

    def get(self, wanted: Sequence[tuple[int, bytes]], out: Bytes) -> list[bool]:
        self._settle()
        slots, heads = zip(*wanted, strict=True)
        return list(self._readers.map(self._read, slots, heads, out))

    def close(self, order: Sequence[int]) -> None:
        """The order survives in the stamps: while the process lives, using a block writes nothing."""
        try:
            self._settle()
            index = self._pread(self.count * self._layout.entry_bytes, PAGE)
            entries = np.frombuffer(index, np.uint8).reshape(self.count, -1)
            kept, used = np.zeros_like(entries), np.asarray(order, np.int64)
            kept[used] = entries[used]
            kept[used, :STAMP] = np.arange(1, len(used) + 1, dtype="<u8").view(np.uint8).reshape(-1, STAMP)
            _pwrite(self._fd, kept.tobytes(), PAGE)
        finally:
            self._writer.shutdown()
            self._readers.shutdown()
            os.close(self._fd)

    def _settle(self) -> None:
        while self._jobs:
            self._jobs.popleft().result()

    def _write(self, slot: int, head: bytes, stamp: int, content: Bytes) -> None:
        body = head + _sum(content)
        _pwrite(self._fd, content.data, self._layout.content(slot))
        _pwrite(self._fd, stamp.to_bytes(STAMP, "little") + _check(body) + body, self._layout.entry(slot))

    def _read(self, slot: int, head: bytes, out: Bytes) -> bool:
        entry = self._pread(self._layout.entry_bytes, self._layout.entry(slot))
        body = entry[STAMP + CHECK_BYTES :]
        if entry[STAMP : STAMP + CHECK_BYTES] != _check(body) or body[:-SUM_BYTES] != head:
            return False
        got, view = 0, out.data
        while got < len(view):
            part = os.preadv(self._fd, [view[got:]], self._layout.content(slot) + got)
            if part == 0:
                return False
            got += part
        return _sum(out) == body[-SUM_BYTES:]

    def _pread(self, count: int, offset: int) -> bytes:
        """What is there of it; zeros behind the file's end."""
        parts, got = [], 0
        while got < count and (part := os.pread(self._fd, count - got, offset + got)):
            parts.append(part)
            got += len(part)
        return b"".join(parts).ljust(count, b"\0")

    def _adopt(self, path: str) -> int:
        """Make the file one of this layout; how many bytes of what it held are good. TierError."""
        layout, length = self._layout, os.fstat(self._fd).st_size
        try:
            if length:
                self.emptied = _difference(self._pread(PAGE, 0), layout)
                if self.emptied is not None:
                    os.ftruncate(self._fd, 0)
                    length = 0
            os.fchmod(self._fd, stat.S_IRUSR | stat.S_IWUSR)
            if length == 0:
                _pwrite(self._fd, layout.header, 0)  # first: a file without it would be taken for somebody else's
            os.ftruncate(self._fd, layout.end)
            _allocate(self._fd, layout.end)
        except OSError as error:
            if length == 0:
                os.ftruncate(self._fd, 0)
            raise TierError(f"--kv-disk {path}: {format_bytes(layout.end)} cannot be had: {error.strerror}") from None
        return length

    def _entries(self, length: int) -> list[tuple[int, int, bytes]]:
        """(stamp, slot, head) of the entries that are whole and whose content can lie in the first `length` bytes."""
        layout = self._layout
        if length <= PAGE:
            return []
        index, found = self._pread(self.count * layout.entry_bytes, PAGE), []
        for slot in range(self.count):
            entry = index[slot * layout.entry_bytes : (slot + 1) * layout.entry_bytes]
            body = entry[STAMP + CHECK_BYTES :]
            if layout.content(slot) + layout.block_bytes <= length and entry[STAMP:][:CHECK_BYTES] == _check(body):
                found.append((int.from_bytes(entry[:STAMP], "little"), slot, body[:-SUM_BYTES]))
        return sorted(found)


def claim(path: str) -> int:
    """The descriptor of the file, which is made where there is none; nobody else has it from now on. TierError where it
    is in use, no regular file, or holds something else."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, stat.S_IRUSR | stat.S_IWUSR)
    except OSError as error:
        raise TierError(f"--kv-disk {path}: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise TierError(f"--kv-disk {path}: not a regular file")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_size and os.pread(fd, len(MAGIC), 0) != MAGIC:
            raise TierError(f"--kv-disk {path}: holds something else; it would be overwritten, so name another")
    except BlockingIOError:
        os.close(fd)
        raise TierError(f"--kv-disk {path}: another server uses it") from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _difference(header: bytes, layout: DiskLayout) -> str | None:
    """Why a file of ours is of no use to this process."""
    packed = header[: _HEADER.size]
    _, version, entry_bytes, block_bytes, count, identity = _HEADER.unpack(packed)
    if header[_HEADER.size :][:CHECK_BYTES] != _check(packed):
        return "its header is damaged"
    if version != VERSION:
        return f"it is of format {version}, this server's is {VERSION}"
    if identity != layout.identity or (entry_bytes, block_bytes) != (layout.entry_bytes, layout.block_bytes):
        return "it is of another model, version, number type or block size"
    return None if count == layout.count else "it was made with another --kv-disk-size"


def _allocate(fd: int, size: int) -> None:
    """Take the room now, so that no write fails for want of it later; where a file system cannot, later it is."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def _pwrite(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def _check(data: bytes) -> bytes:
    return blake2b(data, digest_size=CHECK_BYTES, person=b"octavo entry").digest()


def _sum(content: Bytes) -> bytes:
    return blake2b(content.data, digest_size=SUM_BYTES).digest()
