"""The LM head of a transformers model without its base model: what its class does between hidden states and logits."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from model.errors import ModelError
from model.linear import Head
from model.precision import Precision


class GivenOutput:
    """What a base model returns, as far as its head needs it: hidden states, and None under every other name."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class Given(nn.Module):
    """Stands where the base model was and hands out what was computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.empty(0)

    @property
    def decoder(self) -> Given:
        """OPT reaches past its base model."""
        return self

    def forward(self, *_: Any, **__: Any) -> GivenOutput:
        return GivenOutput(self.hidden)


class WideHead(nn.Module):
    """A 16-bit LM head whose logits are float32."""

    def __init__(self, linear: nn.Linear, precision: Precision) -> None:
        super().__init__()
        self.head = Head(linear.weight, linear.bias, precision)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x[0])[None]


def head_only(module: Any, given: Given, precision: Precision) -> Any:
    """`module` without its base model: the LM head, and whatever its class does to logits. Weights are shared."""
    head = copy.copy(module)
    parts = dict(module._modules)
    parts[module.base_model_prefix] = given
    output = module.get_output_embeddings()
    if not isinstance(output, nn.Linear) or output not in parts.values():
        raise ModelError(f"{type(module).__name__} has no linear head")
    if precision.compute != torch.float32:
        name = next(name for name, part in parts.items() if part is output)
        parts[name] = WideHead(output, replace(precision, weights=precision.compute))
    head.__dict__["_modules"] = parts
    return head
