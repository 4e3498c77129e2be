from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from model.fingerprint import fingerprint
from model.runner import RunnerOptions, load_runner
from tests.loadtest.tiny import write
from tests.model.parity import build


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("fingerprint") / "tiny.gguf")


def of(folder: Path, **options: Any) -> bytes:
    values: dict[str, Any] = {"model": str(folder), "device": "cpu", "kv_cache_memory": 4 << 20}
    found = fingerprint(load_runner(RunnerOptions(**(values | options))))
    assert len(found) == 32
    return found


@pytest.mark.parametrize("kv", ["auto", "tq4"])
def test_the_same_model_is_the_same(model: Path, kv: str) -> None:
    """Whatever the pool's size and the length of a step."""
    other = {"kv_cache_memory": 8 << 20, "max_num_batched_tokens": 128, "max_num_seqs": 3}
    assert of(model, kv_cache_dtype=kv) == of(model, kv_cache_dtype=kv, **other)


def test_whatever_keys_depend_on_makes_another(model: Path) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"dtype": "float32"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "k8v4"},
        {"kv_cache_dtype": "tq4"},
        {"quantization": "int8"},
        {"block_size": 32},
    ]
    assert len({of(model, **option) for option in options}) == len(options)


def test_one_weight_makes_another(tmp_path: Path) -> None:
    build("llama", tmp_path)
    before, file = of(tmp_path), tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    next(tensor for name, tensor in sorted(tensors.items()) if "gate_proj" in name)[0, 0] += 0.01
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    assert of(tmp_path) != before
