"""All layers of a decoder in one call of the kernels, where they can do them: one parallel region a step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvpool.storage import KVStorage
from model.config import ModelConfig
from model.inputs import StepInputs
from model.layer import Layer
from model.layers import RMSNorm
from model.linear import KernelLinear
from model.precision import Precision
from model.rope import RopeTable

PHASES = ("norms", "qkv", "heads", "attention", "output", "gate_up", "down", "wait")
"""What a thread does within the layers, in the order of the kernels' `Phase`; wait: for the other threads."""


class FusedLayers:
    """What `Decoder.forward` does behind the embedding, in float32."""

    __slots__ = ("_decoder", "_ropes")

    def __init__(
        self, config: ModelConfig, layers: list[Layer], ropes: list[RopeTable], norm: RMSNorm, precision: Precision
    ) -> None:
        assert precision.kernels is not None
        self._ropes = ropes
        self._decoder: Any = precision.kernels.classes.Decoder(
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.norm_eps,
            config.attention_scale,
            config.attention_softcap or 0.0,
            config.residual_multiplier,
            config.activation,
        )
        for layer in layers:
            matrices = [_matrix(linear) for linear in layer.linears]
            norms = (
                layer.before_attention,
                layer.after_attention,
                layer.before_mlp,
                layer.after_mlp,
                layer.qk_norm,
                layer.q_norm,
                layer.k_norm,
            )
            rope = -1 if layer.rope is None else layer.rope
            self._decoder.add_layer(*matrices, [_weight(norm) for norm in norms], layer.window or 0, rope)
        self._decoder.set_last_norm(norm.weight)

    @staticmethod
    def of(
        config: ModelConfig, layers: list[Layer], ropes: list[RopeTable], norm: RMSNorm, precision: Precision
    ) -> FusedLayers | None:
        """None where there are no kernels, or the model's heads do not fit them."""
        if precision.kernels is None:
            return None
        fits = precision.kernels.ops.attends(config.num_heads, config.num_kv_heads, config.head_dim)
        return FusedLayers(config, layers, ropes, norm, precision) if fits else None

    def __call__(self, x: Tensor, inputs: StepInputs, storage: KVStorage) -> Tensor:
        """x [tokens, hidden] float32 becomes the hidden states, normed for the head."""
        tables = [
            part for rope in self._ropes for part in (rope.cos, rope.sin, rope.places(inputs.positions, inputs.lengths))
        ]
        fit = None if storage.fit is None else storage.fit.data
        pool = (storage.keys.tiles, storage.values.tiles, fit, storage.block_size, storage.places)
        self._decoder.forward(x, *pool, tables, *inputs.every_packed())
        return x

    def spent(self) -> dict[str, int]:
        """Nanoseconds of each phase since the last call, the mean of the threads. The first call begins it."""
        laps = self._decoder.spent()
        return dict(zip(PHASES, laps.double().mean(0).long().tolist(), strict=True)) if len(laps) else {}


def _matrix(linear: object) -> Any:
    assert isinstance(linear, KernelLinear)
    return linear.matrix


def _weight(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight
