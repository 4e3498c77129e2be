"""Rotary tables and rotation against transformers' own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from model.config import RopeConfig
from model.errors import ModelError
from model.rope import RopeTable, inverse_frequencies, rotate

CPU = torch.device("cpu")
DIM, THETA, CONTEXT, ORIGINAL = 32, 50_000.0, 256, 64
LLAMA3: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LONG: dict[str, Any] = {
    "short_factor": [1.0 + i / 16 for i in range(DIM // 2)],
    "long_factor": [2.0 + i for i in range(DIM // 2)],
    "original_max_position_embeddings": ORIGINAL,
}


def theirs(kind: str, parameters: dict[str, Any], seq_len: int | None = None) -> tuple[torch.Tensor, float]:
    config = transformers.LlamaConfig(
        hidden_size=4 * DIM,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": kind, "rope_theta": THETA, **parameters},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, CPU, seq_len=seq_len)
    return frequencies, factor


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("linear", {"factor": 3.0}),
        ("llama3", LLAMA3),
        ("yarn", YARN),
        ("yarn", YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}),
        ("yarn", YARN | {"attention_factor": 0.7}),
        ("yarn", YARN | {"mscale": 0.8, "mscale_all_dim": 1.2}),
    ],
)
def test_frequencies(kind: Any, parameters: dict[str, Any]) -> None:
    ours, factor = inverse_frequencies(RopeConfig(THETA, 1.0, kind, parameters), DIM, CONTEXT)
    expected, expected_factor = theirs(kind, parameters)
    assert torch.equal(ours, expected)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


def test_default_frequencies() -> None:
    ours, factor = inverse_frequencies(RopeConfig(THETA), DIM, CONTEXT)
    assert torch.equal(ours, 1.0 / THETA ** (torch.arange(0, DIM, 2, dtype=torch.float) / DIM))
    assert factor == 1.0


def angles(table: RopeTable, positions: list[int], lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = table.rows(torch.tensor(positions), torch.tensor(lengths), torch.float32)
    return cos[:, 0], sin[:, 0]


def test_longrope_switches_with_the_length_of_the_sequence() -> None:
    table = RopeTable(RopeConfig(THETA, 1.0, "longrope", LONG), DIM, CONTEXT, CONTEXT, CPU)
    assert table.switch == ORIGINAL
    positions = [0, 63, 10, 63, 64, 200]
    cos, sin = angles(table, positions, [64, 64, 65, 65, 65, 201])
    for number, (position, length) in enumerate(zip(positions, [64, 64, 65, 65, 65, 201], strict=True)):
        frequencies, factor = theirs("longrope", LONG, seq_len=length)
        assert torch.allclose(cos[number], (position * frequencies).cos() * factor, atol=1e-6)
        assert torch.allclose(sin[number], (position * frequencies).sin() * factor, atol=1e-6)
    assert not torch.allclose(*angles(table, [60, 60], [64, 65])[0])


def test_dynamic_uses_the_base_of_a_sequence_that_ends_with_the_token() -> None:
    table = RopeTable(RopeConfig(THETA, 1.0, "dynamic", {"factor": 2.0}), DIM, CONTEXT, 2 * CONTEXT, CPU)
    for position in (0, 100, CONTEXT - 1, CONTEXT, 400, 511):
        frequencies, _ = theirs("dynamic", {"factor": 2.0}, seq_len=position + 1)
        cos, _ = angles(table, [position], [512])
        assert torch.allclose(cos[0], (position * frequencies).cos(), atol=2e-4)
    plain = RopeTable(RopeConfig(THETA), DIM, CONTEXT, CONTEXT, CPU)
    assert torch.allclose(plain.cos, table.cos[:CONTEXT], atol=1e-6)


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_rotation(partial: float) -> None:
    table = RopeTable(RopeConfig(THETA, partial), DIM, CONTEXT, CONTEXT, CPU)
    positions = torch.tensor([0, 5, 255])
    x = torch.randn(3, 6, DIM)
    cos, sin = table.rows(positions, None, torch.float32)
    full = [torch.cat([part, part], dim=-1).transpose(0, 1) for part in (cos, sin)]  # [1, 3, rotary_dim]
    rotated: Any = apply_rotary_pos_emb
    expected, _ = rotated(x.transpose(0, 1)[None], x.transpose(0, 1)[None], *full)
    assert torch.allclose(rotate(x, cos, sin), expected[0].transpose(0, 1), atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "parameters", "message"),
    [
        ("linear", None, "needs the number 'factor'"),
        ("llama3", {"factor": 8.0}, "needs the number 'low_freq_factor'"),
        ("longrope", LONG | {"long_factor": [1.0]}, "needs 'long_factor', a list of 16 numbers"),
        ("longrope", {"short_factor": LONG["short_factor"]}, "needs the number 'original_max_position_embeddings'"),
    ],
)
def test_missing_parameters(kind: Any, parameters: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        RopeTable(RopeConfig(THETA, 1.0, kind, parameters), DIM, CONTEXT, CONTEXT, CPU)
