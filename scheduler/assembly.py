"""From EngineConfig to a running engine: runner, pool and limits put together."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvpool.pool import KVPool
from model.runner import RunnerOptions, load_runner
from scheduler.config import EngineConfig
from scheduler.cost import CostModel
from scheduler.engine import Engine
from scheduler.limits import Limits
from scheduler.messages import Ready


def assemble(config: EngineConfig, progress: Callable[[str, str], None]) -> tuple[Engine, Ready]:
    """Load the model and build the engine. Raises ModelError or BudgetError for what the user can mend."""
    began = time.monotonic()
    loaded = load_runner(
        RunnerOptions(
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
        ),
        progress,
    )
    pool = KVPool(loaded.num_blocks, loaded.block_size, config.enable_prefix_caching)
    limits = Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=loaded.max_num_batched_tokens,
        max_model_len=loaded.max_model_len,
        rope_switch=loaded.rope_switch,
        num_speculative_tokens=config.num_speculative_tokens,
        # A GPU's step time hardly depends on the chunk until the token budget is full: nothing to learn there.
        target_step_time=config.target_step_time if loaded.device.startswith("cpu") else None,
    )
    cost = CostModel(loaded.weight_bytes)
    distance = loaded.kv_distance
    engine = Engine(pool, loaded.runner, limits, time.monotonic, cost, loaded.grammars)
    return engine, Ready(
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.model_config.vocab_size,
        num_blocks=pool.num_usable,
        block_size=loaded.block_size,
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
