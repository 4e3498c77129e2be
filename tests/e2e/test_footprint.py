"""What the daemon costs while nobody asks anything of it."""

from __future__ import annotations

import time

from tests.e2e.daemon import serve

MIB = 1 << 20
KV_BYTES = 512 * MIB
WEIGHT_BYTES = 134_515_008 * 2
"""SmolLM2-135M in bfloat16, tied embeddings counted once."""


def test_memory_and_cpu_of_an_idle_server_with_bf16_weights() -> None:
    """RSS of all processes < 2.2 x weights + KV budget + 600 MB; idle CPU < 1 % of one core."""
    with serve("--dtype", "bfloat16", "--kv-cache-memory", str(KV_BYTES)) as daemon:
        processes = daemon.processes()
        before, resident = 0, KV_BYTES
        while resident - before > MIB / 2:  # the pool's memory is found in the background
            time.sleep(2)
            before, resident = resident, sum(process.memory_info().rss for process in processes)
        limit = 2.2 * WEIGHT_BYTES + KV_BYTES + 600e6
        assert resident < limit, f"{resident / MIB:.0f} MiB, limit {limit / MIB:.0f}"

        def cpu_seconds() -> float:
            return sum(sum(process.cpu_times()[:2]) for process in processes)

        started, spent = time.monotonic(), cpu_seconds()
        time.sleep(10)  # the span that is measured
        share = (cpu_seconds() - spent) / (time.monotonic() - started)
        assert share < 0.01, f"{share:.2%} of a core"
