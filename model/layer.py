"""One decoder layer: its weights, and how they are read, fused and converted."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from model.errors import ModelError
from model.layers import NormStyle, RMSNorm
from model.linear import Head, KernelLinear, Linear, PackedLinear, make_linear
from model.precision import Precision
from model.shard import Shard, Span
from model.weights import Part, WeightStore


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights. A norm that the arrangement does not have is None."""

    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    qk_norm: RMSNorm | None
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    before_attention: RMSNorm | None
    after_attention: RMSNorm | None
    before_mlp: RMSNorm | None
    after_mlp: RMSNorm | None
    window: int | None
    rope: int | None
    """Index of the layer's rotary table."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its matrices, in the order in which a step needs them."""
        return self.qkv, self.output, self.gate_up, self.down

    @property
    def nbytes(self) -> int:
        parts = (getattr(self, field.name) for field in fields(self))
        return sum(getattr(part, "nbytes", 0) for part in parts)


class LayerLoader:
    """Builds the parts of a Decoder from named tensors, or one rank's part of them. Holds no tensor but the one at
    hand; threads may share it."""

    def __init__(self, shard: Shard, weights: WeightStore, precision: Precision, device: torch.device) -> None:
        self.shard = shard
        self.config = shard.config
        self.weights = weights
        self.precision = precision
        self.device = device
        self.names = weights.names()
        self.style: NormStyle = "cast_then_scale" if self.config.norms == "pre" else "scale_then_cast"

    def ends(self) -> tuple[Tensor, Head, int]:
        """The embedding table and the LM head, which are one tensor where the model ties them; bytes of both."""
        config, vocab = self.config, self.shard.vocab
        table = self.tensor("model.embed_tokens.weight", vocab.size, config.hidden_size, part=(vocab.slice,))
        if table.dtype.itemsize > self.precision.weights.itemsize:
            table = table.to(self.precision.weights)
        table = table.clone()  # a view of the file would keep all of it mapped
        tied = config.tie_word_embeddings or "lm_head.weight" not in self.names
        weight = table if tied else self.tensor("lm_head.weight", vocab.size, config.hidden_size, part=(vocab.slice,))
        head = Head(weight, None, self.precision)
        packed = isinstance(head.linear, PackedLinear | KernelLinear)
        shared = tied and not packed and table.dtype == self.precision.weights
        return table, head, head.nbytes if shared else table.nbytes + head.nbytes

    def embedding_multiplier(self) -> float:
        """Gemma rounds its multiplier to the type of the activations; in float32 that changes nothing."""
        multiplier = self.config.embedding_multiplier
        if self.config.norms != "sandwich":
            return multiplier
        return float(torch.tensor(multiplier, dtype=self.precision.compute))

    def layer(self, number: int) -> Layer:
        config, prefix = self.config, f"model.layers.{number}."
        hidden, shard = config.hidden_size, self.shard
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv = {"q_proj": shard.query, "k_proj": shard.key, "v_proj": shard.key}
        gate_up = {"gate_proj": shard.inner, "up_proj": shard.inner}
        sliding = config.layer_types[number] == "sliding"
        rope = 1 if sliding and config.local_rope is not None else 0
        qk_norm = q_norm = k_norm = None
        if config.qk_norm == "head":
            qk_norm = self.head_norm(attention)
        elif config.qk_norm == "full":
            q_norm = self.norm(attention + "q_norm.weight", shard.query)
            k_norm = self.norm(attention + "k_norm.weight", shard.key)
        first, second, third, fourth = self._norms(prefix)
        return Layer(
            qkv=self.stacked(attention, "qkv_proj", qkv, hidden, config.qkv_bias),
            output=self.summed(attention + "o_proj", hidden, shard.query, config.output_bias),
            gate_up=self.stacked(mlp, "gate_up_proj", gate_up, hidden, config.mlp_bias, gated=True),
            down=self.summed(mlp + "down_proj", hidden, shard.inner, config.mlp_bias),
            qk_norm=qk_norm,
            q_norm=q_norm,
            k_norm=k_norm,
            before_attention=first,
            after_attention=second,
            before_mlp=third,
            after_mlp=fourth,
            window=config.sliding_window if sliding else None,
            rope=None if number in config.no_rope_layers else rope,
        )

    def _norms(self, prefix: str) -> tuple[RMSNorm | None, RMSNorm | None, RMSNorm | None, RMSNorm | None]:
        def norm(name: str) -> RMSNorm:
            return self.norm(f"{prefix}{name}.weight", self.config.hidden_size)

        match self.config.norms:
            case "pre":
                return norm("input_layernorm"), None, norm("post_attention_layernorm"), None
            case "post":
                return None, norm("post_attention_layernorm"), None, norm("post_feedforward_layernorm")
            case "sandwich":
                return (
                    norm("input_layernorm"),
                    norm("post_attention_layernorm"),
                    norm("pre_feedforward_layernorm"),
                    norm("post_feedforward_layernorm"),
                )

    def stacked(
        self, prefix: str, fused: str, parts: dict[str, Span], inputs: int, bias: bool, *, gated: bool = False
    ) -> Linear:
        """One Linear of the parts (name → rows) stacked, which the checkpoint may have fused into one tensor."""
        weight = torch.cat(self.rows(prefix, fused, parts, ".weight", (inputs,), self.precision.weights))
        biases = self.rows(prefix, fused, parts, ".bias", ()) if bias else []
        return make_linear(weight, torch.cat(biases) if biases else None, self.precision, gated=gated)

    def rows(
        self,
        prefix: str,
        fused: str,
        parts: dict[str, Span],
        kind: str,
        inner: tuple[int, ...],
        dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        """This rank's rows of every part. `inner`: the other dimensions. Perhaps views of the file."""
        if f"{prefix}{fused}.weight" not in self.names:
            return [
                self.tensor(f"{prefix}{name}{kind}", span.size, *inner, dtype=dtype, part=(span.slice,))
                for name, span in parts.items()
            ]
        sizes = [span.whole for span in parts.values()]
        pieces = torch.split(self.tensor(f"{prefix}{fused}{kind}", sum(sizes), *inner, dtype=dtype), sizes)
        return [piece[span.slice] for piece, span in zip(pieces, parts.values(), strict=True)]

    def summed(self, name: str, outputs: int, span: Span, bias: bool) -> Linear:
        """A Linear of this rank's inputs. The ranks' results are added up, so only one of them has the bias."""
        weight = self.tensor(
            f"{name}.weight", outputs, span.size, dtype=self.precision.weights, part=(slice(None), span.slice)
        )
        own = bias and self.shard.rank == 0
        weight = torch.cat([weight])  # a copy: a view of the file would keep all of it mapped
        return make_linear(weight, self.tensor(f"{name}.bias", outputs) if own else None, self.precision)

    def norm(self, name: str, size: int | Span) -> RMSNorm:
        """Of the whole size, or of a part of it."""
        if isinstance(size, int):
            return self._rms(self.tensor(name, size))
        return self._rms(self.tensor(name, size.size, part=(size.slice,)))

    def head_norm(self, prefix: str) -> RMSNorm:
        """Norm of every query and key head at once: weight [heads + kv_heads, head_dim]."""
        config = self.config
        q, k = (self.tensor(f"{prefix}{name}_norm.weight", config.head_dim) for name in "qk")
        return self._rms(torch.cat([q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)]))

    def _rms(self, weight: Tensor) -> RMSNorm:
        return RMSNorm(weight, self.config.norm_eps, self.config.norm_offset, self.style, self.precision.compute)

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None, part: Part = ()) -> Tensor:
        """A tensor of the checkpoint, or a part of it, on the model's device; `dtype` None: as it is stored."""
        tensor = self.weights.get(name, dtype, part)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name} has the shape {tuple(tensor.shape)}; the configuration says {shape}")
        return tensor.to(self.device)
