"""Rotary position embedding: frequencies of every scaling, tables, rotation.

Formulas: RoFormer (arXiv 2104.09864); linear; dynamic NTK; YaRN (2309.00071); LongRoPE (2402.13753); Llama 3.1. Names
of the parameters are config.json's.

Two scalings depend on a sequence's length. The rules here, and what `transformers` does:

* longrope has short and long factors. A sequence of more than `original_max_position_embeddings` known tokens (prompt
  and generated, whether computed or not) uses the long ones at *every* position, a shorter one the short ones. That is
  `transformers`' rule, which recomputes the whole cache when a generation crosses the boundary. The pool keeps rotated
  keys, so whoever owns the sequence must do the same: `RopeTable.switch` tells where, and cached prefixes of the
  two kinds must never be mixed.
* dynamic: position p is rotated with the base of a sequence of p + 1 tokens. `transformers` does so for tokens that are
  generated one by one, but gives a long prompt the base of its whole length; a rule on the position alone is the only
  one that chunking, preemption and prefix hits leave unchanged. Within `max_position_embeddings` both are the default.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model.config import RopeConfig
from model.errors import ModelError


class RopeTable:
    """cos and sin of every position, float32, [kinds · positions, rotary_dim / 2], kinds: 1, or 2 with `switch`."""

    __slots__ = ("cos", "length", "sin", "switch")

    def __init__(
        self, config: RopeConfig, head_dim: int, max_positions: int, length: int, device: torch.device
    ) -> None:
        """`max_positions` is the model's max_position_embeddings, `length` how many positions can be asked for.

        Raises ModelError where the scaling's parameters are missing or do not fit the head.
        """
        self.length = length
        self.switch: int | None = None
        """Longest sequence, in tokens, that uses the first kind; None: there is one kind."""
        positions = torch.arange(length, dtype=torch.float32)
        if config.scaling == "longrope":
            self.switch = int(_number(config, "original_max_position_embeddings"))
            kinds = [_longrope(config, head_dim, max_positions, name) for name in ("short_factor", "long_factor")]
            angles = torch.cat([torch.outer(positions, frequencies) for frequencies, _ in kinds])
            attention_factor = kinds[0][1]
        elif config.scaling == "dynamic":
            angles = positions[:, None] * _dynamic(config, head_dim, max_positions, length)
            attention_factor = 1.0
        else:
            frequencies, attention_factor = inverse_frequencies(config, head_dim, max_positions)
            angles = torch.outer(positions, frequencies)
        self.cos = (angles.cos() * attention_factor).to(device)
        self.sin = (angles.sin() * attention_factor).to(device)

    def places(self, positions: Tensor, lengths: Tensor | None) -> Tensor:
        """The rows of the table that tokens at `positions` [tokens] int64 have.

        `lengths` [tokens] int64, known tokens of each token's sequence, is read only where `switch` is set.
        """
        if self.switch is None:
            return positions
        assert lengths is not None
        return positions + (lengths > self.switch) * self.length

    def rows(self, positions: Tensor, lengths: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each [tokens, 1, rotary_dim / 2], of the tokens that `places` takes."""
        places = self.places(positions, lengths)
        cos, sin = self.cos.index_select(0, places), self.sin.index_select(0, places)
        return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [tokens, heads, head_dim]: element i with element i + rotary_dim / 2; the rest of the head stays."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if x.shape[-1] > 2 * half:
        parts.append(x[..., 2 * half :])
    return torch.cat(parts, dim=-1)


def inverse_frequencies(config: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Frequencies [rotary_dim / 2] float32 and the factor of cos and sin, for scalings that know no sequence length."""
    frequencies = _default(config.theta, _rotary_dim(config, head_dim))
    match config.scaling:
        case "default":
            return frequencies, 1.0
        case "linear":
            return frequencies / _number(config, "factor"), 1.0
        case "llama3":
            return _llama3(config, frequencies), 1.0
        case "yarn":
            return _yarn(config, head_dim, max_positions)
    raise ModelError(f"rope scaling {config.scaling!r} depends on the length of the sequence")


def _rotary_dim(config: RopeConfig, head_dim: int) -> int:
    return int(head_dim * config.partial_factor)


def _default(theta: float, dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _number(config: RopeConfig, name: str, default: float | None = None) -> float:
    value = (config.parameters or {}).get(name, default)
    if isinstance(value, list) or value is None:
        raise ModelError(f"rope scaling {config.scaling!r} needs the number {name!r}")
    return float(value)


def _optional(config: RopeConfig, name: str) -> float | None:
    value = (config.parameters or {}).get(name)
    return float(value) if isinstance(value, int | float) else None


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    factor, low, high = (_number(config, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = _number(config, "original_max_position_embeddings")
    wavelengths = 2 * math.pi / frequencies
    slow = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * slow / factor + smooth * slow
    medium = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(medium, blended, slow)


def _yarn(config: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    dim, theta = _rotary_dim(config, head_dim), config.theta
    original = _number(config, "original_max_position_embeddings", max_positions)
    factor = _optional(config, "factor") or max_positions / original
    attention_factor = _optional(config, "attention_factor")
    if attention_factor is None:
        mscale, mscale_all = _optional(config, "mscale"), _optional(config, "mscale_all_dim")
        if mscale and mscale_all:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all)
        else:
            attention_factor = _mscale(factor, 1.0)

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(_optional(config, "beta_fast") or 32), dimension(_optional(config, "beta_slow") or 1)
    if (config.parameters or {}).get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    wavelengths = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    extrapolated, interpolated = 1.0 / wavelengths, 1.0 / (factor * wavelengths)
    return interpolated * ramp + extrapolated * (1 - ramp), attention_factor


def _mscale(scale: float, mscale: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _longrope(config: RopeConfig, head_dim: int, max_positions: int, name: str) -> tuple[Tensor, float]:
    dim = _rotary_dim(config, head_dim)
    factors = (config.parameters or {}).get(name)
    if not isinstance(factors, list) or len(factors) != dim // 2:
        raise ModelError(f"rope scaling 'longrope' needs {name!r}, a list of {dim // 2} numbers")
    original = _number(config, "original_max_position_embeddings")
    factor = _optional(config, "factor") or max_positions / original
    attention_factor = _optional(config, "attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    shape = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * config.theta**shape), attention_factor


def _dynamic(config: RopeConfig, head_dim: int, max_positions: int, length: int) -> Tensor:
    """Frequencies [length, rotary_dim / 2], one row per position."""
    dim, factor = _rotary_dim(config, head_dim), _number(config, "factor")
    sequence = torch.arange(1, length + 1, dtype=torch.float64).clamp(min=max_positions)
    bases = config.theta * (factor * sequence / max_positions - (factor - 1)) ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / (bases.float()[:, None] ** exponents)
