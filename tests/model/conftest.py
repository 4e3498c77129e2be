"""The demo model, tiny models of every family, and GGUF files made by the `gguf` package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers
from numpy.typing import NDArray

from model.source import ModelSource, resolve

TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 2.0**-17,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.25],
    "long_factor": [2.0, 4.0],
    "partial_rotary_factor": 0.25,
}
LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 32}),
    "llama-3": ("Llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA_3}}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 32}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {}),
    "phi3": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64, "sliding_window": 100}),
    "granite": (
        "Granite",
        {
            "attention_multiplier": 0.125,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.25,
            "logits_scaling": 8.0,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "gemma2": ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}),
    "gemma3": ("Gemma3Text", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "layer_types": None}),
}


def tiny_config(family: str, **changes: Any) -> Any:
    """transformers' own config object of a tiny model of that family."""
    name, values = FAMILIES[family]
    return getattr(transformers, f"{name}Config")(**(TINY | values | changes))


@pytest.fixture(scope="session")
def demo() -> ModelSource:
    return resolve(None)


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    return tiny_config


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with a tiny random model of a family, as transformers saves it; made once."""
    import torch

    folders: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in folders:
            torch.manual_seed(0)
            name = FAMILIES[family][0].removesuffix("Text")
            model = getattr(transformers, f"{name}ForCausalLM")(tiny_config(family))
            with torch.no_grad():  # norms start as ones and zeros; then a lost or doubled offset would go unseen
                for parameter in model.parameters():
                    parameter.add_(torch.rand_like(parameter) * 0.1)
            folders[family] = tmp_path_factory.mktemp(family)
            model.save_pretrained(folders[family])
        return folders[family]

    return make


WriteGGUF = Callable[[Path, str, dict[str, Any], dict[str, NDArray[Any]]], Path]


@pytest.fixture(scope="session")
def write_gguf() -> WriteGGUF:
    """Writes a GGUF file: architecture, metadata by full key, tensors as arrays (packed uint8 ones with their type)."""

    def write(path: Path, arch: str, metadata: dict[str, Any], tensors: dict[str, Any]) -> Path:
        writer = gguf.GGUFWriter(path, arch)
        for key, value in metadata.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        for name, tensor in tensors.items():
            kind = None
            if isinstance(tensor, tuple):
                tensor, kind = tensor
            writer.add_tensor(name, np.ascontiguousarray(tensor), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
