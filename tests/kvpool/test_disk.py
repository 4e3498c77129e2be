"""The tier's file: what it is made of, who may read it, and every other file that may lie in its place."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from kvpool import disk
from kvpool.disk import PAGE, DiskLayout, DiskSlots, TierError
from kvpool.tier import Tier
from tests.kvpool.test_tier import BYTES, CHAINS, SIZE

LAYOUT = DiskLayout(100_000, SIZE, BYTES, b"i" * 32)
HEADS = CHAINS[0]


def filled(path: Path, count: int = 3, layout: DiskLayout = LAYOUT) -> None:
    """A file with so many blocks, closed."""
    tier = Tier(DiskSlots(str(path), layout))
    for number, head in enumerate(HEADS[:count]):
        tier.put(head, np.full(layout.block_bytes, number, np.uint8))
    tier.close()


def reopened(path: Path, layout: DiskLayout = LAYOUT) -> tuple[int, str | None]:
    """Blocks that are found, and why the file was emptied."""
    slots = DiskSlots(str(path), layout)
    tier = Tier(slots)
    used = tier.used
    assert used == 0 or len(tier.read(HEADS[:used])) == used
    tier.close()
    return used, slots.emptied


@pytest.mark.parametrize("size", [13_000, 100_000, 1 << 20, (1 << 20) + 4095])
@pytest.mark.parametrize("block_bytes", [40, 4096, 5000])
def test_it_never_exceeds_its_size(size: int, block_bytes: int) -> None:
    layout = DiskLayout(size, 16, block_bytes, b"i" * 32)
    if layout.count:
        assert size - layout.stride - layout.entry_bytes - PAGE < layout.end <= size
        assert layout.content(0) >= layout.entry(layout.count)
        assert layout.content(0) % PAGE == layout.stride % PAGE == 0
        assert len(layout.header) == PAGE


def test_the_file_is_its_owners_alone_and_takes_its_room_at_once(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    filled(path)
    status = path.stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == LAYOUT.end <= LAYOUT.size
    path.chmod(0o644)
    assert reopened(path) == (3, None)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (DiskLayout(100_000, SIZE, BYTES, b"j" * 32), "another model"),
        (DiskLayout(100_000, SIZE, BYTES + 8, b"i" * 32), "another model"),
        (DiskLayout(100_000, 2 * SIZE, BYTES, b"i" * 32), "another model"),
        (DiskLayout(200_000, SIZE, BYTES, b"i" * 32), "--kv-disk-size"),
    ],
)
def test_what_is_of_something_else_is_emptied(layout: DiskLayout, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "kv"
    filled(path)
    found, emptied = reopened(path, layout)
    assert found == 0
    assert reason in str(emptied)
    assert path.stat().st_size == layout.end
    assert reopened(path, layout) == (0, None)


def test_another_version_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kv"
    filled(path)
    monkeypatch.setattr(disk, "VERSION", 2)
    assert reopened(path) == (0, "it is of format 1, this server's is 2")


@pytest.mark.parametrize("content", [b"a thesis", b"\0" * 5000, b"OCTAVOK"])
def test_what_is_no_tier_is_refused_and_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "thesis"
    path.write_bytes(content)
    with pytest.raises(TierError, match=r"--kv-disk .*thesis: holds something else") as caught:
        DiskSlots(str(path), LAYOUT)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == content


def test_a_damaged_header_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    filled(path)
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)
    assert reopened(path) == (0, "its header is damaged")


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_a_damaged_entry_is_absent(slot: int, tmp_path: Path) -> None:
    path = tmp_path / "kv"
    filled(path)
    data = bytearray(path.read_bytes())
    data[LAYOUT.entry(slot) + LAYOUT.entry_bytes - 1] ^= 1
    path.write_bytes(data)
    slots = DiskSlots(str(path), LAYOUT)
    tier = Tier(slots)
    assert [tier.holds(head) for head in HEADS[:3]] == [number != slot for number in range(3)]
    tier.close()


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    """What lay behind the end is absent, and the file has its length again."""
    path = tmp_path / "kv"
    for length in (0, 1, 8, PAGE - 1, PAGE, PAGE + 100, LAYOUT.content(0), LAYOUT.content(1) + 5, LAYOUT.content(2)):
        path.unlink(missing_ok=True)
        filled(path)
        os.truncate(path, length)
        if 0 < length < 8:
            with pytest.raises(TierError):
                DiskSlots(str(path), LAYOUT)
            continue
        found, emptied = reopened(path)
        assert found == max(0, (length - LAYOUT.content(0) - BYTES) // LAYOUT.stride + 1)
        assert (emptied is not None) == (length == 8), "the header is whole, or there is none"
        assert path.stat().st_size == LAYOUT.end


def test_a_kill_between_content_and_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot's old entry stands before a new content: neither block is handed out."""
    layout = DiskLayout(2 * PAGE + LAYOUT.entry_bytes + LAYOUT.stride, SIZE, BYTES, b"i" * 32)
    assert layout.count == 1
    path = tmp_path / "kv"
    filled(path, 1, layout)
    slots = DiskSlots(str(path), layout)
    monkeypatch.setattr(disk, "_check", lambda data: b"")
    real = disk._pwrite
    monkeypatch.setattr(disk, "_pwrite", lambda fd, data, at: real(fd, data, at) if at >= layout.content(0) else None)
    slots.put(0, HEADS[1], np.full(BYTES, 77, np.uint8))
    slots._settle()
    monkeypatch.undo()
    slots.close([0])
    tier = Tier(DiskSlots(str(path), layout))
    assert (tier.holds(HEADS[0]), tier.holds(HEADS[1])) == (True, False)
    assert len(tier.read(HEADS[:1])) == 0
    assert tier.counts.refused == 1
    tier.close()


def test_two_servers_do_not_share_it(tmp_path: Path) -> None:
    slots = DiskSlots(str(tmp_path / "kv"), LAYOUT)
    with pytest.raises(TierError, match="another server uses it"):
        DiskSlots(str(tmp_path / "kv"), LAYOUT)
    slots.close([])
    assert reopened(tmp_path / "kv") == (0, None)


def test_what_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, words in (
        (tmp_path, "Is a directory"),
        (tmp_path / "no" / "kv", "No such file"),
        (fifo, "not a regular file"),
    ):
        with pytest.raises(TierError, match=words) as caught:
            DiskSlots(str(path), LAYOUT)
        assert str(caught.value).startswith(f"--kv-disk {path}: ")
    with pytest.raises(TierError, match=r"--kv-disk-size 5000 B: needs at least|--kv-disk-size 4.88 KiB: needs"):
        DiskSlots(str(tmp_path / "small"), DiskLayout(5000, SIZE, BYTES, b"i" * 32))
    assert not (tmp_path / "small").stat().st_size


def test_a_full_disk_is_one_line_and_leaves_no_foreign_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(TierError, match="cannot be had: No space left on device"):
            DiskSlots(str(tmp_path / "kv"), LAYOUT)
    assert reopened(tmp_path / "kv") == (0, None)


def test_a_write_that_fails_is_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, data: object, offset: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    tier = Tier(DiskSlots(str(tmp_path / "kv"), LAYOUT))
    monkeypatch.setattr(disk, "_pwrite", broken)
    tier.put(HEADS[0], np.zeros(BYTES, np.uint8))
    with pytest.raises(OSError, match="Input/output error"):
        tier.read(HEADS[:1])
    monkeypatch.undo()
    tier.close()
