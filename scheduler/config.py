"""Everything the engine process is told at start: one frozen record, sent to it as its first message."""

from __future__ import annotations

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Validated by `server.settings`; bytes are bytes, seconds are seconds, None means "derive it"."""

    model: str | None = None
    """Hub id, folder, or GGUF file; None: the built-in demo model."""
    device: str = "auto"
    """auto, cpu or cuda."""
    dtype: str = "auto"
    """auto, float32, bfloat16 or float16. auto on a CPU: bfloat16 where it has the instructions, else float32."""
    quantization: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    """Token budget of a step; None: 512 on a CPU, 8192 on a GPU."""
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: str = "auto"
    """auto or a name of `kvpool.formats.FORMATS`. auto: 16 bits wherever `dtype` is auto, so that a budget holds the
    same number of tokens on every machine; else `dtype`."""
    force_kv_cache_dtype: bool = False
    """Serve it even where `model.gate` finds that it moves the model too far."""
    block_size: int = 16
    enable_prefix_caching: bool = True
    kv_disk: str | None = None
    """File of the tier behind the pool; with `kv_disk_size`."""
    kv_disk_size: int | None = None
    kv_host_memory: int | None = None
    """Bytes of host memory for the tier instead."""
    target_step_time: float = 0.1
    """On a CPU: seconds that a step with a prompt chunk in it should not exceed."""
    num_speculative_tokens: int = 8
    """Longest draft of a sequence, in tokens; 0: no speculation."""
    async_scheduling: bool | None = None
    """Plan and launch a step while the one before it runs; None: not on a CPU, where the same cores would do both."""
