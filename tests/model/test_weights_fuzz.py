"""Whatever safetensors files and their index hold, the store gives tensors or a ModelError of one line."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from model.config import ModelConfig
from model.config_reader import config_from_json
from model.errors import ModelError
from model.weights import SafetensorsStore
from tests.fuzzing import JSON, altered, fuzz, mangled, within

MEMORY = 4 << 20
GROWTH = 256 << 10
"""KiB by which the process may grow over a test: the library allocates where Python does not see it."""
GOOD = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(2)})
HEADER: dict[str, Any] = json.loads(GOOD[8 : 8 + int.from_bytes(GOOD[:8], "little")])


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return config_from_json(
        {
            "architectures": ["OtherForCausalLM"],
            "hidden_size": 8,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "vocab_size": 8,
        }
    )


@pytest.fixture(autouse=True)
def little_memory() -> Any:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH


def read_all(folder: Path, config: ModelConfig) -> bool:
    """Whether there was a store; any tensor of it may still be refused."""
    try:
        store = SafetensorsStore(folder, config)
    except ModelError as error:
        one_line(error)
        return False
    for name in store.names():
        try:
            shape = store.shape(name)
            assert tuple(store.get(name).shape) == shape
        except ModelError as error:
            one_line(error)
    return True


def one_line(error: ModelError) -> None:
    assert str(error).isprintable()


def with_header(header: object, length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    data = GOOD[8 + int.from_bytes(GOOD[:8], "little") :]
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def test_a_good_file_is_read(tmp_path: Path, config: ModelConfig) -> None:
    for content in (GOOD, with_header(HEADER)):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert read_all(tmp_path, config)


@fuzz(200)
@given(content=mangled(GOOD))
def test_mangled(content: bytes, tmp_path: Path, config: ModelConfig) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with within(2, MEMORY):
        read_all(tmp_path, config)


NAMES = ("a", "b", "__metadata__", "\n", "dtype", "shape", "data_offsets")
LENGTHS = st.none() | st.sampled_from([0, 1, 2**24, 2**24 + 1, 2**32, 2**63, 2**64 - 1])


@fuzz(200)
@given(header=altered(HEADER, NAMES), length=LENGTHS)
def test_any_json_in_a_header(header: object, length: int | None, tmp_path: Path, config: ModelConfig) -> None:
    (tmp_path / "model.safetensors").write_bytes(with_header(header, length))
    with within(2, MEMORY):
        read_all(tmp_path, config)


LIES: dict[str, dict[str, Any]] = {
    "overlap": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": HEADER["a"]},
    "gap": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}},
    "beyond the end": {"a": {"dtype": "F32", "shape": [2**20], "data_offsets": [0, 2**22]}},
    "backwards": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
    "overflow": {"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 8]}},
    "negative": {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
    "wrong size": {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
    "unknown type": {"a": {"dtype": "PICKLE", "shape": [2], "data_offsets": [0, 8]}},
}


@pytest.mark.parametrize("lie", sorted(LIES))
def test_lies_are_refused(lie: str, tmp_path: Path, config: ModelConfig) -> None:
    (tmp_path / "model.safetensors").write_bytes(with_header(LIES[lie]))
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        SafetensorsStore(tmp_path, config)


def test_an_absurd_header_is_not_read(tmp_path: Path, config: ModelConfig) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((90 << 20).to_bytes(8, "little"))
        file.truncate(1 << 30)
    with within(1, MEMORY), pytest.raises(ModelError, match="claims a header of 94371840 bytes"):
        SafetensorsStore(tmp_path, config)


def test_a_tensors_name_cannot_write_lines(tmp_path: Path, config: ModelConfig) -> None:
    (tmp_path / "model.safetensors").write_bytes(GOOD)
    index = {"weight_map": {"\x1b[2J\nfine": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"\\x1b\[2J\\nfine is missing"):
        SafetensorsStore(tmp_path, config)


@fuzz(80)
@given(index=altered({"metadata": {}, "weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}) | JSON)
def test_any_json_in_an_index(index: object, tmp_path: Path, config: ModelConfig) -> None:
    (tmp_path / "model.safetensors").write_bytes(GOOD)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with within(2, MEMORY):
        read_all(tmp_path, config)
