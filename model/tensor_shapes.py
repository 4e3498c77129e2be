"""Names and shapes of a native decoder's tensors, as transformers saves them. No torch here."""

from __future__ import annotations

from collections.abc import Mapping

from model.config import ModelConfig
from model.errors import ModelError

Shape = tuple[int, ...]


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that the model must have, by its name in a safetensors checkpoint.

    Phi-3 keeps q, k, v in one projection (`qkv_proj`), and gate and up in another (`gate_up_proj`).
    """
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    layer = _layer_shapes(config)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norms = {
        "pre": ("input", "post_attention"),
        "post": ("post_attention", "post_feedforward"),
        "sandwich": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
    }[config.norms]
    shapes: dict[str, Shape] = {f"{norm}_layernorm.weight": (hidden,) for norm in norms}
    linears: dict[str, tuple[Shape, bool]] = {
        "self_attn.o_proj": ((hidden, q), config.output_bias),
        "mlp.down_proj": ((hidden, inner), config.mlp_bias),
    }
    if config.architecture == "Phi3ForCausalLM":
        linears["self_attn.qkv_proj"] = ((q + 2 * kv, hidden), config.qkv_bias)
        linears["mlp.gate_up_proj"] = ((2 * inner, hidden), config.mlp_bias)
    else:
        linears["self_attn.q_proj"] = ((q, hidden), config.qkv_bias)
        linears["self_attn.k_proj"] = ((kv, hidden), config.qkv_bias)
        linears["self_attn.v_proj"] = ((kv, hidden), config.qkv_bias)
        linears["mlp.gate_proj"] = ((inner, hidden), config.mlp_bias)
        linears["mlp.up_proj"] = ((inner, hidden), config.mlp_bias)
    for name, (shape, has_bias) in linears.items():
        shapes[f"{name}.weight"] = shape
        if has_bias:
            shapes[f"{name}.bias"] = shape[:1]
    if config.qk_norm != "none":
        heads = config.qk_norm == "head"
        shapes["self_attn.q_norm.weight"] = (config.head_dim if heads else q,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim if heads else kv,)
    return shapes


def check_shapes(found: Mapping[str, Shape], config: ModelConfig, where: str) -> None:
    """Raises ModelError, naming the tensor, unless `found` has exactly the native decoder's tensors and shapes.

    A tensor too many is an error too: a bias that the configuration does not mention would change every answer.
    """
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"{where}: the tensor {name} is missing")
        if found[name] != shape:
            raise ModelError(f"{where}: the tensor {name} has the shape {list(found[name])}, expected {list(shape)}")
    for name in found:
        if name not in expected:
            raise ModelError(f"{where}: the tensor {name} has no place in a {config.architecture} so configured")
