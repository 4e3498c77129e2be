"""Models of known shapes with random weights, made on the device: nothing is read, nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpool.formats import FORMATS, KVLayout
from model.attention.base import Attention
from model.config import LayerType, ModelConfig, RopeConfig
from model.decoder import Decoder
from model.precision import Precision
from model.tensor_shapes import Shape, expected_shapes


def _config(
    architecture: str,
    sizes: tuple[int, int, int, int, int, int, int],
    theta: float,
    *,
    tied: bool,
    heads_normed: bool,
) -> ModelConfig:
    vocab, hidden, inner, layers, heads, kv_heads, dim = sizes
    return ModelConfig(
        architecture=architecture,
        native=True,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        max_position_embeddings=8192,
        norm_eps=1e-6,
        layer_types=FULL * layers,
        rope=RopeConfig(theta),
        tie_word_embeddings=tied,
        qk_norm="head" if heads_normed else "none",
        attention_scale=dim**-0.5,
    )


FULL: tuple[LayerType, ...] = ("full",)
_TINY = (512, 64, 96, 2, 4, 2, 32)
_QWEN3 = (151_936, 1024, 3072, 28, 16, 8, 128)
_LLAMA = (128_256, 4096, 14_336, 32, 32, 8, 128)

CONFIGS = {
    "tiny": _config("Qwen3ForCausalLM", _TINY, 1e6, tied=True, heads_normed=True),
    "qwen3-0.6b": _config("Qwen3ForCausalLM", _QWEN3, 1e6, tied=True, heads_normed=True),
    "llama-3.1-8b": _config("LlamaForCausalLM", _LLAMA, 5e5, tied=False, heads_normed=False),
}
"""tiny: to try the script itself."""


def random_transformer(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The same by transformers' own code, for its continuous batching."""
    import transformers

    config = CONFIGS[name]
    family = config.architecture.removesuffix("ForCausalLM")
    described = getattr(transformers, f"{family}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    with device:
        return transformers.AutoModelForCausalLM.from_config(described, dtype=dtype).eval()  # type: ignore[no-untyped-call]


class RandomWeights:
    """A WeightStore: norms are ones, the rest is drawn when asked for, small enough that activations stay finite."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = expected_shapes(config)
        self._dtype, self._device = dtype, device

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> Shape:
        return self._shapes[name]

    def get(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        shape, kind = self._shapes[name], dtype or self._dtype
        if len(shape) == 1:
            return torch.ones(shape, dtype=kind, device=self._device)
        return torch.empty(shape, dtype=kind, device=self._device).normal_(0.0, shape[1] ** -0.5)


def random_decoder(name: str, dtype: torch.dtype, attention: Attention, device: torch.device, longest: int) -> Decoder:
    """A decoder of CONFIGS, in `dtype`, for sequences of up to `longest` tokens."""
    config = CONFIGS[name]
    with torch.inference_mode():
        weights = RandomWeights(config, dtype, device)
        return Decoder(config, weights, attention, Precision(dtype, dtype, FORMATS["bfloat16"]), device, longest)


def layout(config: ModelConfig, kv: str, block_size: int) -> KVLayout:
    return KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, FORMATS[kv], block_size)
