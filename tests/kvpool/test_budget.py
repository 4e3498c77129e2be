from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.budget import (
    CPU_CAP,
    GIB,
    MIB,
    Budget,
    BudgetError,
    cpu_budget,
    format_bytes,
    given_budget,
    gpu_budget,
    parse_bytes,
    plan_pool,
)
from kvpool.formats import FORMATS, KVFormat, KVLayout
from kvpool.memory import Memory

SMOLLM2 = KVLayout(30, 3, 64, FORMATS["bfloat16"])
LLAMA_31_8B = KVLayout(32, 8, 128, FORMATS["bfloat16"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GiB", 4 * GIB),
        ("512MiB", 512 * MIB),
        ("4GB", 4_000_000_000),
        ("4G", 4_000_000_000),
        ("4Gi", 4 * GIB),
        ("1.5 gib", 3 * GIB // 2),
        ("  64 KiB ", 65_536),
        ("64kb", 64_000),
        ("2TiB", 2048 * GIB),
        ("737280", 737_280),
        ("100B", 100),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "4 XB", "4GiBs", "1e9", "0x10", "four", "1.GiB", "٤GiB", "nan", "4,0GB"]
)
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: write it like 4GiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["0", "0GiB", "0.1B", "8388608TiB", "99999999999999999999"])
def test_sizes_out_of_range(text: str) -> None:
    with pytest.raises(ValueError, match="out of range"):
        parse_bytes(text)


@given(st.integers(1, 2**50))
def test_sizes_are_printed_in_the_largest_unit(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.006)


def test_bytes_become_blocks_and_never_more_than_the_budget() -> None:
    plan = plan_pool(SMOLLM2, given_budget(64 * MIB), 8192)
    assert plan.num_blocks == 64 * MIB // (16 * 23_040) == 182
    assert plan.num_tokens == 181 * 16
    assert plan.bytes <= 64 * MIB < plan.bytes + SMOLLM2.block_bytes
    assert plan.users == 0


def test_the_seeds_users_fit_exactly() -> None:
    """32 users of 4,096 tokens take 16 GB of Llama 3.1 8B, ten take 5 GB; the null block comes on top."""
    for users, gigabytes in ((32, 16), (10, 5)):
        size = gigabytes * GIB
        assert plan_pool(LLAMA_31_8B, given_budget(size + LLAMA_31_8B.block_bytes), 4096).users == users
        assert plan_pool(LLAMA_31_8B, given_budget(size), 4096).users == users - 1


def test_lines_show_the_arithmetic() -> None:
    plan = plan_pool(LLAMA_31_8B, given_budget(5 * GIB + LLAMA_31_8B.block_bytes), 4096)
    assert plan.lines() == [
        "bfloat16: 131,072 bytes per token (2 x 32 layers x 8 KV heads x 128 x 2 bytes)",
        "budget: 5.00 GiB (--kv-cache-memory)",
        "blocks: 2,560 of 16 tokens, 2 MiB each, and one for padding; 5.00 GiB in all",
        "tokens: 40,960",
        "users of 4,096 tokens at once: 10",
    ]


def test_lines_for_less_than_one_user_and_for_scales() -> None:
    layout = KVLayout(28, 8, 128, KVFormat("k8v4", 8, 4, 2))
    lines = plan_pool(layout, given_budget(65 * layout.block_bytes), 4096).lines()
    assert lines[0] == "k8v4: 43,904 bytes per token (28 layers x 8 KV heads x 128 x (8 + 4) bits, 2-byte scales)"
    assert lines[-1] == "users of 4,096 tokens at once: 0.25"


def test_the_least_budget_is_padding_and_one_row_of_blocks() -> None:
    least = 2 * SMOLLM2.block_bytes
    assert plan_pool(SMOLLM2, given_budget(least), 8192).num_tokens == 16
    with pytest.raises(BudgetError) as caught:
        plan_pool(SMOLLM2, given_budget(least - 1), 8192)
    message = str(caught.value)
    assert "\n" not in message
    assert "at least 737,280 bytes" in message
    assert "16 tokens x 23,040 bytes" in message
    assert "gets 737,279 bytes (--kv-cache-memory): raise --kv-cache-memory" in message


def test_a_budget_beyond_the_memory_is_refused() -> None:
    memory = Memory(2 * GIB, "left of the cgroup's limit")
    assert given_budget(2 * GIB, memory).bytes == 2 * GIB
    with pytest.raises(BudgetError, match=r"--kv-cache-memory 4 GiB is more than the 2 GiB left of the cgroup's limit"):
        given_budget(4 * GIB, memory)


@pytest.mark.parametrize(
    ("memory", "weights", "users", "expected", "why"),
    [
        (8 * GIB, 0, 64, 2 * GIB, "a quarter of the 8 GiB available"),
        (8 * GIB, 4 * GIB, 64, GIB, "a quarter of the 4 GiB available after the weights"),
        (256 * GIB, 0, 64, CPU_CAP, "the default limit on a CPU"),
        (256 * GIB, 0, 2, (2 * 512 + 1) * SMOLLM2.block_bytes, "all that 2 users of 8,192 tokens can use"),
        (GIB, 2 * GIB, 64, 0, "a quarter of the 0 B available after the weights"),
    ],
)
def test_the_budget_on_a_cpu(memory: int, weights: int, users: int, expected: int, why: str) -> None:
    budget = cpu_budget(SMOLLM2, Memory(memory, "available"), users, 8192, weights)
    assert budget.bytes == expected
    assert budget.source.startswith(why)


def test_the_derived_maximum_serves_all_users() -> None:
    budget = cpu_budget(SMOLLM2, Memory(1 << 50, "available"), 3, 1000)
    assert plan_pool(SMOLLM2, budget, 1000).users == 3


def test_the_budget_on_a_gpu() -> None:
    budget = gpu_budget(80 * GIB, 20 * GIB, 0.9)
    assert budget == Budget(52 * GIB, "--gpu-memory-utilization 0.9 of 80 GiB, less 20 GiB in use")
    full = gpu_budget(80 * GIB, 79 * GIB, 0.9)
    assert full.bytes == 0
    with pytest.raises(BudgetError, match=r"gets 0 bytes \(--gpu-memory-utilization 0\.9"):
        plan_pool(SMOLLM2, full, 8192)
