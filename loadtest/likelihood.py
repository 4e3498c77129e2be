"""How likely a text is to a model under several settings of its numbers, token by token, on whole logits.

A text is cut into windows. A window is computed from an empty pool, in chunks, through the runner's own model and pool,
so what a setting does to weights, activations, keys and values is all in it. Sums are float64.

    window   t0 t1 t2 … tn        n tokens are predicted, each from those before it in its window
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpool.formats import FORMATS, KVLayout
from model.attention.reference import clean
from model.batch import Batch, Row
from model.config_reader import read_config
from model.errors import ModelError
from model.gate import divergence
from model.inputs import InputBuilder
from model.params import SamplingParams
from model.runner import LoadedModel, RunnerOptions, load_runner
from model.source import resolve

SLAB = 64
"""Positions whose logits exist at once, of every setting."""
BLOCK_SIZE = 16
PARAMS = SamplingParams(max_tokens=0, seed=0)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a model is stored and computed as; names as the flags of `octavo serve` have them."""

    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"


@dataclass(slots=True)
class Score:
    """Sums over the predicted tokens of all windows so far; those against the reference are 0 for itself."""

    name: str
    """Weights and keys, as they turned out."""
    tokens: int = 0
    nats: float = 0.0
    """Σ -ln p(token)."""
    excess: float = 0.0
    """Σ of what each token costs more than with the reference, in nats."""
    squares: float = 0.0
    """Σ of the squares of that."""
    divergence: float = 0.0
    """Σ KL(reference ‖ this) over the next token, in nats."""
    agreed: int = 0
    """How often the likeliest token is the reference's."""
    seconds: float = 0.0
    """In the model, logits included."""

    @property
    def perplexity(self) -> float:
        return _exp(self.nats / self.tokens)

    @property
    def ratio(self) -> float:
        """Of the perplexity to the reference's."""
        return _exp(self.excess / self.tokens)

    @property
    def uncertainty(self) -> float:
        """Half the width of the ratio's 95 % interval, as if tokens were independent."""
        mean = self.excess / self.tokens
        variance = max(0.0, self.squares / self.tokens - mean * mean)
        return self.ratio * 1.96 * math.sqrt(variance / self.tokens)


class Reader:
    """A loaded model that computes one window at a time."""

    def __init__(self, loaded: LoadedModel, setting: Setting) -> None:
        self.loaded = loaded
        runner = loaded.runner
        weights = loaded.dtype if setting.quantization is None else f"{setting.quantization} of {loaded.dtype}"
        self.score = Score(f"{weights}, KV {loaded.kv_cache_dtype}")
        self._model, self._storage = runner.model, runner.storage
        self._chunk = loaded.max_num_batched_tokens
        self._builder = InputBuilder(self._chunk, loaded.block_size, runner.storage.data.device)

    def hidden(self, window: list[int]) -> Tensor:
        """Hidden states [len(window) - 1, hidden]: behind every token that another follows."""
        with self._timed():
            blocks = list(range(1, 1 - (-len(window) // BLOCK_SIZE)))
            parts = []
            for start in range(0, len(window) - 1, self._chunk):
                count = min(self._chunk, len(window) - 1 - start)
                row = Row(window, len(window), start, count, blocks, PARAMS, samples=False)
                inputs = self._builder.build(Batch([row]))
                if self._model.reads_unwritten:
                    clean(self._storage, inputs.opened)
                parts.append(self._model.forward(inputs, self._storage).clone())
            return torch.cat(parts)

    def logprobs(self, hidden: Tensor) -> Tensor:
        """float64 [positions, vocab]."""
        with self._timed():
            logits = self._model.logits(hidden)
        return logits.double().log_softmax(-1)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Adds what happens within to the score's seconds. On a GPU work that is still under way counts later."""
        began = time.perf_counter()
        yield
        self.score.seconds += time.perf_counter() - began


def load(
    model: str | None,
    device: str,
    settings: Sequence[Setting],
    window: int,
    chunk: int,
    progress: Callable[[str, str], None],
    streams: int = 1,
) -> list[Reader]:
    """One reader per setting, all in memory at once, each with a pool of so many windows.

    Raises ModelError, BudgetError.
    """
    config = read_config(resolve(model))
    if window > config.max_position_embeddings:
        raise ModelError(f"--window {window}: the model's context has {config.max_position_embeddings} tokens")

    def memory(kv: str) -> int | None:
        if not config.native:
            return None
        form = FORMATS.get(kv, FORMATS["float32"])
        layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, form, BLOCK_SIZE)
        return layout.block_bytes * (1 + streams * layout.blocks_for(window))

    return [
        Reader(
            load_runner(
                RunnerOptions(
                    model=model,
                    device=device,
                    dtype=setting.dtype,
                    quantization=setting.quantization,
                    kv_cache_dtype=setting.kv_cache_dtype,
                    force_kv_cache_dtype=True,  # what it costs is the question
                    kv_cache_memory=memory(setting.kv_cache_dtype),
                    max_model_len=window,
                    max_num_seqs=streams,
                    max_num_batched_tokens=min(chunk, window),
                    block_size=BLOCK_SIZE,
                    one_group=True,
                ),
                progress,
            ),
            setting,
        )
        for setting in settings
    ]


def windows(ids: list[int], prefix: list[int], size: int, most: int) -> list[list[int]]:
    """The first `most` windows of `size` tokens, one behind the other; each begins with `prefix` (a model's BOS)."""
    step = size - len(prefix)
    return [prefix + ids[begin : begin + step] for begin in range(0, len(ids) - step + 1, step)][:most]


@torch.inference_mode()
def compare(readers: Sequence[Reader], window: list[int]) -> None:
    """Add a window to every reader's score; the first is the reference."""
    hidden = [reader.hidden(window) for reader in readers]
    following = torch.tensor(window[1:], device=hidden[0].device).unsqueeze(1)
    for part in _slabs(len(following)):
        right = following[part]
        reference = costs = best = None
        for reader, states in zip(readers, hidden, strict=True):
            score = reader.score
            own = reader.logprobs(states[part])
            nats, likeliest = -own.gather(1, right), own.argmax(1)
            if reference is None or costs is None or best is None:
                reference, costs, best = own, nats, likeliest
            else:
                excess = nats - costs
                score.excess += float(excess.sum())
                score.squares += float(excess.square().sum())
                score.divergence += float(divergence(reference, own).sum())
            score.tokens += len(right)
            score.nats += float(nats.sum())
            score.agreed += int((likeliest == best).sum())


def _slabs(count: int) -> Iterator[slice]:
    return (slice(begin, begin + SLAB) for begin in range(0, count, SLAB))


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
