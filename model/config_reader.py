"""ModelConfig out of config.json or GGUF metadata, through an allow-list: only the fields named here are ever read.

What the native decoder cannot express (an unknown architecture, activation or rotary scaling) gives `native=False` with
the basic numbers; such a model runs through transformers' own code. What no server can run gives ModelError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from model.config import LayerType, ModelConfig, RopeConfig
from model.config_fields import Fields, read_json
from model.config_rope import MAX_CONTEXT, read_layered_rope, read_rope
from model.errors import ModelError
from model.gguf import GGUFFile
from model.gguf_config import gguf_fields
from model.source import ModelSource

FULL: LayerType = "full"
SLIDING: LayerType = "sliding"
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 23
ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx"),
}


@dataclass(frozen=True, slots=True)
class Family:
    """What one config class of transformers fixes, and its defaults where config.json is silent."""

    windows: Literal["none", "all", "types"] = "none"
    """Sliding layers: none; all, where there is a window; by `layer_types` or the family's pattern."""
    qkv_bias: bool | None = None
    """None: `attention_bias` says so, for the output projection too."""
    qk_norm: Literal["none", "head", "full"] = "none"
    norms: Literal["pre", "post", "sandwich"] = "pre"
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096}
_GEMMA = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA_3 = _GEMMA | {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family("all", False, defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "Qwen2ForCausalLM": Family("types", True, defaults=_QWEN),
    "Qwen3ForCausalLM": Family("types", qk_norm="head", defaults=_QWEN | {"head_dim": 128}),
    "SmolLM3ForCausalLM": Family("types", defaults={"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "Phi3ForCausalLM": Family("all", False, defaults={"rms_norm_eps": 1e-5}),
    "GraniteForCausalLM": Family(),
    "Olmo2ForCausalLM": Family(qk_norm="full", norms="post", defaults={"rms_norm_eps": 1e-5}),
    "Gemma2ForCausalLM": Family(
        "types",
        norms="sandwich",
        defaults=_GEMMA | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    ),
    "Gemma3ForCausalLM": Family("types", qk_norm="head", norms="sandwich", defaults=_GEMMA_3),
}
_BY_MODEL_TYPE = {name.removesuffix("ForCausalLM").lower(): name for name in FAMILIES} | {
    "gemma3_text": "Gemma3ForCausalLM"
}
_PHI3, _SMOLLM3, _GEMMA3 = "Phi3ForCausalLM", "SmolLM3ForCausalLM", "Gemma3ForCausalLM"
_HAS_MLP_BIAS = frozenset({"LlamaForCausalLM", "GraniteForCausalLM", _SMOLLM3})
_USES_WINDOW_FLAG = frozenset({"Qwen2ForCausalLM", "Qwen3ForCausalLM", _SMOLLM3})


def read_config(source: ModelSource) -> ModelConfig:
    """The configuration of a model on disk. Raises ModelError, one line, naming the file and the field."""
    if source.kind == "folder":
        path = source.path / "config.json"
        return config_from_json(read_json(path), str(path))
    file = GGUFFile(source.path)
    config = config_from_json(gguf_fields(file), str(source.path))
    if not config.native:
        raise ModelError(f"{source.path}: its {config.architecture} settings are not supported from GGUF files")
    # GGUF's Gemma files hold weights that have the 1 added already.
    return replace(config, norm_offset=0.0)


def config_from_json(values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """The configuration that `values`, the parsed config.json, describes."""
    config = Fields(values, where)
    architecture = _architecture(config)
    if architecture == "Gemma3ForConditionalGeneration":
        text = config.child("text_config")
        shared = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype")
        inherited = {key: values[key] for key in shared if key in values}
        config, architecture = Fields(inherited | dict(text.values), text.where), _GEMMA3
    if config.has("quantization_config"):
        raise ModelError(f"{where}: quantization_config: quantised checkpoints cannot be loaded; use GGUF or bfloat16")
    family = FAMILIES.get(architecture)
    if family is None:
        return _foreign(config, architecture)
    # A null is an answer (no window, no soft cap), not a gap for the default.
    return _native(Fields({**family.defaults, **config.values}, config.where), architecture, family)


def _architecture(config: Fields) -> str:
    if config.boolean("is_encoder_decoder", False):
        raise config.bad("is_encoder_decoder", "false: only causal language models can be served")
    names = config.values.get("architectures")
    if names is None:
        model_type = config.text("model_type", "")
        if model_type not in _BY_MODEL_TYPE:
            raise ModelError(f"{config.where}: architectures is missing")
        return _BY_MODEL_TYPE[model_type]
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or not name.isidentifier() or len(name) > 100:
        raise config.bad("architectures", "a list of one class name")
    if not name.endswith(("ForCausalLM", "LMHeadModel")) and name != "Gemma3ForConditionalGeneration":
        raise config.bad("architectures", "a causal language model (…ForCausalLM)")
    return name


def _basics(config: Fields, architecture: str) -> ModelConfig:
    """The numbers that every decoder has; everything else at its plainest."""
    values = dict(config.values)
    for name, others in _OTHER_NAMES.items():
        if values.get(name) is None:
            values[name] = next((values[other] for other in others if values.get(other) is not None), None)
    config = Fields(values, config.where)
    hidden_size = config.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = config.integer("num_attention_heads", 1, MAX_WIDTH)
    one_head = config.boolean("multi_query", False) and not config.boolean("new_decoder_architecture", False)
    num_kv_heads = 1 if one_head else config.integer("num_key_value_heads", 1, num_heads, num_heads)
    if num_heads % num_kv_heads:
        raise config.bad("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
    if not config.has("head_dim") and hidden_size % num_heads:
        raise config.bad("hidden_size", f"a multiple of num_attention_heads, {num_heads}, or head_dim be given")
    head_dim = config.integer("head_dim", 1, 4096, max(hidden_size // num_heads, 1))
    if num_heads * head_dim > MAX_WIDTH:
        raise config.bad("head_dim", f"at most {MAX_WIDTH // num_heads} with {num_heads} heads")
    vocab_size = config.integer("vocab_size", 1, MAX_VOCAB)
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    dtype = config.text(config.first("dtype", "torch_dtype"), "bfloat16").removeprefix("torch.")
    bos = config.token_ids("bos_token_id", vocab_size)
    return ModelConfig(
        architecture=architecture,
        native=False,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", 1, MAX_WIDTH, 4 * hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=config.integer("max_position_embeddings", 1, MAX_CONTEXT, 2048),
        norm_eps=config.number(config.first("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"), 1e-20, 1.0, 1e-6),
        layer_types=(FULL,) * num_layers,
        rope=RopeConfig(theta=10_000.0),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        attention_scale=head_dim**-0.5,
        dtype=dtype if dtype in ("float32", "float16", "bfloat16") else "bfloat16",
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=config.token_ids("eos_token_id", vocab_size),
    )


def _foreign(config: Fields, architecture: str) -> ModelConfig:
    if not config.has(config.first("hidden_size", "n_embd", "d_model")) and config.has("text_config"):
        config = config.child("text_config")
    basics = _basics(config, architecture)
    if not config.has("layer_types"):
        return basics
    layer_types = _listed_layer_types(config, basics.num_layers)
    window = config.integer("sliding_window", 1, MAX_CONTEXT) if SLIDING in layer_types else None
    return replace(basics, layer_types=layer_types, sliding_window=window)


def _native(config: Fields, architecture: str, family: Family) -> ModelConfig:
    basics = _basics(config, architecture)
    config.integer("intermediate_size", 1, MAX_WIDTH)
    config.integer("max_position_embeddings", 1, MAX_CONTEXT)
    is_gemma = family.norms == "sandwich"
    local_rope = None
    rope: RopeConfig | None
    if architecture == _GEMMA3:
        rope, local_rope = read_layered_rope(config, basics.head_dim)
    else:
        theta = 2_000_000.0 if architecture == _SMOLLM3 else 10_000.0
        rope = read_rope(config, basics.head_dim, theta, is_phi3=architecture == _PHI3)
    partial = any(kind is not None and kind.partial_factor != 1.0 for kind in (rope, local_rope))
    act = config.text("hidden_activation", "gelu_pytorch_tanh") if is_gemma else config.text("hidden_act", "silu")
    if (
        rope is None
        or (architecture == _GEMMA3 and local_rope is None)
        or act not in ACTIVATIONS
        or (partial and architecture != _PHI3)
    ):
        return replace(basics, rope=rope or basics.rope)
    if config.boolean("use_bidirectional_attention", False):
        raise config.bad("use_bidirectional_attention", "false: only causal language models can be served")
    layer_types, window = _layers(config, architecture, family, basics.num_layers)
    if local_rope is not None and window is None and SLIDING in layer_types:
        raise config.bad("sliding_window", "given, since layer_types has sliding layers")
    bias = config.boolean("attention_bias", False)
    scale = basics.attention_scale
    if architecture == "GraniteForCausalLM":
        scale = config.number("attention_multiplier", 1e-6, 1e6, 1.0)
    elif is_gemma:
        scale = config.number("query_pre_attn_scalar", 1e-6, 1e9) ** -0.5
    granite = config if architecture == "GraniteForCausalLM" else Fields({}, config.where)
    return replace(
        basics,
        native=True,
        layer_types=layer_types if window is not None else (FULL,) * basics.num_layers,
        rope=rope,
        local_rope=local_rope if local_rope != rope else None,
        no_rope_layers=_no_rope_layers(config, basics.num_layers) if architecture == _SMOLLM3 else frozenset(),
        sliding_window=window,
        activation=ACTIVATIONS[act],
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias if family.qkv_bias is None else False,
        mlp_bias=architecture in _HAS_MLP_BIAS and config.boolean("mlp_bias", False),
        qk_norm=family.qk_norm,
        norms=family.norms,
        norm_offset=1.0 if is_gemma else 0.0,
        attention_scale=scale,
        attention_softcap=config.optional_number("attn_logit_softcapping", 1e-3, 1e6) if is_gemma else None,
        logits_softcap=config.optional_number("final_logit_softcapping", 1e-3, 1e6) if is_gemma else None,
        embedding_multiplier=(
            basics.hidden_size**0.5 if is_gemma else granite.number("embedding_multiplier", 1e-6, 1e6, 1.0)
        ),
        residual_multiplier=granite.number("residual_multiplier", 1e-6, 1e6, 1.0),
        logits_divisor=granite.number("logits_scaling", 1e-6, 1e6, 1.0),
    )


def _layers(
    config: Fields, architecture: str, family: Family, num_layers: int
) -> tuple[tuple[LayerType, ...], int | None]:
    """The kind of every layer, and the window of the sliding ones; None where no layer has one."""
    window = config.integer("sliding_window", 1, MAX_CONTEXT) if config.has("sliding_window") else None
    if family.windows == "none" or (
        architecture in _USES_WINDOW_FLAG and not config.boolean("use_sliding_window", False)
    ):
        window = None
    types: tuple[LayerType, ...]
    if family.windows == "none":
        types = (FULL,) * num_layers
    elif family.windows == "all":
        types = (SLIDING,) * num_layers
    elif config.has("layer_types"):
        types = _listed_layer_types(config, num_layers)
    else:
        types = tuple(SLIDING if _slides(config, architecture, layer) else FULL for layer in range(num_layers))
    return types, window if SLIDING in types else None


def _slides(config: Fields, architecture: str, layer: int) -> bool:
    """Whether a layer is a sliding one by its family's own pattern."""
    if architecture == _SMOLLM3:
        return layer in _no_rope_layers(config, layer + 1)
    if architecture in _USES_WINDOW_FLAG:
        return layer >= config.integer("max_window_layers", 0, MAX_LAYERS, 28)
    pattern = config.integer("sliding_window_pattern", 1, MAX_LAYERS, 6) if architecture == _GEMMA3 else 2
    return (layer + 1) % pattern != 0


def _listed_layer_types(config: Fields, num_layers: int) -> tuple[LayerType, ...]:
    names: dict[str, LayerType] = {"full_attention": FULL, "sliding_attention": SLIDING}
    listed = config.values["layer_types"]
    if not isinstance(listed, list) or len(listed) != num_layers:
        raise config.bad("layer_types", f"a list of {num_layers} kinds, one per layer")
    for name in listed:
        if not isinstance(name, str) or name not in names:
            raise config.bad("layer_types", f"made of {' and '.join(names)}, not {str(name)[:40]!r}")
    return tuple(names[name] for name in listed)


def _no_rope_layers(config: Fields, num_layers: int) -> frozenset[int]:
    """SmolLM3's layers without rotary embedding: those whose entry is 0, or every n-th one."""
    listed = config.values.get("no_rope_layers")
    if listed is None:
        interval = config.integer("no_rope_layer_interval", 1, MAX_LAYERS, 4)
        return frozenset(range(interval - 1, num_layers, interval))
    if not isinstance(listed, list) or len(listed) < num_layers or any(item not in (0, 1) for item in listed):
        raise config.bad("no_rope_layers", f"a list of {num_layers} zeros and ones")
    return frozenset(layer for layer in range(num_layers) if not listed[layer])
