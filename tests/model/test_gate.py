"""The gate: a sound model's formats pass; one whose scores four bits cannot hold is refused, and starts when forced."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from model.errors import ModelError
from model.gate import LEAST_AGREEMENT, MOST_DIVERGENCE, Distance, divergence
from model.runner import LoadedModel, RunnerOptions, load_runner
from tests.loadtest import tiny

Lines = list[tuple[str, str]]


def load(model: Path, kv: str, lines: Lines, *, force: bool = False) -> LoadedModel:
    return load_runner(
        RunnerOptions(
            model=str(model), device="cpu", kv_cache_dtype=kv, force_kv_cache_dtype=force, kv_cache_memory=1 << 20
        ),
        lambda stage, detail: lines.append((stage, detail)),
    )


def sharpened(name: str, tensor: tiny.Array) -> tiny.Array:
    """Scores so large that an error of a percent in them changes what is attended to, and nothing but that matters."""
    factors = {"q_proj": 30.0, "k_proj": 30.0, "o_proj": 10.0}
    return tensor * next((factor for part, factor in factors.items() if part in name), 1.0)


def test_kl_is_that_of_the_definition() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]]).log()
    q = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.0, 1.0, 0.0, 0.0]]).log()
    assert divergence(p, q).tolist() == pytest.approx([0.5 * math.log(2), math.inf])
    assert divergence(p, p).tolist() == [0.0, 0.0]
    assert divergence(p, q * torch.nan).isnan().all()


@pytest.mark.parametrize(
    ("divergence", "agreement", "passes"),
    [
        (MOST_DIVERGENCE, LEAST_AGREEMENT, True),
        (MOST_DIVERGENCE + 1e-3, 1.0, False),
        (0.0, LEAST_AGREEMENT - 1e-3, False),
        (math.nan, 1.0, False),
    ],
)
def test_both_figures_count(divergence: float, agreement: float, passes: bool) -> None:
    assert Distance(divergence, agreement).passes is passes


def test_every_format_passes_on_a_sound_model(tmp_path: Path) -> None:
    model, found = tiny.write(tmp_path / "tiny.gguf"), []
    for kv in ("int8", "k8v4", "tq4"):
        lines: Lines = []
        distance = load(model, kv, lines).kv_distance
        assert distance is not None
        found.append(distance.divergence)
        assert ("kv cache", f"{kv} beside 16 bits: {distance}") in lines
    assert 0 < found[0] < min(found[1:]) <= max(found) < 0.05
    lines = []
    assert load(model, "bfloat16", lines).kv_distance is None
    assert "16 bits" not in str(lines)


def test_a_format_that_breaks_a_model_is_refused_unless_forced(tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "sharp.gguf", sharpened)
    lines: Lines = []
    with pytest.raises(ModelError) as caught:
        load(model, "tq4", lines)
    message = str(caught.value)
    assert message.startswith("--kv-cache-dtype tq4 moves this model too far from 16-bit keys and values: KL ")
    assert "greedy agreement" in message
    assert message.endswith("; --force-kv-cache-dtype serves it all the same")
    assert "\n" not in message
    distance = load(model, "tq4", lines, force=True).kv_distance
    assert distance is not None
    assert not distance.passes
    ((_, warning),) = [line for line in lines if line[0] == "warning" and "too far" in line[1]]
    assert message.startswith(warning)
