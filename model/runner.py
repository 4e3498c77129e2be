"""From options to a runner that is ready: model, device, number types, pool, warm-up. One progress line a stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kvpool.budget import PoolPlan, cpu_budget, format_bytes, given_budget, gpu_budget, plan_pool
from kvpool.formats import KVLayout
from kvpool.memory import available_memory
from kvpool.storage import KVStorage
from model.attention.base import Attention
from model.attention.cpu import CpuAttention
from model.attention.reference import ReferenceAttention
from model.batch import Batch, Row
from model.calibration import TEXT, fit_keys
from model.config import ModelConfig
from model.config_reader import read_config
from model.decoder import Decoder, Model
from model.embedding import EmbeddingConfig
from model.errors import ModelError
from model.executor import Runner
from model.gate import PROMPTS, Distance, measure
from model.grammar import Grammars
from model.graphs import buckets, captured
from model.kernels.loaded import Kernels, load_kernels
from model.params import SamplingParams
from model.pooling import read_embedding
from model.precision import Precision, choose_device, choose_precision, dtype_name
from model.source import ModelSource, resolve
from model.tokenizer import load_tokenizer
from model.weights import open_weights

Progress = Callable[[str, str], None]
"""Called with (stage, detail)."""


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Names and meanings as in `scheduler.config.EngineConfig`."""

    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: str = "auto"
    force_kv_cache_dtype: bool = False
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner and what the engine and the front end must know of it."""

    runner: Runner
    source: ModelSource
    model_config: ModelConfig
    num_blocks: int
    """The null block included: what KVPool is made with."""
    block_size: int
    kv_bytes: int
    kv_bytes_per_token: int
    weight_bytes: int
    device: str
    dtype: str
    """Of the stored weights."""
    kv_cache_dtype: str
    kv_distance: Distance | None
    """Of the pool from one of 16 bits, where it holds codes."""
    attention: str
    max_model_len: int
    max_num_batched_tokens: int
    grammars: Grammars
    rope_switch: int | None
    """Longest sequence, in tokens, that uses a model's short rotary factors; None: it has one kind. A sequence that
    grows past it must be computed anew from its first token, and prefixes of the two kinds must not be shared."""
    embedding: EmbeddingConfig


def load_runner(options: RunnerOptions, progress: Progress = lambda stage, detail: None) -> LoadedModel:
    """Load everything and run one step of each kind, so that the first request is as fast as the second.

    Raises ModelError or kvpool.budget.BudgetError, one line each, for what the user can mend.
    """
    device = choose_device(options.device)
    source = resolve(options.model)
    config = read_config(source)
    embedding = read_embedding(source, config.hidden_size)
    kernels = load_kernels(lambda detail: progress("kernels", detail)) if device.type == "cpu" else None
    attention = choose_attention(device, kernels, progress)
    precision = choose_precision(
        options.dtype,
        options.kv_cache_dtype,
        config.dtype,
        device,
        kernels if config.native else None,  # transformers' modules multiply with torch
        options.quantization,
    )
    max_tokens = options.max_num_batched_tokens or (512 if device.type == "cpu" else 8192)
    longest = _longest(config, options.max_model_len)
    # Before minutes of loading: a format that does not fit the heads, and the commonest mistake: a budget that is too
    # small, or more than there is.
    if config.native:
        _layout(config, precision, options)
    if options.kv_cache_memory is not None:
        budget = given_budget(options.kv_cache_memory, available_memory() if device.type == "cpu" else None)
        if config.native:
            plan_pool(_layout(config, precision, options), budget, longest)

    progress("weights", f"{source.name}: {config.architecture}, {config.num_layers} layers, as {_types(precision)}")
    with torch.inference_mode():
        model = load_model(source, config, attention, precision, device, longest)
    progress("weights", f"{format_bytes(model.weight_bytes)} on {device}")

    plan = _plan(model, _layout(model.config, precision, options), options, longest, max_tokens, device)
    for line in plan.lines():
        progress("kv cache", line)
    max_model_len = longest
    if plan.num_tokens < longest:
        # A context that was asked for stays: longer requests are refused one by one, with the pool's numbers.
        if options.max_model_len is None:
            max_model_len = plan.num_tokens
        progress("warning", f"the kv cache holds {plan.num_tokens} tokens of the {longest} that a context may have")

    layout = plan.layout
    try:
        storage = KVStorage(layout, plan.num_blocks, device)
    except (RuntimeError, OSError) as error:
        raise ModelError(f"the KV cache of {format_bytes(plan.bytes)} cannot be allocated: {error}") from None
    distance = None
    if layout.format.scale_bytes:
        encode = partial(load_tokenizer(source).encode, add_special_tokens=True)
        if storage.fit is not None:
            progress("kv cache", "fitting keys to the model")
            fit_keys(model, storage.fit, encode(TEXT)[:longest], encode(""))
        distance = measure(model, layout, storage.fit, [encode(text)[:longest] for text in PROMPTS], device)
        _admit(distance, layout.format.name, options.force_kv_cache_dtype, progress)
    columns = layout.blocks_for(max_model_len)
    model = captured(model, storage, buckets(min(options.max_num_seqs, max_tokens)), columns, progress)
    runner = Runner(model, storage, max_tokens, kernels)
    progress("warm-up", "one step of each kind")
    warm_up(runner, min(max_tokens, max_model_len, plan.num_tokens, layout.block_size))
    return LoadedModel(
        runner=runner,
        source=source,
        model_config=model.config,
        num_blocks=plan.num_blocks,
        block_size=layout.block_size,
        kv_bytes=plan.bytes,
        kv_bytes_per_token=layout.bytes_per_token,
        weight_bytes=model.weight_bytes,
        device=str(device),
        dtype=dtype_name(precision.weights),
        kv_cache_dtype=layout.format.name,
        kv_distance=distance,
        attention=attention.name,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_tokens,
        grammars=Grammars.of(partial(load_tokenizer, source), model.config.vocab_size),
        rope_switch=model.rope_switch,
        embedding=embedding,
    )


def choose_attention(device: torch.device, kernels: Kernels | None, progress: Progress) -> Attention:
    """The compiled kernels on a CPU, Triton's on a GPU; plain torch, with a warning on a GPU, where there are none."""
    if kernels is not None:
        return CpuAttention(kernels)
    if device.type == "cuda":
        try:
            from model.attention.triton import TritonAttention  # here: only a GPU has triton
        except ImportError as error:
            progress("warning", f"plain torch instead of our kernels for GPUs, which is several times slower: {error}")
        else:
            return TritonAttention(device)
    return ReferenceAttention()


def load_model(
    source: ModelSource,
    config: ModelConfig,
    attention: Attention,
    precision: Precision,
    device: torch.device,
    max_model_len: int,
) -> Model:
    """The native decoder, or transformers' own code for what it does not know. Raises ModelError."""
    if config.native:
        return Decoder(config, open_weights(source, config), attention, precision, device, max_model_len)
    if source.kind != "folder":
        raise ModelError(f"{source.path}: {config.architecture} can be served from a folder of safetensors only")
    # Imported here: transformers takes seconds, and a native model does not need it.
    from model.transformers_model import load_transformers

    return load_transformers(source.path, config, attention, precision, device)


def warm_up(runner: Runner, count: int) -> None:
    """One prompt of `count` tokens and one decode step, in block 1 and those behind it."""
    size = runner.storage.block_size
    params = SamplingParams(max_tokens=1, seed=0)
    tokens = [0] * count
    blocks = list(range(1, 1 + -(-count // size)))
    runner.execute(Batch([Row(tokens, count, 0, count, blocks, params)])).result()
    runner.execute(Batch([Row(tokens, count, count - 1, 1, blocks, params)])).result()


def profile(model: Model, layout: KVLayout, rows: int, count: int, device: torch.device) -> int:
    """Bytes of a GPU's memory in use, by anybody, at the peak of a step with `rows` sequences and `count` tokens, and
    beside the largest graph of a decode step.

    All blocks of the dummy step are one block: what is computed means nothing, what it takes does.
    """
    storage = KVStorage(layout, 2, device)
    params = SamplingParams(max_tokens=1, seed=0, temperature=1.0, top_p=0.5)
    counts = [1] * (rows - 1) + [max(1, count - rows + 1)]
    batch = Batch([Row([0] * n, n, 0, n, [1] * layout.blocks_for(n), params) for n in counts])
    torch.cuda.reset_peak_memory_stats(device)
    Runner(model, storage, sum(counts)).execute(batch).result()
    graph = captured(model, storage, buckets(rows)[-1:], layout.blocks_for(count), lambda stage, detail: None)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    del graph  # smaller ones share its memory
    return total - free + peak


def _plan(
    model: Model, layout: KVLayout, options: RunnerOptions, longest: int, max_tokens: int, device: torch.device
) -> PoolPlan:
    if device.type == "cuda":
        if options.kv_cache_memory is not None:
            return plan_pool(layout, given_budget(options.kv_cache_memory), longest)
        used = profile(model, layout, min(options.max_num_seqs, max_tokens), min(max_tokens, longest), device)
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info(device)[1]
        return plan_pool(layout, gpu_budget(total, used, options.gpu_memory_utilization), longest)
    memory = available_memory()
    if options.kv_cache_memory is not None:
        return plan_pool(layout, given_budget(options.kv_cache_memory, memory), longest)
    return plan_pool(layout, cpu_budget(layout, memory, options.max_num_seqs, longest), longest)


def _layout(config: ModelConfig, precision: Precision, options: RunnerOptions) -> KVLayout:
    form, dim = precision.kv, config.head_dim
    if dim % form.head_multiple:
        raise ModelError(
            f"--kv-cache-dtype {form.name}: needs a head size that is a multiple of {form.head_multiple}, not {dim}"
        )
    return KVLayout(config.num_layers, config.num_kv_heads, dim, form, options.block_size)


def _admit(distance: Distance, name: str, force: bool, progress: Progress) -> None:
    """Raises ModelError where the format moves the model too far, unless forced."""
    if distance.passes:
        progress("kv cache", f"{name} beside 16 bits: {distance}")
    elif force:
        progress("warning", distance.complaint(name))
    else:
        raise ModelError(f"{distance.complaint(name)}; --force-kv-cache-dtype serves it all the same")


def _longest(config: ModelConfig, asked: int | None) -> int:
    """Tokens of the longest sequence that the model can compute, or fewer where asked. ModelError where more."""
    limit = config.max_position_embeddings
    if asked is None:
        return limit
    if config.native and config.rope.scaling == "dynamic":
        factor = (config.rope.parameters or {}).get("factor", 1.0)
        limit = int(limit * (factor if isinstance(factor, float | int) else 1.0))
    if not 1 <= asked <= limit:
        raise ModelError(f"--max-model-len {asked}: must be between 1 and the model's {limit}")
    return asked


def _types(precision: Precision) -> str:
    stored, compute = precision.stored, dtype_name(precision.compute)
    return stored if stored == compute else f"{stored}, computed in {compute}"


__all__ = ["LoadedModel", "Runner", "RunnerOptions", "load_model", "load_runner"]
