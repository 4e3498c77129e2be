"""The gate of coded keys and values: how far they move this model, measured once, when it is loaded.

A few prompts are computed over 16-bit keys and values and over the format's, each in a small pool of its own, and
compared behind every token but a prompt's first ones, where there is little to attend to. The prompts are not what keys
were fitted to (`model.calibration`): a fit flatters its own text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvpool.fit import KeyFit
from kvpool.formats import FORMATS, KVFormat, KVLayout
from kvpool.storage import KVStorage
from model.decoder import Model
from model.inputs import whole_prompts

PROMPTS = (
    "The keeper of the lighthouse wrote down the weather every evening: wind from the north, rain at six, and a ship "
    "that gave no answer. In the morning he rowed out",
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n    if len(ordered) % 2:\n"
    "        return ordered[middle]\n    return",
    "User: Why does a leap year have 366 days?\nAssistant: The earth needs about 365 days and a quarter to go once "
    "around the sun, so every fourth year",
)
MOST = 32
"""Tokens of a prompt at most: a start should not feel it."""
FIRST = 8
"""Tokens of a prompt behind which nothing is compared."""
MOST_DIVERGENCE = 0.25
LEAST_AGREEMENT = 0.6
"""Of the formats that there are the demo model is far inside; a model that a format breaks is far outside."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Of a format from 16 bits, on one model."""

    divergence: float
    """Mean KL(16 bits ‖ format) over the next token, in nats."""
    agreement: float
    """Share of places with the same likeliest token."""

    @property
    def passes(self) -> bool:
        return self.divergence <= MOST_DIVERGENCE and self.agreement >= LEAST_AGREEMENT

    def __str__(self) -> str:
        return f"KL {self.divergence:.4f} nats, greedy agreement {self.agreement:.1%}"

    def complaint(self, name: str) -> str:
        return (
            f"--kv-cache-dtype {name} moves this model too far from 16-bit keys and values: {self}; at most "
            f"{MOST_DIVERGENCE} nats and at least {LEAST_AGREEMENT:.0%} are let in"
        )


@torch.inference_mode()
def measure(
    model: Model, layout: KVLayout, fit: KeyFit | None, prompts: list[list[int]], device: torch.device
) -> Distance:
    """What the layout's format does to these prompts, one step over each pool. `fit`: that of the keys to be served."""
    prompts = [tokens[:MOST] for tokens in prompts]
    inputs, used = whole_prompts(prompts, layout.block_size, device)
    compared = torch.nonzero(inputs.positions >= FIRST)[:, 0]

    def logprobs(form: KVFormat) -> Tensor:
        storage = KVStorage(replace(layout, format=form, windows=()), used, device)
        if storage.fit is not None:
            storage.fit = fit
        return model.logits(model.forward(inputs, storage).index_select(0, compared)).log_softmax(-1)

    plain, coded = logprobs(FORMATS["bfloat16"]), logprobs(layout.format)
    same = plain.argmax(-1) == coded.argmax(-1)
    return Distance(float(divergence(plain, coded).mean()), float(same.float().mean()))


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) of log-probabilities [..., vocab], in nats. What p rules out adds nothing, whatever q says of it."""
    return (p.exp() * (p - q)).masked_fill(p == -torch.inf, 0.0).sum(-1)
