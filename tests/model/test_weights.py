"""Weights come back as they were saved: safetensors, shards, and GGUF files of every family."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from model.config import ModelConfig
from model.config_reader import read_config
from model.errors import ModelError
from model.source import ModelSource
from model.weights import WeightStore, open_weights

Write = Callable[..., Path]
TinyFolder = Callable[[str], Path]


def opened(folder: Path) -> tuple[WeightStore, ModelConfig]:
    source = ModelSource("folder", folder, "tiny")
    config = read_config(source)
    return open_weights(source, config), config


def saved(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def with_tensors(folder: Path, like: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A folder with the same configuration and other tensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((like / "config.json").read_bytes())
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_every_family_has_the_expected_tensors(family: str, tiny_folder: TinyFolder) -> None:
    store, config = opened(tiny_folder(family))
    assert config.native
    expected = saved(tiny_folder(family))
    assert store.names() == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(store.get(name), tensor)
        assert store.shape(name) == tuple(tensor.shape)
    assert store.get("model.norm.weight", torch.float16).dtype == torch.float16


def permuted(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to q and k (convert_hf_to_gguf.py, LlamaModel.permute)."""
    return (
        tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    )


def write_family(path: Path, arch: str, theirs: Any, tensors: dict[str, torch.Tensor], write: Write) -> Path:
    """A GGUF file as llama.cpp's converter writes it: its metadata keys, its tensor names, its changed weights."""
    keys = gguf.constants.Keys
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch], theirs.num_hidden_layers)
    rope = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    metadata: dict[str, Any] = {
        keys.LLM.CONTEXT_LENGTH: theirs.max_position_embeddings,
        keys.LLM.EMBEDDING_LENGTH: theirs.hidden_size,
        keys.LLM.FEED_FORWARD_LENGTH: theirs.intermediate_size,
        keys.LLM.BLOCK_COUNT: theirs.num_hidden_layers,
        keys.Attention.HEAD_COUNT: theirs.num_attention_heads,
        keys.Attention.HEAD_COUNT_KV: theirs.num_key_value_heads,
        keys.Attention.KEY_LENGTH: head_dim,
        keys.Attention.LAYERNORM_RMS_EPS: theirs.rms_norm_eps,
        keys.Rope.FREQ_BASE: float(rope["rope_theta"]),
        keys.Rope.DIMENSION_COUNT: int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        keys.Tokenizer.BOS_ID: theirs.bos_token_id,
        keys.Tokenizer.EOS_ID: theirs.eos_token_id,
    }
    if arch == "granite":
        metadata[keys.Attention.SCALE] = theirs.attention_multiplier
        metadata[keys.LLM.EMBEDDING_SCALE] = theirs.embedding_multiplier
        metadata[keys.LLM.RESIDUAL_SCALE] = theirs.residual_multiplier
        metadata[keys.LLM.LOGIT_SCALE] = theirs.logits_scaling
    if arch in ("gemma2", "gemma3", "phi3"):
        metadata[keys.Attention.SLIDING_WINDOW] = theirs.sliding_window
    if arch == "gemma2":
        metadata[keys.LLM.ATTN_LOGIT_SOFTCAPPING] = theirs.attn_logit_softcapping
        metadata[keys.LLM.FINAL_LOGIT_SOFTCAPPING] = theirs.final_logit_softcapping
    converted: dict[str, Any] = {}
    if arch == "phi3":
        metadata[keys.Rope.SCALING_ORIG_CTX_LEN] = theirs.original_max_position_embeddings
        metadata[keys.Rope.SCALING_ATTN_FACTOR] = 1.25
        converted["rope_factors_short.weight"] = np.array(rope["short_factor"], np.float32)
        converted["rope_factors_long.weight"] = np.array(rope["long_factor"], np.float32)
    for name, tensor in tensors.items():
        if arch in ("llama", "granite", "smollm3"):
            if ".q_proj." in name:
                tensor = permuted(tensor, theirs.num_attention_heads)
            elif ".k_proj." in name:
                tensor = permuted(tensor, theirs.num_key_value_heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new is not None, name
        converted[new] = tensor.numpy()
    full = {key.format(arch=arch): value for key, value in metadata.items()}
    return write(path, arch, full, converted)


@pytest.mark.parametrize(
    ("family", "arch"),
    [
        ("llama", "llama"),
        ("llama-bias", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("smollm3", "smollm3"),
        ("phi3", "phi3"),
        ("granite", "granite"),
        ("olmo2", "olmo2"),
        ("gemma2", "gemma2"),
        ("gemma3", "gemma3"),
    ],
)
def test_a_gguf_file_is_the_model_it_was_made_from(
    family: str, arch: str, tiny: Callable[[str], Any], tiny_folder: TinyFolder, write_gguf: Write, tmp_path: Path
) -> None:
    tensors = saved(tiny_folder(family))
    path = write_family(tmp_path / "tiny.gguf", arch, tiny(family), tensors, write_gguf)
    source = ModelSource("gguf", path, "tiny")
    config = read_config(source)
    original = read_config(ModelSource("folder", tiny_folder(family), "tiny"))
    expected = replace(original, norm_offset=0.0, dtype="float32")
    if family == "qwen2":  # llama.cpp has no sliding window for it
        expected = replace(expected, layer_types=("full",) * 4, sliding_window=None)
    if family == "phi3":
        parameters = (original.rope.parameters or {}) | {"attention_factor": 1.25}
        expected = replace(expected, rope=replace(original.rope, parameters=parameters))
    assert config == expected
    store = open_weights(source, config)
    assert store.names() == set(tensors)
    for name, tensor in tensors.items():
        offset = 1 if arch.startswith("gemma") and name.endswith("norm.weight") else 0
        assert torch.equal(store.get(name), tensor + offset), name


def test_llama_3_frequencies_from_gguf(
    tiny: Callable[..., Any], tiny_folder: TinyFolder, write_gguf: Write, tmp_path: Path
) -> None:
    """The converter turns llama3 scaling into one factor per frequency; with these the frequencies are the same."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = tiny("llama-3")
    head_dim = theirs.hidden_size // theirs.num_attention_heads
    plain = theirs.rope_parameters["rope_theta"] ** (-torch.arange(0, head_dim, 2) / head_dim)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, None)
    tensors = saved(tiny_folder("llama-3"))
    path = tmp_path / "tiny.gguf"

    def write(path: Path, arch: str, metadata: dict[str, Any], converted: dict[str, Any]) -> Path:
        return write_gguf(path, arch, metadata, converted | {"rope_freqs.weight": (plain / scaled).numpy()})

    write_family(path, "llama", theirs, tensors, write)
    source = ModelSource("gguf", path, "tiny")
    config = read_config(source)
    assert open_weights(source, config).names() == set(tensors)
    parameters = config.rope.parameters or {}
    assert config.rope.scaling == "longrope"
    assert parameters["attention_factor"] == 1.0
    assert parameters["short_factor"] == parameters["long_factor"]
    torch.testing.assert_close(plain / torch.tensor(parameters["long_factor"]), scaled)


def test_demo_weights_are_dequantised_in_chunks(demo: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(demo)
    store = open_weights(demo, config)
    name = "model.layers.0.mlp.down_proj.weight"
    whole = store.get(name)
    assert whole.dtype == torch.float32
    assert whole.shape == (576, 1536)
    monkeypatch.setattr("model.gguf.CHUNK_ELEMENTS", 1536 * 5)
    assert torch.equal(store.get(name), whole)
    assert torch.equal(store.get(name, torch.bfloat16), whole.to(torch.bfloat16))


def test_shards(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    tensors = saved(tiny_folder("llama"))
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    (tmp_path / "config.json").write_bytes((tiny_folder("llama") / "config.json").read_bytes())
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    store, _ = opened(tmp_path)
    assert all(torch.equal(store.get(name), tensors[name]) for name in names)

    def refused(**weight_map: Any) -> str:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelError) as caught:
            opened(tmp_path)
        return str(caught.value)

    assert "no safetensors file in the folder" in refused(x="../model-1.safetensors")
    assert "no safetensors file in the folder" in refused(x="/etc/passwd")
    assert "no safetensors file in the folder" in refused(x="model.bin")
    assert "no safetensors file in the folder" in refused(x=["model-1.safetensors"])
    assert "absent.safetensors" in refused(x="absent.safetensors")
    assert "ghost" in refused(ghost="model-1.safetensors")


def test_wrong_tensors_are_named(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder("llama")
    tensors = saved(folder)
    name = "model.layers.1.self_attn.k_proj.weight"

    def refused(tensors: dict[str, torch.Tensor]) -> str:
        with pytest.raises(ModelError) as caught:
            opened(with_tensors(tmp_path / "wrong", folder, tensors))
        return str(caught.value)

    assert f"{name} is missing" in refused({key: value for key, value in tensors.items() if key != name})
    assert f"{name} has the shape [1, 2]" in refused(tensors | {name: torch.ones(1, 2)})
    bias = name.replace("weight", "bias")
    assert f"{bias} has no place" in refused(tensors | {bias: torch.ones(64)})
    store, _ = opened(
        with_tensors(
            tmp_path / "old", folder, tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
        )
    )
    assert store.names() == set(tensors)
    with pytest.raises(ModelError, match="nothing"):
        store.get("nothing")


def test_integers_are_no_weights(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    tensors = saved(tiny_folder("llama"))
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    store, _ = opened(with_tensors(tmp_path / "wrong", tiny_folder("llama"), tensors))
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        store.get("model.norm.weight")


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, (2**40).to_bytes(8, "little") + b"{}"])
def test_broken_safetensors(content: bytes, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_folder("llama") / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        opened(tmp_path)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_decoder_of_an_image_model(prefix: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder("gemma3")
    tensors = saved(folder)
    renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    image = {"vision_tower.x.weight": torch.ones(1), "model.multi_modal_projector.y": torch.ones(1)}
    with_tensors(tmp_path / "image", folder, renamed | image)
    text = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "image" / "config.json").write_text(json.dumps(outer))
    store, config = opened(tmp_path / "image")
    assert config.native
    assert store.names() == set(tensors)
    assert torch.equal(store.get("model.norm.weight"), tensors["model.norm.weight"])


def test_parts_of_tensors(
    tiny_folder: TinyFolder, tiny: Callable[[str], Any], write_gguf: Write, tmp_path: Path
) -> None:
    """Whole heads of what the converter permutes, rows and columns of the rest, a piece of a vector."""
    tensors = saved(tiny_folder("llama-bias"))
    path = write_family(tmp_path / "tiny.gguf", "llama", tiny("llama-bias"), tensors, write_gguf)
    source = ModelSource("gguf", path, "tiny")
    folder, _ = opened(tiny_folder("llama-bias"))
    for store in (folder, open_weights(source, read_config(source))):
        for name, part in (
            ("self_attn.q_proj.weight", (slice(32, 64),)),
            ("self_attn.q_proj.bias", (slice(16, 48),)),
            ("self_attn.o_proj.weight", (slice(None), slice(32, 64))),
            ("mlp.down_proj.weight", (slice(8, 9), slice(0, 48))),
            ("mlp.down_proj.weight", ()),
        ):
            whole = tensors[f"model.layers.1.{name}"]
            assert torch.equal(store.get(f"model.layers.1.{name}", torch.float32, part), whole[part]), name
