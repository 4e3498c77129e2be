"""config.json for transformers' own classes: read with our bounds, and without what it would obey.

transformers takes some fields not for numbers of the model but for instructions: whose code to run, which kernels to
fetch, which file to load. None of them gets through, at any depth; what remains is data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from model.config_fields import Fields, read_json
from model.errors import ModelError

INSTRUCTIONS = frozenset(
    {
        *("auto_map", "custom_pipelines", "trust_remote_code"),
        *("attn_implementation", "experts_implementation", "kernel_config", "use_kernels", "fusion_config"),
        *("transformers_weights", "configuration_files", "name_or_path", "quantization_config", "compression_config"),
        *("dtype", "torch_dtype"),  # ours to choose
    }
)
"""Dropped, and so is every name that begins with an underscore: those are transformers' own."""
ADAPTER = "adapter_config.json"
FLOAT = "__float__"
"""How transformers writes infinity."""


def transformers_config(folder: Path) -> PreTrainedConfig:
    """The configuration object of a folder's model. Raises ModelError."""
    if (folder / ADAPTER).exists():
        raise ModelError(f"{folder / ADAPTER}: adapters cannot be served; merge it into the weights")
    path = folder / "config.json"
    values = read_json(path)
    model_type = Fields(values, str(path)).text("model_type", "")
    if model_type not in CONFIG_MAPPING:
        raise ModelError(f"{path}: a model_type {model_type[:40]!r} cannot be loaded by transformers")
    return CONFIG_MAPPING[model_type](**_data(values))


def _data(value: Any) -> Any:
    """JSON without INSTRUCTIONS."""
    if isinstance(value, list):
        return [_data(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {FLOAT}:
        return float(value[FLOAT])
    return {key: _data(entry) for key, entry in value.items() if key not in INSTRUCTIONS and not key.startswith("_")}
