"""Models that only transformers knows: those that are served, bit by bit, and those that must be refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvpool.formats import FORMATS
from model.attention.reference import ReferenceAttention
from model.config_reader import read_config
from model.errors import ModelError
from model.precision import Precision
from model.source import ModelSource
from model.transformers_model import TransformersModel, load_transformers
from tests.model.conftest import TINY
from tests.model.parity import CPU, EXACT, Driver, expected, make_runner, prompts

SMALL = TINY | {"num_hidden_layers": 2}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", GPT),
    "GPTBigCodeForCausalLM": ("GPTBigCodeConfig", GPT),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", {}),
    "GPTJForCausalLM": ("GPTJConfig", GPT | {"rotary_dim": 8}),
    "OPTForCausalLM": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "PhiForCausalLM": ("PhiConfig", {}),
    "CohereForCausalLM": ("CohereConfig", {"logit_scale": 0.5}),
    "Starcoder2ForCausalLM": ("Starcoder2Config", {"sliding_window": 12}),
    "MixtralForCausalLM": ("MixtralConfig", {"num_local_experts": 4}),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "FalconForCausalLM": ("FalconConfig", {}, "does not use transformers' attention interface"),
    "StableLmForCausalLM": ("StableLmConfig", {}, "does not use transformers' attention interface"),
    "BloomForCausalLM": ("BloomConfig", {"n_layer": 2, "n_head": 4}, "does not use transformers' attention interface"),
    "MambaForCausalLM": ("MambaConfig", {"state_size": 4}, "does not use transformers' attention interface"),
    "GptOssForCausalLM": ("GptOssConfig", {"head_dim": 16, "num_local_experts": 4}, "gives other logits"),
    "DeepseekV3ForCausalLM": (
        "DeepseekV3Config",
        {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
        "keys and values of several sizes",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def saved(folder: Path, architecture: str, kind: str, values: dict[str, Any]) -> Path:
    module = getattr(transformers, architecture)(getattr(transformers, kind)(**(SMALL | values)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.empty(parameter.shape).normal_(0, 1, generator=generator)
            parameter.add_(noise * (0.1 if parameter.dim() == 1 else 0.15))
    module.save_pretrained(folder)
    return folder


def loaded(folder: Path, precision: Precision = EXACT) -> TransformersModel:
    config = read_config(ModelSource("folder", folder, "tiny"))
    assert not config.native
    return load_transformers(folder, config, ReferenceAttention(), precision, CPU)


@pytest.mark.parametrize("architecture", sorted(SERVED))
def test_greedy_tokens(architecture: str, tmp_path: Path) -> None:
    saved(tmp_path, architecture, *SERVED[architecture])
    given = prompts(SMALL["vocab_size"], (9, 30))
    reference = expected(tmp_path, given)
    driver = Driver(make_runner(tmp_path))
    for prompt in given:
        driver.add(prompt)
    assert driver.run(13) == reference


@pytest.mark.parametrize("architecture", sorted(REFUSED))
def test_refused(architecture: str, tmp_path: Path) -> None:
    kind, values, reason = REFUSED[architecture]
    saved(tmp_path, architecture, kind, values)
    with pytest.raises(ModelError, match=reason) as error:
        loaded(tmp_path)
    assert architecture in str(error.value)
    assert "\n" not in str(error.value)


def test_the_pool_learns_the_true_shape(tmp_path: Path) -> None:
    saved(tmp_path, "GPTBigCodeForCausalLM", *SERVED["GPTBigCodeForCausalLM"])
    config = loaded(tmp_path).config
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (2, 1, 16)


def test_logits_are_float32_in_sixteen_bits(tmp_path: Path) -> None:
    saved(tmp_path, "GPTNeoXForCausalLM", *SERVED["GPTNeoXForCausalLM"])
    model = loaded(tmp_path, Precision(torch.bfloat16, torch.bfloat16, FORMATS["bfloat16"]))
    logits = model.logits(torch.randn(3, 64).bfloat16())
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())


def test_code_in_the_folder_is_never_run(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "GPTNeoXForCausalLM", *SERVED["GPTNeoXForCausalLM"])
    path = folder / "config.json"
    text = path.read_text().replace(
        '"model_type": "gpt_neox"', '"model_type": "evil", "auto_map": {"AutoConfig": "e.E"}'
    )
    path.write_text(text)
    (folder / "e.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass E: pass\n")
    with pytest.raises(ModelError, match="cannot be loaded by transformers"):
        loaded(folder)
    assert not (tmp_path / "ran").exists()


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    folder = saved(tmp_path, "GPTNeoXForCausalLM", *SERVED["GPTNeoXForCausalLM"])
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be loaded by transformers"):
        loaded(folder)


@pytest.mark.parametrize("target", ["../secret.safetensors", "/etc/passwd", "pytorch_model.bin"])
def test_an_index_cannot_lead_elsewhere(target: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "GPTNeoXForCausalLM", *SERVED["GPTNeoXForCausalLM"])
    (folder / "model.safetensors").rename(tmp_path / "secret.safetensors")
    index = {"metadata": {}, "weight_map": {"gpt_neox.embed_in.weight": target}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="no safetensors file in the folder"):
        loaded(folder)
