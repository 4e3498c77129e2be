"""The decoder family: Llama 2 and 3, Mistral, Qwen2 and 3, SmolLM2 and 3, Phi-3, Granite, OLMo2, Gemma 2 and 3.

One layer, in its three arrangements of norms (a1, a2 around attention, m1, m2 around the MLP):

    pre        x + attention(a1(x))           then   x + mlp(m1(x))
    post       x + a2(attention(x))           then   x + m2(mlp(x))
    sandwich   x + a2(attention(a1(x)))       then   x + m2(mlp(m1(x)))

Granite multiplies what is added to x. Everything else is in `ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kvpool.storage import KVStorage
from model.attention.base import Attention
from model.config import ModelConfig
from model.fused import FusedLayers
from model.inputs import StepInputs
from model.layer import Layer, LayerLoader
from model.layers import Embedding, gated
from model.linear import measure_tiles
from model.parallel import Group
from model.precision import Precision
from model.rope import RopeTable, rotate
from model.shard import Shard
from model.weights import WeightStore

LOADERS = 2
"""Layers that are read at once: dequantising in numpy keeps one core busy, and memory holds each in several forms."""


class Model(Protocol):
    """What the runner needs of a model."""

    config: ModelConfig
    """Its layers, key heads and head size are those that the pool must have."""
    attention: Attention
    weight_bytes: int
    rope_switch: int | None
    """See `RopeTable.switch`."""
    reads_unwritten: bool
    """See `model.attention.base.Attention`."""

    def forward(self, inputs: StepInputs, storage: KVStorage) -> Tensor:
        """Write the step's keys and values to the pool; hidden states [T, hidden], normed for the head."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab] float32."""
        ...

    def likeliest(self, hidden: Tensor) -> Tensor | None:
        """The first id with the largest logit of each row, int64 [rows], BAD_LOGITS where they are not finite; None
        where that takes the logits."""
        ...


class LayersAtOnce(Protocol):
    """Our own kernels for all that lies behind the embedding."""

    def __call__(self, x: Tensor, inputs: StepInputs, storage: KVStorage) -> Tensor:
        """x [tokens, hidden], which it may change → hidden states, normed for the head."""
        ...


class Decoder:
    """The model in `config`, computed over the pool. Holds every weight; nothing grows after construction."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightStore,
        attention: Attention,
        precision: Precision,
        device: torch.device,
        max_model_len: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
        group: Group | None = None,
    ) -> None:
        """Read, fuse and convert the layers, LOADERS at a time; `progress` is told (layers done, layers). `group`: the
        ranks that compute a part of every layer each; `config` is the whole model's, `self.config` this rank's.

        Raises ModelError where a weight is missing or has the wrong shape.
        """
        shard = Shard(config) if group is None else Shard(config, group.rank, group.size)
        self.config = config = shard.config
        self.group = group
        self.attention = attention
        loader = LayerLoader(shard, weights, precision, device)
        self.layers: list[Layer] = []
        with ThreadPoolExecutor(LOADERS) as pool:
            ends = pool.submit(loader.ends)
            for layer in pool.map(loader.layer, range(config.num_layers)):
                self.layers.append(layer)
                progress(len(self.layers), config.num_layers)
            table, self.head, ends_bytes = ends.result()
        self.embedding = Embedding(table, loader.embedding_multiplier(), precision, shard.vocab.start, group)
        self.norm = loader.norm("model.norm.weight", config.hidden_size)
        ropes = [config.rope, *([config.local_rope] if config.local_rope is not None else [])]
        self.ropes = [
            RopeTable(rope, config.head_dim, config.max_position_embeddings, max_model_len, device) for rope in ropes
        ]
        self.rope_switch = next((rope.switch for rope in self.ropes if rope.switch is not None), None)
        measure_tiles([*(linear for layer in self.layers for linear in layer.linears), self.head.linear])
        self.weight_bytes = ends_bytes + self.norm.nbytes + sum(layer.nbytes for layer in self.layers)
        # The ranks meet between the kernels of a layer, which are called one by one then.
        self.fused: LayersAtOnce | None = self._fused(precision) if group is None else None
        self.reads_unwritten = self.fused is None and attention.reads_unwritten

    def forward(self, inputs: StepInputs, storage: KVStorage) -> Tensor:
        x = self.embedding(inputs.token_ids)
        if self.fused is not None:
            return self.fused(x, inputs, storage)
        cos_sin = [rope.rows(inputs.positions, inputs.lengths, x.dtype) for rope in self.ropes]
        multiplier, group = self.config.residual_multiplier, self.group
        for number, layer in enumerate(self.layers):
            y = layer.before_attention(x) if layer.before_attention else x
            y = self._attend(y, number, layer, cos_sin, inputs, storage)
            if group is not None:
                y = group.sum(y)
            if layer.after_attention:
                y = layer.after_attention(y)
            x = x.add_(y, alpha=multiplier)
            y = layer.before_mlp(x) if layer.before_mlp else x
            y = layer.down(gated(layer.gate_up(y), self.config.activation))
            if group is not None:
                y = group.sum(y)
            if layer.after_mlp:
                y = layer.after_mlp(y)
            x = x.add_(y, alpha=multiplier)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        if self.config.logits_divisor != 1.0:
            logits = logits.div_(self.config.logits_divisor)
        cap = self.config.logits_softcap
        if cap is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits if self.group is None else self.group.join(logits, self.config.vocab_size)

    def likeliest(self, hidden: Tensor) -> Tensor | None:
        # What is done to logits keeps their order, but rounding may make equals of two.
        plain = self.config.logits_divisor == 1.0 and self.config.logits_softcap is None and self.group is None
        return self.head.likeliest(hidden) if plain else None

    def abstain(self, tokens: int, joins: Sequence[int]) -> None:
        """Make with zeros the collectives that are left of a step which failed here, so that the other ranks come to
        its end; then they are told.

        The step has so many tokens, and asks for the logits of so many rows at a time; the group's tally says what was
        made of it.
        """
        group, embedding = self.group, self.embedding
        if group is None:
            return
        zeros = partial(torch.zeros, device=embedding.table.device)
        squares = self.config.qk_norm == "full"  # the first of three sums in each layer
        for done in range(group.tally.sums, 1 + (2 + squares) * len(self.layers)):
            if squares and done % 3 == 1:
                group.sum(zeros(tokens, 2))
            else:
                group.sum(zeros(tokens, self.config.hidden_size, dtype=embedding.compute))
        for rows in joins[group.tally.joins :]:
            group.join(zeros(rows, len(embedding.table)), self.config.vocab_size)

    def _squares(self, q: Tensor, k: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        """Means of q² and k² over all ranks' heads, float32 [tokens, 1]."""
        sums = group.sum(torch.cat([part.float().pow(2).sum(-1, keepdim=True) for part in (q, k)], -1))
        # A key head that several ranks have counts several times in both.
        return sums[:, :1] / (q.shape[-1] * group.size), sums[:, 1:] / (k.shape[-1] * group.size)

    def _attend(
        self,
        x: Tensor,
        number: int,
        layer: Layer,
        cos_sin: list[tuple[Tensor, Tensor]],
        inputs: StepInputs,
        storage: KVStorage,
    ) -> Tensor:
        config, tokens = self.config, x.shape[0]
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = layer.qkv(x)
        if layer.q_norm and layer.k_norm:
            q, k, v = torch.tensor_split(qkv, (heads * dim, (heads + kv_heads) * dim), dim=-1)
            of_q, of_k = (None, None) if self.group is None else self._squares(q, k, self.group)
            qk = torch.cat([layer.q_norm(q, of_q), layer.k_norm(k, of_k)], dim=-1).view(tokens, heads + kv_heads, dim)
            v = v.view(tokens, kv_heads, dim)
        else:
            packed = qkv.view(tokens, heads + 2 * kv_heads, dim)
            qk, v = packed[:, : heads + kv_heads], packed[:, heads + kv_heads :]
        if layer.qk_norm:
            qk = layer.qk_norm(qk)
        if layer.rope is not None:
            qk = rotate(qk, *cos_sin[layer.rope])
        inputs = inputs.groups[storage.groups.of[number]]
        storage.write_at(number, qk[:, heads:], v, inputs.blocks, inputs.offsets)
        attended = self.attention(
            qk[:, :heads],
            storage,
            number,
            inputs,
            scale=config.attention_scale,
            window=layer.window,
            softcap=config.attention_softcap,
        )
        return layer.output(attended.reshape(tokens, heads * dim))

    def _fused(self, precision: Precision) -> LayersAtOnce | None:
        if self.attention.name != "triton":
            return FusedLayers.of(self.config, self.layers, self.ropes, self.norm, precision)
        # Imported here: only a GPU has triton.
        from model.attention.triton import TritonAttention
        from model.gpu.layers import TritonLayers

        assert isinstance(self.attention, TritonAttention)
        return TritonLayers(self.config, self.layers, self.ropes, self.norm, self.attention)
