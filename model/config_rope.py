"""Rotary embedding settings out of config.json, in the old spelling (`rope_theta`, `rope_scaling`) and the new one
(`rope_parameters`, perhaps one per kind of layer). Follows transformers' modeling_rope_utils.py. No torch here."""

from __future__ import annotations

from typing import Literal, get_args

from model.config import RopeConfig
from model.config_fields import Fields

Scaling = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]
MAX_THETA = 1e15
MAX_FACTOR = 1e6
MAX_CONTEXT = 1 << 30

_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "longrope": ("factor", "attention_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def read_rope(config: Fields, head_dim: int, theta: float, *, is_phi3: bool = False) -> RopeConfig | None:
    """A model's one set of rotary parameters; None where only transformers' own code knows the scaling."""
    rope = config.child(config.first("rope_scaling", "rope_parameters"))
    values = {
        "rope_theta": config.values.get("rope_theta"),
        "partial_rotary_factor": config.values.get("partial_rotary_factor"),
        **{key: value for key, value in rope.values.items() if value is not None},
    }
    if is_phi3:  # its own field wins, and its first releases called longrope "su" or "yarn"
        if values.get("rope_type", values.get("type")) in ("su", "yarn"):
            values["rope_type"] = "longrope"
        values["original_max_position_embeddings"] = config.values.get("original_max_position_embeddings", 4096)
    return _rope(Fields(values, rope.where), config, head_dim, theta)


def read_layered_rope(config: Fields, head_dim: int) -> tuple[RopeConfig | None, RopeConfig | None]:
    """Gemma 3's rotary parameters of full and of sliding layers; an old `rope_scaling` is of the full ones only."""
    rope = config.child("rope_parameters")
    full, local = rope.child("full_attention"), rope.child("sliding_attention")
    old = config.child("rope_scaling")
    full_values = {"rope_theta": config.values.get("rope_theta"), **full.values, **old.values}
    local_values = {"rope_theta": config.values.get("rope_local_base_freq"), **local.values}
    return (
        _rope(Fields(full_values, full.where), config, head_dim, 1_000_000.0),
        _rope(Fields(local_values, local.where), config, head_dim, 10_000.0),
    )


def _rope(rope: Fields, config: Fields, head_dim: int, theta: float) -> RopeConfig | None:
    kind = rope.text(rope.first("rope_type", "type"), "default")
    if kind not in get_args(Scaling):
        return None
    theta = rope.number("rope_theta", 1.0, MAX_THETA, theta)
    partial = rope.number("partial_rotary_factor", 1e-3, 1.0, 1.0)
    if int(head_dim * partial) < 2 or int(head_dim * partial) % 2:
        return None
    numbers: dict[str, float | list[float]] = {}
    for key in _NUMBERS[kind]:
        if rope.has(key) or key in _REQUIRED.get(kind, ()):
            numbers[key] = rope.number(key, 1e-6, MAX_FACTOR)
    context = config.integer("max_position_embeddings", 1, MAX_CONTEXT)
    if kind in ("yarn", "longrope", "llama3"):
        key = "original_max_position_embeddings"
        default = config.integer(key, 2, MAX_CONTEXT, max(context, 2))
        numbers[key] = rope.integer(key, 2, MAX_CONTEXT, default)
    if kind == "yarn":
        numbers["truncate"] = float(rope.boolean("truncate", True))
    if kind == "longrope":
        for key in ("short_factor", "long_factor"):
            numbers[key] = rope.numbers(key, 1e-6, MAX_FACTOR, int(head_dim * partial) // 2)
    if kind == "llama3" and numbers["low_freq_factor"] == numbers["high_freq_factor"]:
        raise rope.bad("high_freq_factor", "greater than low_freq_factor")
    scaling: Scaling = kind  # type: ignore[assignment]  # it was compared with the literal's members
    return RopeConfig(theta, partial, scaling, numbers or None)
