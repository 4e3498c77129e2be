from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from model.fingerprint import fingerprint
from model.runner import RunnerOptions, load_runner
from tests.model.parity import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fingerprint")
    build("llama", folder)
    return folder


def of(folder: Path, **options: Any) -> bytes:
    values: dict[str, Any] = {"model": str(folder), "device": "cpu", "kv_cache_memory": 4 << 20}
    found = fingerprint(load_runner(RunnerOptions(**(values | options))))
    assert len(found) == 32
    return found


@pytest.mark.parametrize("kv", ["auto", "tq4"])
def test_the_same_model_is_the_same(folder: Path, kv: str) -> None:
    """Whatever the pool's size and the length of a step."""
    assert of(folder, kv_cache_dtype=kv) == of(
        folder, kv_cache_dtype=kv, kv_cache_memory=8 << 20, max_num_batched_tokens=128, max_num_seqs=3
    )


def test_whatever_keys_depend_on_makes_another(folder: Path) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"dtype": "float32"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "k8v4"},
        {"kv_cache_dtype": "tq4"},
        {"quantization": "int8"},
        {"block_size": 32},
    ]
    assert len({of(folder, **option) for option in options}) == len(options)


def test_a_weight_that_the_prompt_does_not_meet(folder: Path) -> None:
    """An embedding of a token that is not in it, at the beginning of a sampled piece of the file."""
    before = of(folder)
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    name = next(name for name in sorted(tensors) if "gate_proj" in name)
    tensors[name][0, 0] += 1e-3
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    assert of(folder) != before
