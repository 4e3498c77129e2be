"""What a model's files say of pooling, and that a pooled prompt does not depend on how it was cut."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from model.batch import Batch, Row
from model.embedding import EmbeddingConfig, Kind, Pooling
from model.errors import ModelError
from model.params import SamplingParams
from model.pooling import finished, pooled, read_embedding
from model.source import ModelSource, resolve
from tests.model.conftest import TINY
from tests.model.parity import build, make_runner, prompts


def read(folder: Path, files: dict[str, Any]) -> EmbeddingConfig:
    for name, content in {"config.json": {}, **files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return read_embedding(ModelSource("folder", folder, "name"), 32)


MEAN = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
LAST = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True}


@pytest.mark.parametrize(
    ("config", "kind"), [(None, "mean"), (MEAN, "mean"), (LAST, "last"), ({"pooling_mode": "lasttoken"}, "last")]
)
def test_the_kind_of_pooling(tmp_path: Path, config: Any, kind: str) -> None:
    found = read(tmp_path, {} if config is None else {"1_Pooling/config.json": config})
    assert (found.kind, found.refusal, found.sizes) == (kind, None, None)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"1_Pooling/config.json": {"pooling_mode_cls_token": True}}, "cls"),
        ({"1_Pooling/config.json": MEAN | {"pooling_mode_max_tokens": True}}, "mean and max"),
        ({"1_Pooling/config.json": {}}, "none"),
        ({"modules.json": [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]}, "Dense"),
    ],
)
def test_what_cannot_be_pooled_is_refused_later(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    """The model still loads: it may chat."""
    assert words in (read(tmp_path, files).refusal or "")


@pytest.mark.parametrize(
    "files",
    [
        {"1_Pooling/config.json": {"pooling_mode_mean_tokens": 1}},
        {"modules.json": {}},
        {"config.json": {"matryoshka_dimensions": [8, "16"]}},
    ],
)
def test_broken_files(tmp_path: Path, files: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"^[^\n]+$"):
        read(tmp_path, files)


def test_matryoshka_sizes(tmp_path: Path) -> None:
    plain, any_size, listed = (
        read(tmp_path, {"config.json": config})
        for config in ({}, {"is_matryoshka": True}, {"matryoshka_dimensions": [8, 16, 64]})
    )
    sizes = [1, 8, 9, 16, 32, 33, 64]
    assert [size for size in sizes if plain.allows(size)] == [32]
    assert [size for size in sizes if any_size.allows(size)] == [1, 8, 9, 16, 32]
    assert [size for size in sizes if listed.allows(size)] == [8, 16, 32]


def test_the_demo_model_says_nothing() -> None:
    assert read_embedding(resolve(None), 576) == EmbeddingConfig(hidden_size=576, kind="mean")


@given(st.data())
def test_a_mean_does_not_depend_on_the_cuts(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 60))
    states = np.random.default_rng(count).normal(size=(count, 5)).astype(np.float32) * 1e3
    cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=6))})
    pooling = Pooling(kind="mean", size=5)
    whole, total = pooled(states, None, pooling), None
    for begin, end in pairwise(cuts):
        total = pooled(states[begin:end], total, pooling)
    assert total is not None
    assert total.tobytes() == whole.tobytes()
    np.testing.assert_allclose(whole / count, states.astype(np.float64).mean(0))


def test_a_vector_is_cut_then_normalised() -> None:
    total = np.array([6.0, 8.0, 100.0])
    read = np.dtype("<f4")
    assert np.frombuffer(finished(total, 2, Pooling(kind="mean", size=2)) or b"", read) == pytest.approx([0.6, 0.8])
    raw = finished(total, 2, Pooling(kind="mean", size=3, normalize=False))
    assert np.frombuffer(raw or b"", read).tolist() == [3.0, 4.0, 50.0]
    assert finished(np.zeros(3), 1, Pooling(kind="last", size=3)) == bytes(12)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e39])
@pytest.mark.parametrize("normalize", [False, True])
def test_what_is_not_finite_is_no_vector(value: float, normalize: bool) -> None:
    vector = finished(np.array([1.0, value]), 1, Pooling(kind="last", size=2, normalize=normalize))
    assert (vector is None) == (not normalize or value != 1e39)


@pytest.mark.parametrize("kind", ["mean", "last"])
def test_the_runner_pools_in_chunks_and_beside_others(tmp_path: Path, kind: Kind) -> None:
    """Against the same prompt in one piece, and against transformers' states behind its last norm."""
    build("llama", tmp_path)
    runner = make_runner(tmp_path)
    mine, other = prompts(TINY["vocab_size"], [40, 9])
    params = SamplingParams(max_tokens=0, seed=0, pooling=Pooling(kind=kind, size=TINY["hidden_size"]))
    plain = SamplingParams(max_tokens=1, seed=0, temperature=0.0)

    def row(tokens: list[int], start: int, count: int, first: int, wanted: SamplingParams) -> Row:
        blocks = list(range(first, first + 3))
        return Row(tokens, len(tokens), start, count, blocks, wanted, samples=wanted is plain)

    whole = runner.execute(Batch([row(mine, 0, 40, 1, params)])).result()
    assert (whole.tokens, whole.prompt_logprobs) == ([[]], [None])
    total = None
    for start, count in ((0, 7), (7, 16), (23, 1), (24, 16)):
        part = row(mine, start, count, 4, params)
        part.pooled = total
        beside = runner.execute(Batch([row(other, 0, 9, 7, plain), part])).result()
        assert beside.tokens[0]
        assert list(beside.pooled) == [1]
        total = beside.pooled[1]
    assert total is not None
    # Plain torch computes here; our kernels give the same to the last bit (tests/e2e/test_embeddings.py).
    np.testing.assert_allclose(total, whole.pooled[0], rtol=1e-4, atol=1e-4)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        hidden = theirs(torch.tensor([mine]), output_hidden_states=True).hidden_states[-1][0].numpy()
    np.testing.assert_allclose(total, hidden.sum(0) if kind == "mean" else hidden[-1], rtol=1e-3, atol=1e-3)
