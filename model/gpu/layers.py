"""All layers of a decoder with our own kernels between the matrix products: six launches of ours a layer at most."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpool.storage import KVStorage
from model.attention.triton import TritonAttention
from model.config import ModelConfig
from model.gpu.norms import adding, gating
from model.gpu.write import writing
from model.inputs import StepInputs
from model.layer import Layer
from model.layers import RMSNorm
from model.rope import RopeTable


class TritonLayers:
    """What `Decoder.forward` does behind the embedding, rounding once where that rounds often."""

    __slots__ = ("attention", "config", "layers", "norm", "ropes")

    def __init__(
        self,
        config: ModelConfig,
        layers: list[Layer],
        ropes: list[RopeTable],
        norm: RMSNorm,
        attention: TritonAttention,
    ) -> None:
        self.config = config
        self.layers = layers
        self.ropes = ropes
        self.norm = norm
        self.attention = attention

    def __call__(self, x: Tensor, inputs: StepInputs, storage: KVStorage) -> Tensor:
        """x [tokens, hidden], which is added to, → hidden states, normed for the head."""
        cos_sin = [rope.rows(inputs.positions, inputs.lengths, x.dtype) for rope in self.ropes]
        added: Tensor | None = None
        after: RMSNorm | None = None
        for number, layer in enumerate(self.layers):
            y = self._step(x, added, after, layer.before_attention)
            y = self._attend(y, number, layer, cos_sin, inputs, storage)
            y = self._step(x, y, layer.after_attention, layer.before_mlp)
            both = layer.gate_up(y)
            y = both.new_empty(len(both), both.shape[1] // 2)
            gating(both, y, self.config.activation).run()
            added, after = layer.down(y), layer.after_mlp
        return self._step(x, added, after, self.norm)

    def _step(self, x: Tensor, added: Tensor | None, after: RMSNorm | None, before: RMSNorm | None) -> Tensor:
        """x += after(added); what the next projection reads: before(x)."""
        if added is None and before is None:
            return x
        out = x if before is None else torch.empty_like(x)
        adding(x, added, out, after=after, before=before, alpha=self.config.residual_multiplier).run()
        return out

    def _attend(
        self,
        y: Tensor,
        number: int,
        layer: Layer,
        cos_sin: list[tuple[Tensor, Tensor]],
        inputs: StepInputs,
        storage: KVStorage,
    ) -> Tensor:
        config, tokens = self.config, len(y)
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = layer.qkv(y)
        if layer.q_norm and layer.k_norm:  # over all heads at once
            q, k, v = qkv.tensor_split((heads * dim, (heads + kv_heads) * dim), dim=-1)
            qkv = torch.cat([layer.q_norm(q), layer.k_norm(k), v], dim=-1)
        query = qkv.new_empty(tokens, heads, dim)
        rope = None if layer.rope is None else cos_sin[layer.rope]
        qkv = qkv.view(tokens, heads + 2 * kv_heads, dim)
        inputs = inputs.groups[storage.groups.of[number]]
        writing(qkv, query, storage, number, inputs, norm=layer.qk_norm, cos_sin=rope).run()
        attended = self.attention.attend(
            query,
            query.dtype,
            storage,
            number,
            inputs,
            scale=config.attention_scale,
            window=layer.window,
            softcap=config.attention_softcap,
        )
        return layer.output(attended.view(tokens, heads * dim))
