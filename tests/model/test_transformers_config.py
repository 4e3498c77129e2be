"""What of a config.json reaches transformers: data, never an instruction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from model.errors import ModelError
from model.transformers_config import transformers_config
from tests.model.conftest import TINY

HOSTILE: dict[str, Any] = {
    "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "somebody/else--evil.Evil"},
    "_attn_implementation": "somebody/kernels",
    "_attn_implementation_internal": "somebody/kernels",
    "attn_implementation": "somebody/kernels:flash",
    "experts_implementation": "somebody/kernels",
    "transformers_weights": "../../secret.safetensors",
    "fusion_config": {"x": 1},
    "use_kernels": True,
    "name_or_path": "/secret",
    "_name_or_path": "/secret",
    "_auto_class": "AutoConfig",
    "dtype": "load",
    "configuration_files": ["config.4.0.0.json"],
}


def write(folder: Path, **values: Any) -> None:
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize("kind", ["GPTNeoXConfig", "MixtralConfig", "OPTConfig"])
def test_instructions_are_dropped_and_nothing_else_is(kind: str, tmp_path: Path) -> None:
    config = getattr(transformers, kind)(**TINY)
    config.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    read = transformers_config(tmp_path)
    assert read.to_dict() == {**config.to_dict(), "dtype": None}
    write(tmp_path, **values, **{name: value for name, value in HOSTILE.items() if name not in values}, odd_field=[1])
    hostile = transformers_config(tmp_path)
    assert hostile.to_dict() == {**read.to_dict(), "odd_field": [1]}
    for name in HOSTILE.keys() - {"name_or_path", "_name_or_path", "dtype", "_auto_class"}:
        assert getattr(hostile, name, None) == getattr(read, name, None), name
    assert "secret" not in str(hostile)


def test_at_any_depth(tmp_path: Path) -> None:
    write(tmp_path, model_type="gpt_neox", inner={"deep": [{"auto_map": {}, "_attn_implementation": "x", "kept": 1}]})
    assert getattr(transformers_config(tmp_path), "inner") == {"deep": [{"kept": 1}]}  # noqa: B009  # not declared


def test_infinity_as_transformers_writes_it(tmp_path: Path) -> None:
    write(tmp_path, model_type="gpt_neox", limit={"__float__": "Infinity"})
    assert getattr(transformers_config(tmp_path), "limit") == float("inf")  # noqa: B009


@pytest.mark.parametrize("values", [{}, {"model_type": "evil"}, {"model_type": 7}, {"model_type": "../gpt_neox"}])
def test_only_classes_that_transformers_has(values: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, **values)
    with pytest.raises(ModelError, match="model_type"):
        transformers_config(tmp_path)


def test_an_adapter_would_name_another_model(tmp_path: Path) -> None:
    write(tmp_path, model_type="gpt_neox")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/secret"}')
    with pytest.raises(ModelError, match="adapters cannot be served"):
        transformers_config(tmp_path)
