"""Whatever a GGUF file holds, its readers give a model or a ModelError of one line, soon and in little memory."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.config_reader import read_config
from model.errors import ModelError
from model.gguf import GGUFFile
from model.pooling import read_embedding
from model.source import ModelSource
from model.tokenizer import load_tokenizer
from model.weights import open_weights
from tests.fuzzing import fuzz, mangled, within

TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab", "Ġ", "c"]
METADATA: dict[str, Any] = {
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 8,
    "llama.block_count": 1,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10_000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}
MEMORY = 4 << 20
"""Bytes, for files of a few KiB."""


@pytest.fixture(scope="module")
def good(write_gguf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole model of one layer, 8 wide."""
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(TOKENS), 8),
        "output_norm": (8,),
        "blk.0.attn_norm": (8,),
        "blk.0.ffn_norm": (8,),
        "blk.0.attn_q": (8, 8),
        "blk.0.attn_k": (4, 8),
        "blk.0.attn_v": (4, 8),
        "blk.0.attn_output": (8, 8),
        "blk.0.ffn_gate": (8, 8),
        "blk.0.ffn_up": (8, 8),
        "blk.0.ffn_down": (8, 8),
    }
    tensors = {f"{name}.weight": rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "good.gguf", "llama", METADATA, tensors)
    return path.read_bytes()


def read_all(path: Path) -> None:
    """Everything that a server reads of a file; each reader may refuse it, and none of them depends on another."""
    source = ModelSource("gguf", path, "x")
    for reader in (read_weights, load_tokenizer, lambda source: read_embedding(source, 8)):
        try:
            reader(source)
        except ModelError as error:
            message = str(error)
            assert message.isprintable()
            assert len(message) < 2001


def read_weights(source: ModelSource) -> None:
    file = GGUFFile(source.path)
    for name, tensor in file.tensors.items():
        assert file.vector(name).shape == tensor.shape
    config = read_config(source)
    store = open_weights(source, config)
    for name in store.names():
        assert tuple(store.get(name).shape) == store.shape(name)


def test_a_good_file_is_read(good: bytes, tmp_path: Path) -> None:
    """Else the fuzzers below would only try doors that are shut."""
    path = tmp_path / "good.gguf"
    path.write_bytes(good)
    source = ModelSource("gguf", path, "x")
    read_weights(source)
    assert load_tokenizer(source).encode("ab", add_special_tokens=False) == [5]


@fuzz(250)
@given(data=st.data())
def test_mangled(data: st.DataObject, good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data.draw(mangled(good)))
    with within(2, MEMORY):
        read_all(path)


@fuzz(50)
@given(content=st.binary(max_size=300), version=st.integers(2, 3))
def test_any_bytes_behind_the_magic(content: bytes, version: int, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", version) + content)
    with within(2, MEMORY):
        read_all(path)


COUNTS = st.integers(0, 4) | st.sampled_from([2**16, 2**32, 2**63, 2**64 - 1])
KINDS = st.integers(0, 40) | st.just(2**32 - 1)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """Headers whose parts are sound, and whose numbers are anything."""
    keys = [
        text(draw(st.sampled_from(sorted(METADATA)) | st.text(max_size=8)))
        + struct.pack("<I", draw(st.integers(0, 13)))
        + draw(st.builds(struct.pack, st.just("<IQ"), KINDS, COUNTS) | st.binary(max_size=16))
        for _ in range(draw(st.integers(0, 3)))
    ]
    infos = []
    for _ in range(draw(st.integers(0, 3))):
        dims = draw(st.lists(COUNTS, max_size=5))
        name = draw(st.sampled_from(["token_embd.weight", "a\nb"]) | st.text(max_size=8))
        infos.append(
            text(name)
            + struct.pack(f"<I{len(dims)}Q", draw(st.just(len(dims)) | KINDS), *dims)
            + struct.pack("<IQ", draw(KINDS), draw(COUNTS))
        )
    counts = draw(st.just((len(infos), len(keys))) | st.tuples(COUNTS, COUNTS))
    return b"".join([b"GGUF", struct.pack("<IQQ", 3, *counts), *keys, *infos, bytes(draw(st.integers(0, 200)))])


@fuzz(150)
@given(content=headers())
def test_any_numbers_in_a_header(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with within(2, MEMORY):
        read_all(path)
