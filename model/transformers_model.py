"""Any other causal LM: transformers' own modelling code, with our attention over our pool.

A step is one packed sequence of shape [1, T] with explicit positions and no mask:

    base model ── attention function "octavo" ──▶ write keys and values to the pool, attend over it
        └─▶ hidden [T, hidden] ── the class's own forward, its base model replaced by the hidden states ──▶ logits

That is right only if the model does nothing else across tokens. So at load two short sequences run packed through the
pool and alone through transformers' eager attention; where the logits differ, the model is refused.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from kvpool.formats import FORMATS, KVLayout
from kvpool.storage import KVStorage
from model.attention.base import Attention
from model.config import ModelConfig
from model.errors import ModelError
from model.inputs import StepInputs, whole_prompts
from model.precision import Precision, dtype_name
from model.transformers_config import transformers_config
from model.transformers_head import Given, head_only
from model.transformers_rope import follow_lengths, lengths
from model.weights import SafetensorsStore

NAME = "octavo"
BLOCK_SIZE = 16
"""Of the pool of a check."""
CHECKED = (19, 14)
"""Lengths of the two sequences of the check."""


@dataclass(slots=True)
class Shape:
    """Keys and values of one layer, as the first pass saw them."""

    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None


@dataclass(slots=True)
class Step:
    """What the attention function needs beyond its arguments; without storage it only records shapes."""

    attention: Attention
    inputs: StepInputs
    storage: KVStorage | None
    shapes: dict[int, Shape] = field(default_factory=dict)


_step: contextvars.ContextVar[Step] = contextvars.ContextVar("octavo_step")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: query [1, heads, T, head_dim] → [1, T, heads, head_dim]."""
    step = _step.get()
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if step.storage is None:
        if layer in step.shapes:
            raise ModelError(f"layer {layer} attends twice")
        step.shapes[layer] = Shape(k.shape[1], k.shape[2], v.shape[2], sliding_window)
        return q.new_zeros(1, *q.shape[:2], v.shape[2]), None
    inputs = step.inputs.groups[step.storage.groups.of[layer]]
    step.storage.write_at(layer, k, v, inputs.blocks, inputs.offsets)
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = step.attention(q, step.storage, layer, inputs, scale=scale, window=sliding_window, softcap=softcap)
    return out[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    return None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, _no_mask)


class TransformersModel:
    """See `model.decoder.Model`. Weights and arithmetic are in `precision.compute`."""

    def __init__(
        self, module: Any, config: ModelConfig, attention: Attention, precision: Precision, device: torch.device
    ) -> None:
        """`module` is a causal LM on its device. Raises ModelError where it cannot be served correctly."""
        self.attention = attention
        self.reads_unwritten = attention.reads_unwritten
        self.device = device
        self._module = module
        self._base = module.base_model
        if self._base is module:
            raise ModelError(f"{config.architecture} has no base model apart from its head")
        self.rope_switch = follow_lengths(module)
        self._given = Given()
        self._head = head_only(module, self._given, precision)
        self.weight_bytes = sum(p.nbytes for p in module.parameters()) + sum(b.nbytes for b in module.buffers())
        self.config = self._probe(config)
        self._check(precision)

    def forward(self, inputs: StepInputs, storage: KVStorage) -> Tensor:
        return self._run(Step(self.attention, inputs, storage))

    def logits(self, hidden: Tensor) -> Tensor:
        self._given.hidden = hidden[None]
        logits: Tensor = self._head(input_ids=None, use_cache=False).logits[0]
        return logits.float()

    def likeliest(self, hidden: Tensor) -> None:
        return None

    def _run(self, step: Step) -> Tensor:
        inputs = step.inputs
        token = _step.set(step)
        known = lengths.set(inputs.lengths)
        try:
            out = self._base(
                input_ids=inputs.token_ids[None], position_ids=inputs.positions[None], use_cache=False
            ).last_hidden_state[0]
        finally:
            _step.reset(token)
            lengths.reset(known)
        hidden: Tensor = out
        return hidden

    def _probe(self, config: ModelConfig) -> ModelConfig:
        """Run once without a pool, to learn what keys and values each layer has; the true numbers replace config's."""
        name = config.architecture
        step = Step(self.attention, whole_prompts([[0, 1, 2]], BLOCK_SIZE, self.device)[0], None)
        with _refused(name):
            self._run(step)
        shapes = [step.shapes[layer] for layer in sorted(step.shapes)]
        text = self._module.config.get_text_config()
        if not shapes:
            raise ModelError(f"{name} does not use transformers' attention interface")
        if sorted(step.shapes) != list(range(int(text.num_hidden_layers))):
            raise ModelError(f"{name} has layers without attention, or of another kind")
        first = shapes[0]
        sizes = {(shape.kv_heads, shape.head_dim, shape.value_dim) for shape in shapes}
        if len(sizes) > 1 or first.head_dim != first.value_dim:
            raise ModelError(f"{name} has keys and values of several sizes")
        types = list(getattr(text, "layer_types", None) or [])
        windows = [shape.window for shape in shapes]
        windowed = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
        if windowed and not types and None in windows:
            raise ModelError(f"{name} hides the window of its layers")
        for layer, kind in enumerate(types):
            if kind not in ("full_attention", "sliding_attention"):
                raise ModelError(f"{name} has layers of the type {kind}")
            if kind == "sliding_attention" and windows[layer] is None:
                raise ModelError(f"{name} hides the window of its sliding layers")
        alike = len({*windows} - {None}) < 2  # else what slides is not known to the pool, and gives nothing back
        return replace(
            config,
            num_layers=len(shapes),
            num_kv_heads=first.kv_heads,
            head_dim=first.head_dim,
            native=False,
            layer_types=tuple("sliding" if window is not None and alike else "full" for window in windows),
            sliding_window=max((window for window in windows if window is not None), default=None),
        )

    def _check(self, precision: Precision) -> None:
        """Packed through the pool, and alone through transformers' own attention: the same logits, or ModelError."""
        name, config = self.config.architecture, self.config
        sequences = [
            [(7 * i * i + 3 * i + n) % config.vocab_size for i in range(size)] for n, size in enumerate(CHECKED)
        ]
        inputs, blocks = whole_prompts(sequences, BLOCK_SIZE, self.device)
        form = FORMATS[dtype_name(precision.compute)]
        layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, form, BLOCK_SIZE)
        storage = KVStorage(layout, blocks, self.device)
        with _refused(name):
            ours = self.logits(self.forward(inputs, storage))
            self._module.set_attn_implementation("eager")
            theirs = []
            for sequence in sequences:
                ids = torch.tensor([sequence], device=self.device)
                known = lengths.set(torch.full_like(ids[0], len(sequence)))
                try:
                    theirs.append(self._module(input_ids=ids, use_cache=False).logits[0].float())
                finally:
                    lengths.reset(known)
            self._module.set_attn_implementation(NAME)
        expected = torch.cat(theirs)
        tolerance = 1e-3 if precision.compute == torch.float32 else 5e-2
        error = float((ours - expected).abs().max()) / max(float(expected.abs().max()), 1e-6)
        if not error <= tolerance:
            raise ModelError(f"{name} gives other logits over the paged pool than in transformers (off by {error:.1%})")


@contextmanager
def _refused(name: str) -> Iterator[None]:
    """Whatever a model's code raises when it meets our attention means that it cannot be served."""
    try:
        with torch.inference_mode():
            yield
    except ModelError as error:
        raise ModelError(f"{name} cannot be served: {error}") from None
    except Exception as error:
        raise ModelError(f"{name} cannot be served: {type(error).__name__}: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def load_transformers(
    path: Path, config: ModelConfig, attention: Attention, precision: Precision, device: torch.device
) -> TransformersModel:
    """Load a folder of safetensors through transformers' classes, never code from the folder. Raises ModelError."""
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        SafetensorsStore(path, config)  # every header, and that the index names files in the folder
        theirs = transformers_config(path)
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(theirs)]
        if not kind._supports_attention_backend:
            raise ModelError(
                f"{config.architecture} cannot be served: it does not use transformers' attention interface"
            )
        module: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=theirs,
            dtype=precision.compute,
            attn_implementation=NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{config.architecture} cannot be loaded by transformers: {_line(error)}") from error
    return TransformersModel(module.to(device).train(False).requires_grad_(False), config, attention, precision, device)


__all__ = ["TransformersModel", "load_transformers"]
