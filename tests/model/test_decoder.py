"""What building a decoder does with weights. What it computes: test_parity.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvpool.formats import FORMATS
from model.attention.reference import ReferenceAttention
from model.config import ModelConfig
from model.config_reader import read_config
from model.decoder import Decoder
from model.errors import ModelError
from model.kernels.build import load
from model.kernels.loaded import Kernels
from model.linear import PackedLinear, WideningLinear
from model.precision import Precision
from model.source import ModelSource
from tests.model.parity import CPU, EXACT, build

NARROW = Precision(torch.bfloat16, torch.float32, FORMATS["bfloat16"])


class Tensors:
    """A WeightStore over tensors in memory, which remembers what was asked for."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.asked: list[str] = []

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def get(self, name: str, dtype: torch.dtype | None = None, part: tuple[slice, ...] = ()) -> torch.Tensor:
        self.asked.append(name)
        if name not in self.tensors:
            raise ModelError(f"the tensor {name} is missing")
        tensor = self.tensors[name][part]
        return tensor if dtype is None else tensor.to(dtype)


def opened(folder: Path, family: str) -> tuple[ModelConfig, Tensors]:
    build(family, folder)
    return read_config(ModelSource("folder", folder, "tiny")), Tensors(load_file(folder / "model.safetensors"))


def decoder(config: ModelConfig, tensors: Any, precision: Precision = EXACT) -> Decoder:
    return Decoder(config, tensors, ReferenceAttention(), precision, CPU, 64)


@pytest.mark.parametrize("family", ["llama", "llama-bias", "phi3", "gemma3", "olmo2"])
def test_every_tensor_is_read_once(family: str, tmp_path: Path) -> None:
    config, tensors = opened(tmp_path, family)
    decoder(config, tensors)
    assert sorted(tensors.asked) == sorted(tensors.names())


def test_progress_counts_layers(tmp_path: Path) -> None:
    config, tensors = opened(tmp_path, "llama")
    seen: list[tuple[int, int]] = []
    Decoder(config, tensors, ReferenceAttention(), EXACT, CPU, 64, lambda done, total: seen.append((done, total)))
    assert seen == [(n + 1, config.num_layers) for n in range(config.num_layers)]


def test_a_missing_tensor_and_a_wrong_shape_name_themselves(tmp_path: Path) -> None:
    config, tensors = opened(tmp_path, "llama")
    broken = Tensors(tensors.tensors | {"model.norm.weight": torch.ones(3)})
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight has the shape \(3,\); .* \(64,\)"):
        decoder(config, broken)
    del tensors.tensors["model.layers.2.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        decoder(config, tensors)


def test_sixteen_bits_take_half_the_bytes(tmp_path: Path) -> None:
    config, tensors = opened(tmp_path, "llama")
    count = sum(tensor.numel() for tensor in tensors.tensors.values())
    wide, narrow = decoder(config, tensors), decoder(config, tensors, NARROW)
    assert isinstance(wide.layers[0].qkv, PackedLinear)
    assert isinstance(narrow.layers[0].qkv, WideningLinear)
    assert wide.weight_bytes == 4 * count
    norms = (2 * config.num_layers + 1) * config.hidden_size
    assert narrow.weight_bytes == 2 * count + 2 * norms  # norms are computed with in float32


def test_a_tied_table_is_held_once(tmp_path: Path) -> None:
    config, tensors = opened(tmp_path, "qwen3")
    assert config.tie_word_embeddings
    count = sum(tensor.numel() for tensor in tensors.tensors.values())
    model = decoder(config, tensors, NARROW)
    assert isinstance(model.head.linear, WideningLinear)
    assert model.head.linear.weight.data_ptr() == model.embedding.table.data_ptr()
    assert model.weight_bytes < 2.05 * count


def test_a_table_is_kept_in_the_bits_it_came_in(tmp_path: Path) -> None:
    """Widening 16 bits gains nothing; the packed head has its own copy in float32."""
    config, tensors = opened(tmp_path, "llama")
    stored = {name: tensor.bfloat16() for name, tensor in tensors.tensors.items()}
    model = decoder(config, Tensors(stored))
    assert model.embedding.table.dtype == torch.bfloat16
    assert model.embedding(torch.tensor([3])).dtype == torch.float32


def test_the_owner_of_the_file_may_close_it(tmp_path: Path) -> None:
    """Nothing that is kept shares memory with what the store handed out."""
    config, tensors = opened(tmp_path, "llama")
    stored = {name: tensor.bfloat16() for name, tensor in tensors.tensors.items()}
    lent = {tensor.untyped_storage().data_ptr() for tensor in stored.values()}
    model = decoder(config, Tensors(stored), NARROW)
    kept = [model.embedding.table]
    for layer in model.layers:
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            assert isinstance(linear, WideningLinear)
            kept.append(linear.weight)
    assert not lent & {tensor.untyped_storage().data_ptr() for tensor in kept}


def test_softcap_and_divisor_of_the_logits(tmp_path: Path) -> None:
    config, tensors = opened(tmp_path, "llama")
    plain = decoder(config, tensors)
    capped = decoder(replace(config, logits_softcap=5.0, logits_divisor=4.0), tensors)
    hidden = torch.randn(3, config.hidden_size)
    expected = 5.0 * (plain.logits(hidden) / 4.0 / 5.0).tanh()
    torch.testing.assert_close(capped.logits(hidden), expected)


@pytest.mark.parametrize("changed", [{"logits_softcap": 5.0}, {"logits_divisor": 4.0}])
def test_logits_that_are_changed_must_be_there(changed: Any, tmp_path: Path) -> None:
    """Rounding may make equals of two, and then the first of them is the likeliest."""
    config, tensors = opened(tmp_path, "llama")
    compiled = replace(EXACT, kernels=Kernels(load()))
    hidden = torch.randn(3, config.hidden_size)
    plain = decoder(config, tensors, compiled)
    likeliest = plain.likeliest(hidden)
    assert likeliest is not None
    assert torch.equal(likeliest, plain.logits(hidden).argmax(1))
    assert decoder(replace(config, **changed), tensors, compiled).likeliest(hidden) is None
