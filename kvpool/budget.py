"""From bytes to blocks: the pool's budget, and the arithmetic that start-up prints. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvpool.formats import KVLayout
from kvpool.memory import Memory

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
CPU_SHARE = 4
"""A derived budget on a CPU takes one part in so many of what the weights leave; the rest is for everybody else."""
CPU_CAP = 4 * GIB
"""And never more than this, unless told to."""

_UNITS: dict[str, int] = {"": 1, "b": 1} | {
    f"{letter}{suffix}": int(base**power)
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("", 1000), ("b", 1000), ("i", 1024), ("ib", 1024))
}


class BudgetError(Exception):
    """The pool cannot be made. One line that names the flag, the need and what was given."""


def parse_bytes(text: str) -> int:
    """ "4GiB", "512 MiB", "1.5G", "4GB" or a plain number → bytes. GiB and Gi are 1024³; GB and G are 1000³.

    Raises ValueError, one line, for anything else, for less than one byte, and for more than fits 63 bits.
    """
    match = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-z]*)", text.strip().lower(), re.ASCII)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size: write it like 4GiB, 512MiB, 4GB or a number of bytes")
    whole, _, fraction = match[1].partition(".")
    unit = _UNITS[match[2]]
    value = int(whole) * unit + (int(fraction) * unit // 10 ** len(fraction) if fraction else 0)
    if not 1 <= value < 1 << 63:
        raise ValueError(f"{text!r} is out of range: a size is at least 1 byte and less than 8 EiB")
    return value


def format_bytes(count: int) -> str:
    """In the largest binary unit that leaves at least 1: 524288 → "512 KiB", 1610612736 → "1.50 GiB"."""
    for size, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= size:
            return f"{count // size} {unit}" if count % size == 0 else f"{count / size:.2f} {unit}"
    return f"{count} B"


@dataclass(frozen=True, slots=True)
class Budget:
    bytes: int
    source: str
    """Where the number comes from, in words."""


def given_budget(count: int, memory: Memory | None = None) -> Budget:
    """What `--kv-cache-memory` says. BudgetError where it is more than the memory that is there (None: not checked)."""
    if memory is not None and count > memory.bytes:
        raise BudgetError(
            f"--kv-cache-memory {format_bytes(count)} is more than the {format_bytes(memory.bytes)} {memory.source}"
        )
    return Budget(count, "--kv-cache-memory")


def cpu_budget(
    layout: KVLayout, memory: Memory, max_num_seqs: int, max_model_len: int, weight_bytes: int = 0, chunk: int = 1
) -> Budget:
    """Derive a budget on a CPU: a quarter of `memory` after the weights, capped, and no more than can be used.

    `weight_bytes`: what is still to be loaded, 0 where `memory` was measured after loading. `chunk`: tokens that one
    step computes at most.
    """
    room = max(0, memory.bytes - weight_bytes)
    blocks = (max_num_seqs - 1) * layout.blocks_for(max_model_len) + layout.blocks_for(max_model_len, chunk)
    most = (1 + blocks) * layout.block_bytes
    after = " after the weights" if weight_bytes else ""
    return min(
        Budget(most, f"all that {max_num_seqs} users of {max_model_len:,} tokens can use"),
        Budget(CPU_CAP, "the default limit on a CPU; --kv-cache-memory sets another"),
        Budget(room // CPU_SHARE, f"a quarter of the {format_bytes(room)} {memory.source}{after}"),
        key=lambda budget: budget.bytes,
    )


def gpu_budget(total_bytes: int, used_bytes: int, utilization: float) -> Budget:
    """Derive a budget on a GPU: `--gpu-memory-utilization` x total, minus what is in use at the peak of a full step
    (weights, activations, other processes). May be 0, which plan_pool() refuses."""
    room = max(0, int(total_bytes * utilization) - used_bytes)
    share = f"--gpu-memory-utilization {utilization:g} of {format_bytes(total_bytes)}"
    return Budget(room, f"{share}, less {format_bytes(used_bytes)} in use")


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The pool that a budget buys."""

    layout: KVLayout
    budget: Budget
    max_model_len: int
    num_blocks: int
    """The null block included: what KVPool and KVStorage are made with."""

    @property
    def bytes(self) -> int:
        """Of the allocation; at most the budget."""
        return self.num_blocks * self.layout.block_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that fit where none lies behind a window, in all sequences together."""
        return (self.num_blocks - 1) // len(self.layout.groups.windows) * self.layout.block_size

    def longest(self, chunk: int) -> int:
        """Tokens of the longest sequence that fits, `max_model_len` at most, if steps compute up to `chunk` of them."""
        return self.layout.paging.longest(self.num_blocks - 1, chunk, self.max_model_len)

    @property
    def users(self) -> int:
        """How many sequences of the maximum length fit at once."""
        return (self.num_blocks - 1) // self.layout.blocks_for(self.max_model_len)

    def lines(self) -> list[str]:
        """The arithmetic, for people."""
        layout, form, groups = self.layout, self.layout.format, self.layout.groups
        values = f"{layout.num_layers} layers x {layout.kv_heads} KV heads x {layout.head_dim}"
        if form.key_bits == form.value_bits and not form.scale_bytes:
            per_token = f"2 x {values} x {form.key_bits // 8} bytes"
        else:
            per_token = f"{values} x ({form.key_bits} + {form.value_bits}) bits, {form.scale_bytes}-byte scales"
        user = layout.blocks_for(self.max_model_len)
        fit = f"{self.users:,}" if self.users else f"{(self.num_blocks - 1) / user:.2f}"
        of = f" in {groups.size} layers" if len(groups.windows) > 1 else ""
        lines = [
            f"{form.name}: {layout.bytes_per_token:,} bytes per token ({per_token})",
            f"budget: {format_bytes(self.budget.bytes)} ({self.budget.source})",
            f"blocks: {self.num_blocks - 1:,} of {layout.block_size} tokens{of}, {format_bytes(layout.block_bytes)} "
            f"each, and one for padding; {format_bytes(self.bytes)} in all",
            f"tokens: {self.num_tokens:,}",
            f"users of {self.max_model_len:,} tokens at once: {fit}",
        ]
        for window in sorted({window for window in groups.windows if window is not None}):
            count = layout.windows.count(window)
            which, those = "every layer slides", ""
            if count < layout.num_layers:
                which, those = f"{count} of {layout.num_layers} layers slide", " in those"
            lines.append(f"{which}: a sequence keeps the blocks of its last {window:,} tokens{those}")
        return lines


def plan_pool(layout: KVLayout, budget: Budget, max_model_len: int) -> PoolPlan:
    """Bytes → blocks, rounded down, so that the pool never exceeds its budget. BudgetError where not one token fits."""
    num_blocks, least = budget.bytes // layout.block_bytes, 1 + layout.blocks_for(1)
    if num_blocks < least:
        raise BudgetError(
            f"the KV cache needs at least {least * layout.block_bytes:,} bytes (padding and one row of blocks: "
            f"{layout.block_size} tokens x {layout.bytes_per_token:,} bytes), but gets {budget.bytes:,} bytes "
            f"({budget.source}): raise --kv-cache-memory"
        )
    return PoolPlan(layout, budget, max_model_len, num_blocks)
