"""The fit of keys (`kvpool.fit`): one step of the model over a text of its own, at load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvpool.fit import KeyFit
from kvpool.formats import FORMATS, KVLayout
from kvpool.storage import KVStorage
from model.attention.base import Attention
from model.attention.reference import ReferenceAttention
from model.decoder import Decoder, Model
from model.inputs import StepInputs, whole_prompts

TEXT = """\
The harbour at Lerrin lies open to the south, so the ferries wait there when the wind turns. On 14 March \
1987 the *Maria Holt* (built 1952, 412 tons) came in with a broken rudder, eleven passengers and a cargo \
of pears. "Nobody was afraid," her captain said later; "we had tea, and somebody played the accordion." \
Why did it take nine hours? Partly the tide, partly the fog, and partly that the tug's engine would not \
start until Mr. O'Neill had warmed its pump with a lamp.

## How to measure a coast

1. Choose a length for the ruler, for example 50 km.
2. Walk it along the map, and count the steps: n = 37.
3. Halve the ruler and begin again; the sum grows, and it never stops growing.

```python
def length(points, ruler=50.0):
    # The sum of the distances between neighbours, in kilometres.
    total = 0.0
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        total += ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
    return round(total / ruler) * ruler

assert length([(0, 0), (30, 40), (30, 90)]) == 100.0
```

User: Can you tell me in two sentences what a fractal is, and give one example from nature?
Assistant: A fractal is a shape whose parts look like the whole, however closely one looks. The leaf of a \
fern is one: each frond is built like the leaf, and each of its leaflets like the frond.

{"name": "fern", "kind": "plant", "height_cm": [30, 75.5], "evergreen": false, "notes": null}

Les fougères poussent dans les forêts humides; sie wachsen langsam, pero viven muchos años. In the end \
the committee agreed that the new law should apply to every owner of a boat longer than six metres, \
unless the boat is used for fishing, rescue or research. Taxes rose by 2.5 % in the following year, \
prices by 3 %, wages not at all. Science moved on: cells divide, copy their genes with few errors, and \
repair what they can; a protein folds within milliseconds into the shape that decides what it does. She \
closed the book, looked at the rain on the window, and thought of her brother in Oslo.
"""
"""Prose, lists, code, a dialogue, data and other languages: what keys have in common in all of them."""
MOST = 512
"""Tokens of it, and of other texts, at most."""
FIRSTS = 32
"""Tokens that a sequence may begin with, at most, where the tokenizer has no beginning of its own."""


class _Recorder(ReferenceAttention):
    """Attention that keeps, of each layer, the mean of q² over `count` tokens and the heads that share a key head."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.squares: dict[int, Tensor] = {}
        self.capped = False

    def __call__(
        self,
        query: Tensor,
        storage: KVStorage,
        layer: int,
        inputs: StepInputs,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        kv_heads, dim = storage.k[layer].shape[1], query.shape[2]
        squares = query[: self.count].float().square()
        self.squares[layer] = squares.reshape(self.count, kv_heads, -1, dim).mean((0, 2))
        self.capped = softcap is not None
        return super().__call__(query, storage, layer, inputs, scale=scale, window=window, softcap=softcap)


@torch.inference_mode()
def fit_keys(model: Model, fit: KeyFit, tokens: list[int], begin: list[int]) -> None:
    """Run `tokens` as one sequence, in a pool of its own, and set `fit` to what its keys and queries were like.

    `begin`: what the tokenizer puts in front of every sequence. Where that is nothing, any token may be a first one.
    """
    tokens, config = tokens[:MOST], model.config
    firsts = begin[:1] or list(dict.fromkeys(tokens))[:FIRSTS]
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, FORMATS["float32"])
    inputs, used = whole_prompts([tokens, *([first] for first in firsts)], layout.block_size, fit.data.device)
    storage = KVStorage(layout, used, fit.data.device)
    recorder = _Recorder(len(tokens))
    with _attending(model, recorder):
        model.forward(inputs, storage)
    for layer, squares in recorder.squares.items():
        keys = storage.k[layer][1:].transpose(0, 1)
        every, alone = keys.flatten(1, 2)[:, : len(tokens)], keys[:, -len(firsts) :, 0]
        fit.set(layer, every, squares, alone, centred=not recorder.capped)


@contextmanager
def _attending(model: Model, attention: Attention) -> Iterator[None]:
    """Layers run in torch, one by one, with this attention."""
    own, fused = model.attention, None
    try:
        model.attention = attention
        if isinstance(model, Decoder):
            fused, model.fused = model.fused, None
        yield
    finally:
        model.attention = own
        if isinstance(model, Decoder):
            model.fused = fused
