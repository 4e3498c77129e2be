"""Every family's config.json, as transformers writes it now and as it did before, against its own config classes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.config import ModelConfig, RopeConfig
from model.config_reader import config_from_json, read_config
from model.errors import ModelError
from model.source import ModelSource

Tiny = Callable[..., Any]


def saved(config: Any, folder: Path) -> dict[str, Any]:
    """The config.json that save_pretrained writes, with the class name that a saved model has."""
    config.save_pretrained(folder)
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    name = type(config).__name__.removesuffix("Config").removesuffix("Text")
    return values | {"architectures": [f"{name}ForCausalLM"]}


def check(read: ModelConfig, theirs: Any) -> None:
    """What we read is what transformers' config object says."""
    text = theirs.get_text_config()
    assert read.native
    assert read.vocab_size == text.vocab_size
    assert (read.hidden_size, read.intermediate_size) == (text.hidden_size, text.intermediate_size)
    assert (read.num_layers, read.num_heads) == (text.num_hidden_layers, text.num_attention_heads)
    assert read.num_kv_heads == text.num_key_value_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    assert read.head_dim == head_dim
    assert read.max_position_embeddings == text.max_position_embeddings
    assert read.norm_eps == text.rms_norm_eps
    assert read.tie_word_embeddings == text.tie_word_embeddings
    layered = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    if read.architecture in ("MistralForCausalLM", "Phi3ForCausalLM"):
        layered = ["sliding_attention" if window else "full_attention"] * text.num_hidden_layers
    layered = layered or ["full_attention"] * text.num_hidden_layers
    assert read.layer_types == tuple(kind.removesuffix("_attention") for kind in layered)
    assert read.sliding_window == (window if "sliding" in read.layer_types else None)
    assert read.bos_token_id == text.bos_token_id
    eos = text.eos_token_id
    assert read.eos_token_ids == tuple(eos if isinstance(eos, list) else [eos])
    parameters = text.rope_parameters
    check_rope(read.rope, parameters.get("full_attention", parameters))
    if "sliding_attention" in parameters:
        assert read.local_rope is not None
        check_rope(read.local_rope, parameters["sliding_attention"])


def check_rope(read: RopeConfig, theirs: dict[str, Any]) -> None:
    assert read.theta == theirs["rope_theta"]
    assert read.scaling == theirs["rope_type"]
    assert read.partial_factor == theirs.get("partial_rotary_factor", 1.0)
    names = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    ours = dict(read.parameters or {})
    ours.pop("truncate", None)
    assert ours == {key: value for key, value in theirs.items() if key not in names and value is not None}


def test_every_family_reads_as_transformers_does(family: str, tiny: Tiny, tmp_path: Path) -> None:
    theirs = tiny(family)
    check(config_from_json(saved(theirs, tmp_path)), theirs)


def test_family_features(tiny: Tiny, tmp_path: Path) -> None:
    def read(family: str, **changes: Any) -> ModelConfig:
        return config_from_json(saved(tiny(family, **changes), tmp_path))

    bias = read("llama-bias")
    assert (bias.qkv_bias, bias.output_bias, bias.mlp_bias) == (True, True, True)
    qwen2 = read("qwen2")
    assert (qwen2.qkv_bias, qwen2.output_bias) == (True, False)
    assert qwen2.layer_types == ("full", "full", "sliding", "sliding")
    assert read("qwen2", use_sliding_window=False).sliding_window is None
    assert read("qwen3").qk_norm == "head"
    assert read("smollm3").no_rope_layers == {3}
    assert read("smollm3", no_rope_layers=[0, 1, 1, 0]).no_rope_layers == {0, 3}
    sliding = read("smollm3", use_sliding_window=True, sliding_window=7)
    assert sliding.layer_types == ("full", "full", "full", "sliding")
    assert read("mistral", sliding_window=None).layer_types == ("full",) * 4
    granite = read("granite")
    assert (granite.attention_scale, granite.embedding_multiplier) == (0.125, 12.0)
    assert (granite.residual_multiplier, granite.logits_divisor) == (0.25, 8.0)
    olmo2 = read("olmo2")
    assert (olmo2.qk_norm, olmo2.norms) == ("full", "post")
    gemma2 = read("gemma2")
    assert (gemma2.norms, gemma2.norm_offset, gemma2.activation) == ("sandwich", 1.0, "gelu_tanh")
    assert (gemma2.attention_softcap, gemma2.logits_softcap) == (50.0, 30.0)
    assert (gemma2.attention_scale, gemma2.embedding_multiplier) == (0.25, 8.0)
    uncapped = read("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (uncapped.attention_softcap, uncapped.logits_softcap) == (None, None)
    assert read("qwen3", num_key_value_heads=None).num_kv_heads == 4
    gemma3 = read("gemma3", num_hidden_layers=7)
    assert gemma3.layer_types == ("sliding",) * 5 + ("full", "sliding")
    assert (gemma3.qk_norm, gemma3.attention_softcap) == ("head", None)
    assert gemma3.local_rope is not None
    assert (gemma3.rope.theta, gemma3.local_rope.theta) == (1e6, 1e4)


@pytest.mark.parametrize("scaling", ["linear", "dynamic", "yarn", "llama3"])
def test_rope_scalings_in_old_and_new_spelling(scaling: str, tiny: Tiny, tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"factor": 4.0}
    if scaling == "yarn":
        numbers |= {"original_max_position_embeddings": 128, "beta_fast": 16.0}
    if scaling == "llama3":
        numbers |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
    theirs = tiny("llama", rope_parameters={"rope_type": scaling, "rope_theta": 1e5, **numbers})
    new = saved(theirs, tmp_path)
    check(config_from_json(new), theirs)
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "dtype")}
    old |= {"rope_theta": 1e5, "rope_scaling": {"type": scaling, **numbers}, "torch_dtype": "float16"}
    assert config_from_json(old) == replace(config_from_json(new), dtype="float16")


def test_old_gemma3_spelling() -> None:
    """google/gemma-3-4b-it: an image model whose text_config leaves out all that is a default."""
    values = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
    }
    theirs = transformers.Gemma3TextConfig(**values["text_config"], eos_token_id=[1, 106])  # type: ignore[arg-type]
    read = config_from_json(values)
    check(read, theirs)
    assert read.architecture == "Gemma3ForCausalLM"


def test_old_phi3_spelling() -> None:
    values = {
        "architectures": ["Phi3ForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        "rope_theta": 10000.0,
    }
    read = config_from_json(values)
    assert read.rope.scaling == "longrope"
    assert (read.rope.parameters or {})["original_max_position_embeddings"] == 4096
    assert read.sliding_window is None


def test_what_the_native_decoder_cannot_say_goes_to_transformers(tiny: Tiny, tmp_path: Path) -> None:
    llama = saved(tiny("llama"), tmp_path)
    assert not config_from_json(llama | {"hidden_act": "relu"}).native
    assert not config_from_json(llama | {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1.0}}).native
    assert not config_from_json(llama | {"partial_rotary_factor": 0.5}).native
    gpt2 = transformers.GPT2Config(n_embd=48, n_layer=3, n_head=4, n_positions=99, vocab_size=77)
    read = config_from_json(gpt2.to_dict() | {"architectures": ["GPT2LMHeadModel"]})
    assert not read.native
    assert (read.hidden_size, read.num_layers, read.num_heads, read.num_kv_heads, read.head_dim) == (48, 3, 4, 4, 12)
    assert (read.max_position_embeddings, read.vocab_size) == (99, 77)
    falcon = transformers.FalconConfig(hidden_size=64, num_attention_heads=4, new_decoder_architecture=False)
    assert config_from_json(falcon.to_dict() | {"architectures": ["FalconForCausalLM"]}).num_kv_heads == 1


HOSTILE: list[tuple[str, Any]] = [
    ("num_hidden_layers", 10**9),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", True),
    ("hidden_size", "64"),
    ("hidden_size", -64),
    ("hidden_size", 10**30),
    ("vocab_size", 2**40),
    ("num_attention_heads", 0),
    ("num_key_value_heads", 3),
    ("head_dim", 10**6),
    ("rms_norm_eps", float("nan")),
    ("rms_norm_eps", float("inf")),
    ("max_position_embeddings", -1),
    ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1e4}),
    ("rope_parameters", {"rope_type": "linear", "factor": -1.0}),
    ("rope_parameters", {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
    ("rope_parameters", []),
    ("rope_parameters", {"rope_type": ["linear"]}),
    ("hidden_act", 7),
    ("tie_word_embeddings", "no"),
    ("attention_bias", 1),
    ("architectures", ["BertForMaskedLM"]),
    ("architectures", "LlamaForCausalLM"),
    ("architectures", [{"a": 1}]),
    ("architectures", []),
    ("is_encoder_decoder", True),
    ("quantization_config", {"quant_method": "gptq"}),
]


@pytest.mark.parametrize(("key", "value"), HOSTILE)
def test_hostile_values_give_one_line_that_names_the_field(key: str, value: Any, tiny: Tiny, tmp_path: Path) -> None:
    values = saved(tiny("llama", head_dim=None), tmp_path) | {key: value}
    with pytest.raises(ModelError) as caught:
        config_from_json(values)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert key.replace("rope_parameters", "") in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("layer_types", ["full_attention"]), ("layer_types", ["linear_attention"] * 4), ("max_window_layers", -1)],
)
def test_hostile_layers(key: str, value: Any, tiny: Tiny, tmp_path: Path) -> None:
    values = saved(tiny("qwen2"), tmp_path)
    del values["layer_types"]
    with pytest.raises(ModelError, match=key):
        config_from_json(values | {key: value})


TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}
OPTIONAL = ["rope_scaling", "rope_parameters", "rope_theta", "head_dim", "layer_types", "sliding_window", "text_config"]
OPTIONAL += ["eos_token_id", "bos_token_id", "dtype", "num_key_value_heads"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data())
def test_any_json_in_any_field_gives_a_config_or_a_model_error(data: st.DataObject) -> None:
    names = ["LlamaForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM", "OtherForCausalLM"]
    values: dict[str, Any] = dict.fromkeys(OPTIONAL) | TINY
    values["architectures"] = [data.draw(st.sampled_from(names))]
    values[data.draw(st.sampled_from(sorted(values)))] = data.draw(JSON)
    try:
        read = config_from_json(values)
    except ModelError:
        return
    assert 0 < read.num_layers <= 1024
    assert read.attention_scale > 0


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"\xff"])
def test_files_that_are_no_json_object(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(ModelSource("folder", tmp_path, "x"))


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 34)
    with pytest.raises(ModelError, match="bigger than"):
        read_config(ModelSource("folder", tmp_path, "x"))


def test_demo(demo: ModelSource) -> None:
    config = read_config(demo)
    assert config.native
    assert (config.architecture, config.num_layers, config.num_heads, config.num_kv_heads) == (
        "LlamaForCausalLM",
        30,
        9,
        3,
    )
    assert (config.vocab_size, config.max_position_embeddings, config.rope.theta) == (49152, 8192, 1e5)
    assert config.eos_token_ids == (2,)


def test_gguf_leaves_out_what_can_be_worked_out(write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    """The 27B Gemma scales attention by its width, others by the head; heads without a length are the width's share."""

    def read(arch: str, **values: Any) -> ModelConfig:
        basics = {
            "block_count": 2,
            "context_length": 64,
            "embedding_length": 64,
            "feed_forward_length": 96,
            "attention.head_count": 4,
            "attention.layer_norm_rms_epsilon": 2.0**-17,
        }
        metadata = {f"{arch}.{key}": value for key, value in (basics | values).items()}
        tensors = {"token_embd.weight": np.zeros((10, 64), np.float16)}
        path = write_gguf(tmp_path / "x.gguf", arch, metadata, tensors)
        return read_config(ModelSource("gguf", path, "x"))

    plain = read("qwen3")
    assert (plain.head_dim, plain.num_kv_heads, plain.vocab_size, plain.dtype) == (16, 4, 10, "float16")
    assert plain.tie_word_embeddings
    assert read("gemma2", **{"attention.key_length": 32}).attention_scale == 32**-0.5
    largest = read("gemma2", **{"attention.key_length": 32, "block_count": 46})
    assert largest.attention_scale == 16**-0.5
    assert read("phi3", **{"attention.sliding_window": 0}).sliding_window is None
    assert read("phi3", **{"rope.dimension_count": 8}).rope.partial_factor == 0.5
    linear = read("llama", **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}).rope
    assert (linear.scaling, linear.parameters) == ("linear", {"factor": 4.0})
    with pytest.raises(ModelError, match="OLMo 3"):
        read("olmo2", **{"attention.sliding_window": 8})
    with pytest.raises(ModelError, match="experts"):
        read("llama", expert_count=8)
    with pytest.raises(ModelError, match="mamba"):
        read("mamba")
    with pytest.raises(ModelError, match="num_key_value_heads"):
        read("llama", **{"attention.head_count_kv": [1, 2]})
    with pytest.raises(ModelError, match="num_hidden_layers"):
        read("llama", block_count=2**31)


ANY_VALUE = st.one_of(
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.floats(width=32),
    st.text(max_size=6),
    st.sampled_from(["linear", "yarn", "longrope", "none"]),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.lists(st.text(max_size=3), min_size=1, max_size=3),
)
GGUF_KEYS = ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"]
GGUF_KEYS += ["attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon", "expert_count"]
GGUF_KEYS += ["attention.sliding_window", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"]
GGUF_KEYS += ["rope.scaling.attn_factor", "rope.scaling.original_context_length", "rope.freq_base"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    arch=st.sampled_from(["llama", "phi3", "gemma2", "gemma3", "granite", "olmo2"]),
    wild=st.dictionaries(st.sampled_from(GGUF_KEYS), ANY_VALUE, max_size=4),
)
def test_any_gguf_metadata_gives_a_config_or_a_model_error(
    arch: str, wild: dict[str, Any], write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    metadata: dict[str, Any] = dict.fromkeys(GGUF_KEYS[:5], 4) | {"attention.layer_norm_rms_epsilon": 1e-5} | wild
    tensors = {"token_embd.weight": np.zeros((10, 4), np.float32), "rope_freqs.weight": np.ones(2, np.float32)}
    path = write_gguf(tmp_path / "x.gguf", arch, {f"{arch}.{key}": value for key, value in metadata.items()}, tensors)
    try:
        assert read_config(ModelSource("gguf", path, "x")).native
    except ModelError as error:
        message = str(error)
    else:
        return
    assert "\n" not in message
