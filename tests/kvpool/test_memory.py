"""Memory limits, read from made-up /proc and cgroup trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool.memory import Memory, available_memory

MIB = 1 << 20
UNLIMITED_V1 = "9223372036854771712"


class Tree:
    """A machine with 8 GiB available."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        self.file(self.proc / "meminfo", "MemTotal: 99 kB\nMemAvailable:   8388608 kB\n")

    def file(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def member(self, text: str) -> None:
        self.file(self.proc / "self" / "cgroup", text)

    def v2(self, path: str, limit: str, used: int, cache: int = 0) -> None:
        group = self.cgroups / path
        self.file(group / "memory.max", f"{limit}\n")
        self.file(group / "memory.current", f"{used}\n")
        self.file(group / "memory.stat", f"anon {used - cache}\ninactive_file {cache}\n")

    def v1(self, path: str, limit: str, used: int, cache: int = 0) -> None:
        group = self.cgroups / "memory" / path
        self.file(group / "memory.limit_in_bytes", f"{limit}\n")
        self.file(group / "memory.usage_in_bytes", f"{used}\n")
        self.file(group / "memory.stat", f"inactive_file 5\ntotal_inactive_file {cache}\n")

    def read(self) -> Memory:
        return available_memory(self.proc, self.cgroups)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


MACHINE = Memory(8192 * MIB, "available on this machine")


def left(mib: int) -> Memory:
    return Memory(mib * MIB, "left of the cgroup's limit")


def test_without_cgroups_the_machine_counts(tree: Tree) -> None:
    assert tree.read() == MACHINE


def test_v2_limit_minus_working_set(tree: Tree) -> None:
    tree.member("0::/app\n")
    tree.v2("app", str(1024 * MIB), 300 * MIB, cache=100 * MIB)
    assert tree.read() == left(824)


def test_v2_the_tightest_of_all_levels_binds(tree: Tree) -> None:
    tree.member("0::/pod/app\n")
    tree.v2("pod/app", "max", 1)
    tree.v2("pod", str(512 * MIB), 12 * MIB)
    assert tree.read() == left(500)


def test_v2_a_limit_above_what_the_machine_has_does_not_bind(tree: Tree) -> None:
    tree.member("0::/app\n")
    tree.v2("app", str(1 << 40), 1)
    assert tree.read() == MACHINE


@pytest.mark.parametrize("path", ["/", "/../../other", "/a/group/of/the/host"])
def test_v2_in_a_container_the_mounted_root_is_the_group(tree: Tree, path: str) -> None:
    tree.member(f"0::{path}\n")
    tree.v2("", str(256 * MIB), 6 * MIB)
    assert tree.read() == left(250)


def test_v1(tree: Tree) -> None:
    tree.member("5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/ignored\n")
    tree.v1("docker/abc", str(400 * MIB), 150 * MIB, cache=50 * MIB)
    tree.v1("", UNLIMITED_V1, 1)
    assert tree.read() == left(300)


def test_v1_without_a_limit(tree: Tree) -> None:
    tree.member("4:memory:/\n")
    tree.v1("", UNLIMITED_V1, 1)
    assert tree.read() == MACHINE


def test_a_group_over_its_limit_leaves_nothing(tree: Tree) -> None:
    tree.member("0::/app\n")
    tree.v2("app", "1000", 5000)
    assert tree.read().bytes == 0


def test_this_machine_has_some_memory() -> None:
    assert available_memory().bytes > 0
