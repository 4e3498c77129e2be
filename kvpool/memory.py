"""How much memory this process may still use: the machine's, or what its control groups leave of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class Memory:
    bytes: int
    source: str
    """Which limit binds, in words."""


@dataclass(frozen=True, slots=True)
class _Version:
    """File names of one cgroup version."""

    limit: str
    usage: str
    reclaimable: str
    """Key in memory.stat of page cache that gives way first."""


_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version("memory.max", "memory.current", "inactive_file")


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Memory:
    """The least that the machine and any control group above this process leave.

    A group leaves its limit minus its usage, page cache that can be dropped not counted as usage (what Kubernetes
    calls the working set). Where there is no /proc, all of the machine's memory.
    """
    found = [_machine(proc)]
    for directory, version in _groups(proc, cgroups):
        left = _left(directory, version)
        if left is not None:
            found.append(Memory(left, "left of the cgroup's limit"))
    return min(found, key=lambda memory: memory.bytes)


def _machine(proc: Path) -> Memory:
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return Memory(int(line.split()[1]) * 1024, "available on this machine")
    return Memory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "of this machine")


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, _Version]]:
    """The process's memory groups, innermost first. Inside a container the path may lead out of what is mounted, or
    name a group of the host's: then only the mount's own root counts, which is the container's group."""
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root, version = cgroups, _V2
        elif "memory" in controllers.split(","):
            root, version = cgroups / "memory", _V1
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        if ".." in inner.parts:
            inner = PurePosixPath()
        for step in (inner, *inner.parents):
            yield root / step, version


def _left(directory: Path, version: _Version) -> int | None:
    """Bytes below the group's limit; None where it has none. v1 writes "no limit" as a number near 2**63, which the
    minimum with the machine's memory makes harmless."""
    limit, usage = _read(directory / version.limit).strip(), _read(directory / version.usage).strip()
    if not limit.isdecimal() or not usage.isdecimal():
        return None
    cache = 0
    for line in _read(directory / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == version.reclaimable:
            cache = int(value)
    return max(0, int(limit) - max(0, int(usage) - cache))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
