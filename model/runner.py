"""From options to a runner that is ready: model, device, number types, pool, warm-up. One progress line a stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from kvpool.budget import PoolPlan, cpu_budget, format_bytes, given_budget, gpu_budget, plan_pool
from kvpool.formats import KVLayout
from kvpool.groups import Windows
from kvpool.memory import Memory, available_memory
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
from model.follower import FollowingRunner, RankedGrammars
from model.gate import PROMPTS, Distance, measure
from model.grammar import Grammars
from model.graphs import buckets, captured
from model.kernels.loaded import Kernels, load_kernels
from model.parallel import Group, Ranks
from model.params import SamplingParams
from model.pooling import read_embedding
from model.precision import Precision, choose_device, choose_precision, dtype_name
from model.shard import FLAG, Shard, check_split
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
    tensor_parallel_size: int = 1
    one_group: bool = False
    """A block must hold all layers: something keeps it whole."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner and what the engine and the front end must know of it."""

    runner: Runner
    source: ModelSource
    model_config: ModelConfig
    """Of a split model, as all bytes below, of this rank's part."""
    num_blocks: int
    """The null block included: what KVPool is made with."""
    windows: Windows
    """Of the pool's groups of layers."""
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


def check_ranks(options: RunnerOptions) -> ModelSource:
    """Whether the model can be split among `tensor_parallel_size` ranks here, before anything is loaded; its files.

    Raises ModelError, one line, where it cannot.
    """
    size, source = options.tensor_parallel_size, resolve(options.model)
    check_split(read_config(source), size)
    if choose_device(options.device).type == "cuda" and torch.cuda.device_count() < size:
        raise ModelError(f"{FLAG} {size}: torch sees {torch.cuda.device_count()} GPUs")
    return source


def load_runner(
    options: RunnerOptions, progress: Progress = lambda stage, detail: None, ranks: Ranks | None = None
) -> LoadedModel:
    """Load everything and run one step of each kind, so that the first request is as fast as the second.

    `ranks`: those of a model that is split, which all call this, and come to pools of as many blocks.
    Raises ModelError or kvpool.budget.BudgetError, one line each, for what the user can mend.
    """
    device = choose_device(options.device) if ranks is None else _place(options.device, ranks)
    source = resolve(options.model)
    whole = config = read_config(source)
    if ranks is not None:
        config = Shard(whole, ranks.rank, ranks.size).config
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
        _layout(config, precision, options, longest)
    if options.kv_cache_memory is not None:
        budget = given_budget(options.kv_cache_memory, _memory(ranks) if device.type == "cpu" else None)
        if config.native:
            plan_pool(_layout(config, precision, options, longest), budget, longest)

    progress("weights", f"{source.name}: {config.architecture}, {config.num_layers} layers, as {_types(precision)}")
    with torch.inference_mode():
        model = load_model(source, whole, attention, precision, device, longest, ranks)
    weight_bytes = model.weight_bytes
    progress("weights", f"{format_bytes(weight_bytes)} on {device}")
    if ranks is not None:
        ranks.connect(device)
        weight_bytes = ranks.least(weight_bytes)  # the first guess of what steps cost, which must be the same on all
        copies = ranks.size // whole.num_kv_heads
        more = f"; each key head is on {copies} of them" if copies > 1 else ""
        progress("ranks", f"{ranks.size}, each with as much{more}")
        if device.type == "cpu":
            progress("warning", f"{FLAG} is for GPUs: on a CPU threads do the same, and whole layers at a time")

    layout = _layout(model.config, precision, options, longest)
    plan = _plan(model, layout, options, longest, max_tokens, device, ranks)
    if ranks is not None:
        plan = replace(plan, num_blocks=ranks.least(plan.num_blocks))
    for line in plan.lines():
        progress("kv cache", line)
    if options.one_group and len(set(model.config.outgrown(longest))) > 1:
        progress(
            "kv cache", "blocks hold all layers, for a tier's sake: those that slide keep what lies behind their window"
        )
    max_model_len, fits = longest, plan.longest(max_tokens)
    if fits < longest:
        # A context that was asked for stays: longer requests are refused one by one, with the pool's numbers.
        if options.max_model_len is None:
            max_model_len = fits
        progress("warning", f"the kv cache holds {fits} tokens of the {longest} that a context may have")

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
        if ranks is not None:  # rank 0 has the logits
            distance = Distance(*ranks.leading([distance.divergence, distance.agreement]))
        _admit(distance, layout.format.name, options.force_kv_cache_dtype, progress)
    if ranks is None:  # split layers meet between their kernels, outside any graph
        columns = layout.paging.columns(max_model_len)
        model = captured(model, storage, buckets(min(options.max_num_seqs, max_tokens)), columns, progress)
    runner = _kind(ranks)(model, storage, max_tokens, kernels)
    progress("warm-up", "one step of each kind")
    warm_up(runner, min(max_tokens, max_model_len, layout.block_size))
    return LoadedModel(
        runner=runner,
        source=source,
        model_config=model.config,
        num_blocks=plan.num_blocks,
        windows=storage.groups.windows,
        block_size=layout.block_size,
        kv_bytes=plan.bytes,
        kv_bytes_per_token=layout.bytes_per_token,
        weight_bytes=weight_bytes,
        device=str(device),
        dtype=dtype_name(precision.weights),
        kv_cache_dtype=layout.format.name,
        kv_distance=distance,
        attention=attention.name,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_tokens,
        grammars=(Grammars if ranks is None else RankedGrammars).of(
            partial(load_tokenizer, source), model.config.vocab_size
        ),
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
    group: Group | None = None,
) -> Model:
    """The native decoder, or transformers' own code for what it does not know. Raises ModelError."""
    if config.native:
        weights = open_weights(source, config)
        return Decoder(config, weights, attention, precision, device, max_model_len, group=group)
    if source.kind != "folder":
        raise ModelError(f"{source.path}: {config.architecture} can be served from a folder of safetensors only")
    # Imported here: transformers takes seconds, and a native model does not need it.
    from model.transformers_model import load_transformers

    return load_transformers(source.path, config, attention, precision, device)


def warm_up(runner: Runner, count: int) -> None:
    """One prompt of `count` tokens and one decode step, in block 1 and those behind it."""
    columns, groups = -(-count // runner.storage.block_size), len(runner.storage.groups.windows)
    first, *more = (list(range(begin, begin + columns)) for begin in range(1, 1 + groups * columns, columns))
    params = SamplingParams(max_tokens=1, seed=0)
    tokens = [0] * count
    runner.execute(Batch([Row(tokens, count, 0, count, first, params, more=more)])).result()
    runner.execute(Batch([Row(tokens, count, count - 1, 1, first, params, more=more)])).result()


def profile(
    model: Model, layout: KVLayout, rows: int, count: int, device: torch.device, kind: type[Runner] = Runner
) -> int:
    """Bytes of a GPU's memory in use, by anybody, at the peak of a step with `rows` sequences and `count` tokens, and
    beside the largest graph of a decode step.

    All blocks of the dummy step are one block: what is computed means nothing, what it takes does.
    """
    storage = KVStorage(layout, 2, device)
    params = SamplingParams(max_tokens=1, seed=0, temperature=1.0, top_p=0.5)
    counts = [1] * (rows - 1) + [max(1, count - rows + 1)]
    columns, others = layout.paging.columns, len(storage.groups.windows) - 1
    tables = [[1] * columns(n) for n in counts]
    batch = Batch(
        [Row([0] * n, n, 0, n, table, params, more=[table] * others) for n, table in zip(counts, tables, strict=True)]
    )
    torch.cuda.reset_peak_memory_stats(device)
    kind(model, storage, sum(counts)).execute(batch).result()
    graph = None
    if kind is Runner:
        graph = captured(model, storage, buckets(rows)[-1:], columns(count), lambda stage, detail: None)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    del graph  # smaller ones share its memory
    return total - free + peak


def _plan(
    model: Model,
    layout: KVLayout,
    options: RunnerOptions,
    longest: int,
    max_tokens: int,
    device: torch.device,
    ranks: Ranks | None,
) -> PoolPlan:
    if device.type == "cuda":
        if options.kv_cache_memory is not None:
            return plan_pool(layout, given_budget(options.kv_cache_memory), longest)
        used = profile(
            model, layout, min(options.max_num_seqs, max_tokens), min(max_tokens, longest), device, _kind(ranks)
        )
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info(device)[1]
        return plan_pool(layout, gpu_budget(total, used, options.gpu_memory_utilization), longest)
    memory = _memory(ranks)
    if options.kv_cache_memory is not None:
        return plan_pool(layout, given_budget(options.kv_cache_memory, memory), longest)
    return plan_pool(layout, cpu_budget(layout, memory, options.max_num_seqs, longest, chunk=max_tokens), longest)


def _kind(ranks: Ranks | None) -> type[Runner]:
    return Runner if ranks is None or ranks.rank == 0 else FollowingRunner


def _place(name: str, ranks: Ranks) -> torch.device:
    """Where a rank computes: each has a GPU of its own, or its share of the processor."""
    device = choose_device(name)
    if device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks.size))
        return device
    device = torch.device(device.type, ranks.rank)
    torch.cuda.set_device(device)
    return device


def _memory(ranks: Ranks | None) -> Memory:
    """What is there for this process, on a CPU."""
    memory = available_memory()
    if ranks is None:
        return memory
    return Memory(memory.bytes // ranks.size, f"{memory.source}, for each of {ranks.size} ranks")


def _layout(config: ModelConfig, precision: Precision, options: RunnerOptions, longest: int) -> KVLayout:
    form, dim = precision.kv, config.head_dim
    if dim % form.head_multiple:
        raise ModelError(
            f"--kv-cache-dtype {form.name}: needs a head size that is a multiple of {form.head_multiple}, not {dim}"
        )
    windows = config.outgrown(longest)
    if options.one_group and len(set(windows)) > 1:
        windows = ()
    return KVLayout(config.num_layers, config.num_kv_heads, dim, form, options.block_size, windows)


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
