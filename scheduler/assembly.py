"""From EngineConfig to a running engine: runner, pool and limits put together."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvpool.budget import BudgetError, format_bytes
from kvpool.disk import DiskLayout, DiskSlots, claim
from kvpool.memory import available_memory
from kvpool.pool import KVPool
from kvpool.slots import MemorySlots
from kvpool.tier import Tier
from model.fingerprint import fingerprint
from model.runner import LoadedModel, RunnerOptions, check_ranks, load_runner
from scheduler.config import EngineConfig
from scheduler.cost import CostModel
from scheduler.engine import Engine
from scheduler.limits import Limits
from scheduler.messages import Ready
from scheduler.ranks import Leader, Place

Progress = Callable[[str, str], None]


def assemble(config: EngineConfig, progress: Progress, place: Place | None = None) -> tuple[Engine, Ready]:
    """Load the model and build the engine. `place`: among the ranks of a split model; without it this is rank 0, and
    begins the others. Raises ModelError, BudgetError or TierError for what the user can mend."""
    began = time.monotonic()
    disk = claim(config.kv_disk) if config.kv_disk is not None else None
    options = RunnerOptions(
        model=config.model,
        device=config.device,
        dtype=config.dtype,
        quantization=config.quantization,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        kv_cache_memory=config.kv_cache_memory,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_dtype=config.kv_cache_dtype,
        force_kv_cache_dtype=config.force_kv_cache_dtype,
        block_size=config.block_size,
        tensor_parallel_size=config.tensor_parallel_size,
        one_group=config.kv_disk is not None or config.kv_host_memory is not None,
    )
    if place is None and config.tensor_parallel_size > 1:
        place = Leader(config, check_ranks(options).path)
    loaded = load_runner(options, progress, None if place is None else place.ranks)
    tier = open_tier(config, loaded, disk, progress)
    pool = KVPool(loaded.num_blocks, loaded.block_size, config.enable_prefix_caching, loaded.windows, tier)
    on_cpu = loaded.device.startswith("cpu")
    limits = Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=loaded.max_num_batched_tokens,
        max_model_len=loaded.max_model_len,
        rope_switch=loaded.rope_switch,
        num_speculative_tokens=config.num_speculative_tokens,
        # A GPU's step time hardly depends on the chunk until the token budget is full: nothing to learn there.
        target_step_time=config.target_step_time if on_cpu else None,
    )
    overlap = config.async_scheduling
    if overlap and on_cpu:
        progress(
            "warning", "--async-scheduling buys nothing on a CPU: what would plan ahead are the cores that compute"
        )
    # Only rank 0 draws: another's next step would begin with tokens that lie on no device of its.
    depth = 0 if place is not None else int(not on_cpu if overlap is None else overlap)
    cost = CostModel(loaded.weight_bytes)
    distance = loaded.kv_distance
    rest = cost, loaded.grammars, loaded.runner.storage
    if place is None:
        engine = Engine(pool, loaded.runner, limits, time.monotonic, *rest, depth)
    else:
        engine = place.engine(pool, place.executor(loaded), limits, place.clock, *rest)
    return engine, Ready(
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.model_config.vocab_size,
        num_blocks=pool.num_usable,
        block_size=loaded.block_size,
        windows=loaded.windows,
        max_num_batched_tokens=loaded.max_num_batched_tokens,
        kv_bytes_per_token=loaded.kv_bytes_per_token,
        kv_bytes=loaded.kv_bytes,
        device=loaded.device,
        dtype=loaded.dtype,
        kv_cache_dtype=loaded.kv_cache_dtype,
        kv_divergence=distance.divergence if distance else None,
        kv_agreement=distance.agreement if distance else None,
        attention=loaded.attention,
        weight_bytes=loaded.weight_bytes,
        load_seconds=time.monotonic() - began,
        embedding=loaded.embedding,
    )


def open_tier(config: EngineConfig, loaded: LoadedModel, disk: int | None, progress: Progress) -> Tier | None:
    """The tier that the configuration asks for, with what was found in it. `disk`: from claim(). Raises BudgetError or
    TierError."""
    size, block_bytes = loaded.block_size, loaded.runner.storage.block_bytes
    if config.kv_disk is not None and config.kv_disk_size is not None:
        layout = DiskLayout(config.kv_disk_size, size, block_bytes, fingerprint(loaded))
        slots = DiskSlots(config.kv_disk, layout, disk)
        if slots.emptied is not None:
            progress("warning", f"--kv-disk {config.kv_disk} was emptied: {slots.emptied}")
        tier, place = Tier(slots), config.kv_disk
    elif config.kv_host_memory is not None:
        given, memory = config.kv_host_memory, available_memory()
        if given > memory.bytes:
            raise BudgetError(
                f"--kv-host-memory {format_bytes(given)} is more than the {format_bytes(memory.bytes)} {memory.source}"
            )
        if given < block_bytes:
            raise BudgetError(f"--kv-host-memory {format_bytes(given)}: a block takes {format_bytes(block_bytes)}")
        if loaded.device.startswith("cpu"):
            progress(
                "warning",
                "--kv-host-memory buys nothing on a CPU: --kv-cache-memory puts the same memory to better use",
            )
        tier, place = Tier(MemorySlots(given // block_bytes, block_bytes)), "host memory"
    else:
        return None
    progress("kv tier", f"{tier.total:,} blocks, {tier.total * size:,} tokens, in {place}; {tier.used:,} were found")
    return tier
