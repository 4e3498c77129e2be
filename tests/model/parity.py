"""Greedy generation twice: by transformers' `generate`, and by a Runner over a real pool, one step after the other."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from kvpool.formats import FORMATS, KVLayout
from kvpool.pool import BlockTable, KVPool
from kvpool.storage import KVStorage
from model.attention.base import Attention
from model.attention.cpu import CpuAttention
from model.attention.reference import ReferenceAttention
from model.batch import Batch, Row
from model.config_reader import read_config
from model.executor import Runner
from model.kernels.build import load
from model.kernels.loaded import Kernels
from model.params import SamplingParams
from model.precision import Precision
from model.runner import load_model
from model.source import ModelSource
from tests.kvpool.poison import poison
from tests.model.conftest import FAMILIES, tiny_config

NEW_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, seed=0, temperature=0.0)
EXACT = Precision(torch.float32, torch.float32, FORMATS["float32"])
CPU = torch.device("cpu")


def build(family: str, folder: Path, **changes: Any) -> None:
    """Save a tiny model whose weights are so large that its logits are far apart.

    Embeddings are small: where they are tied to the head, a model would else repeat its last token for ever.
    """
    name = FAMILIES[family][0].removesuffix("Text")
    module = getattr(transformers, f"{name}ForCausalLM")(tiny_config(family, **changes))
    generator = torch.Generator().manual_seed(sum(family.encode()))
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            noise = torch.empty(parameter.shape).normal_(0, 1, generator=generator)
            if parameter.dim() == 1:  # norms start as ones or zeros: change them, so that a lost offset is seen
                parameter.add_(noise * 0.1)
            else:
                parameter.copy_(noise * (0.3 if "embed" in key else 2) / parameter.shape[1] ** 0.5)
    module.save_pretrained(folder)


def expected(folder: Path, prompts: Items[list[int]]) -> list[list[int]]:
    """Prompt and NEW_TOKENS greedy tokens of each, by transformers, one prompt at a time."""
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    module.generation_config.eos_token_id = None
    return [
        module.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
        for prompt in prompts
    ]


def prompts(vocab: int, lengths: Items[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


def make_runner(
    folder: Path,
    *,
    native: bool = True,
    compiled: bool = True,
    precision: Precision = EXACT,
    num_blocks: int = 64,
    max_tokens: int = 512,
    grouped: bool = False,
) -> Runner:
    """A runner over a pool of its own. `compiled`: with the kernels for this processor, else in plain torch. `grouped`:
    layers of one window share pages, so that there are `num_blocks` for each group."""
    source = ModelSource("folder", folder, "tiny")
    config = read_config(source)
    if not native:
        config = replace(config, native=False)
    attention: Attention = ReferenceAttention()
    if compiled:
        kernels = Kernels(load())
        attention = CpuAttention(kernels)
        precision = replace(precision, compute=torch.float32, kernels=kernels if native else None)
    with torch.inference_mode():
        model = load_model(source, config, attention, precision, CPU, config.max_position_embeddings)
    config = model.config
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, precision.kv)
    if grouped:
        layout = replace(layout, windows=config.windows)
    storage = KVStorage(layout, num_blocks * len(layout.groups.windows))
    poison(storage)  # what memory happened to hold must not matter
    return Runner(model, storage, max_tokens, precision.kernels)


@dataclass(slots=True)
class Track:
    """One sequence that generates."""

    tokens: list[int]
    prompt_len: int
    table: BlockTable
    computed: int = 0
    index: int = 0
    is_long: bool = False
    params: SamplingParams = GREEDY


@dataclass(slots=True)
class Driver:
    """The least of a scheduler: every track computes up to `chunk` tokens in each step, until it has its tokens."""

    runner: Runner
    pool: KVPool = field(init=False)
    tracks: list[Track] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = KVPool(self.runner.storage.num_blocks, 16, windows=self.runner.storage.groups.windows)

    def add(self, prompt: list[int], *, cached: bool = False) -> Track:
        """`cached`: begin with what the pool knows of the prompt."""
        table = self.pool.adopt(self.pool.match(prompt, self._salt(prompt))) if cached else self.pool.new_table()
        track = Track(list(prompt), len(prompt), table, len(table.blocks) * 16, is_long=self._is_long(prompt))
        self.tracks.append(track)
        return track

    def fork(self, track: Track) -> Track:
        twin = Track(
            list(track.tokens),
            track.prompt_len,
            self.pool.fork(track.table),
            track.computed,
            len(self.tracks),
            track.is_long,
        )
        self.tracks.append(twin)
        return twin

    def step(self, chunk: int) -> None:
        running = [track for track in self.tracks if len(track.tokens) < track.prompt_len + NEW_TOKENS]
        rows = []
        for track in running:
            self._follow_rope(track)
            count = min(chunk, len(track.tokens) - track.computed)
            assert self.pool.extend(track.table, track.computed + count, track.computed)
            blocks, more = track.table.blocks, track.table.more
            rows.append(Row(track.tokens, track.prompt_len, track.computed, count, blocks, track.params, track.index))
            rows[-1].more = more
        result = self.runner.execute(Batch(rows, self.pool.take_copies())).result()
        for track, row, drawn in zip(running, rows, result.tokens, strict=True):
            track.computed += row.count
            self.pool.commit(track.table, track.tokens, track.computed, self._salt(track.tokens))
            self.pool.slide(track.table, track.computed)
            assert len(drawn) == (track.computed == len(track.tokens))
            track.tokens += drawn

    def run(self, chunk: int) -> list[list[int]]:
        """Generate to the end; every block is given back. Returns prompt and generated tokens of each track."""
        while any(len(track.tokens) < track.prompt_len + NEW_TOKENS for track in self.tracks):
            self.step(chunk)
        tokens = [track.tokens for track in self.tracks]
        for track in self.tracks:
            self.pool.release(track.table)
        self.tracks = []
        self.pool.check([])
        return tokens

    def _is_long(self, tokens: list[int]) -> bool:
        switch = self.runner.model.rope_switch
        return switch is not None and len(tokens) > switch

    def _salt(self, tokens: list[int]) -> bytes:
        return b"long" if self._is_long(tokens) else b""

    def _follow_rope(self, track: Track) -> None:
        """A sequence that grows past the switch is computed anew."""
        if self._is_long(track.tokens) and not track.is_long:
            self.pool.release(track.table)
            track.table, track.computed, track.is_long = self.pool.new_table(), 0, True
