"""Whose keys and values these are: 32 bytes that differ where another process would compute others.

Nobody can list what keys depend on: weights, number types, kernels and their instruction set, the fit of 4-bit keys. So
a short made-up prompt is computed, and what came of it is part of the answer: the content of its blocks as it would be
stored, and the hidden states. Weights that it does not meet, most rows of the embedding, are sampled in their files.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import torch

from model.attention.reference import clean
from model.executor import Runner
from model.inputs import whole_prompts
from model.runner import LoadedModel
from model.source import ModelSource

BLOCKS = 4
"""Of the prompt, at most."""
STRIDE, LOOK = 1 << 20, 1 << 12
"""Of each so many bytes of a file, so many."""


def fingerprint(loaded: LoadedModel) -> bytes:
    """Of a loaded model, before it serves: it writes to the first blocks of the pool."""
    found = blake2b(digest_size=32)
    facts = (loaded.device, loaded.dtype, loaded.kv_cache_dtype, loaded.attention, loaded.block_size)
    found.update(repr(facts).encode())
    most = min(loaded.max_num_batched_tokens, loaded.max_model_len) // loaded.block_size
    for part in _behaviour(loaded.runner, max(1, min(BLOCKS, most, loaded.num_blocks - 1))):
        found.update(part)
    for part in _files(loaded.source):
        found.update(part)
    return found.digest()


def _behaviour(runner: Runner, count: int) -> Iterator[bytes]:
    """Of a prompt of `count` blocks."""
    storage, vocab = runner.storage, runner.model.config.vocab_size
    tokens = [(7919 * i + 11) % vocab for i in range(count * storage.block_size)]
    with torch.inference_mode():
        inputs, used = whole_prompts([tokens], storage.block_size, storage.data.device)
        clean(storage, inputs.opened)
        hidden = runner.model.forward(inputs, storage)
        yield hidden.float().cpu().numpy().tobytes()
    yield storage.gather(range(1, used)).tobytes()
    if storage.fit is not None:
        yield storage.fit.data.cpu().numpy().tobytes()


def _files(source: ModelSource) -> Iterator[bytes]:
    """Names, sizes and samples of the files of weights."""
    folder = source.path
    paths: list[Path] = (
        [folder] if source.kind == "gguf" else sorted([*folder.glob("*.safetensors"), folder / "config.json"])
    )
    for path in paths:
        size = path.stat().st_size
        yield f"{path.name} {size} ".encode()
        with path.open("rb") as file:
            for offset in range(0, size, STRIDE):
                file.seek(offset)
                yield file.read(LOOK)
