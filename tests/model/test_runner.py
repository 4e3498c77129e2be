"""From options to a runner: the numbers it reports, the lines it prints, the mistakes it names."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpool.budget import BudgetError
from kvpool.pool import KVPool
from model.batch import Batch, Row
from model.config import ModelConfig, RopeConfig
from model.errors import ModelError
from model.kernels.build import available
from model.precision import choose_precision
from model.runner import LoadedModel, RunnerOptions, _layout, _longest, choose_attention, load_runner
from tests.loadtest import tiny
from tests.model.conftest import TINY
from tests.model.parity import GREEDY, Driver, build, expected, prompts

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runner")
    build("llama", folder)
    return folder


def load(folder: Path, lines: list[tuple[str, str]] | None = None, **options: Any) -> LoadedModel:
    def progress(stage: str, detail: str) -> None:
        if lines is not None:
            lines.append((stage, detail))

    values: dict[str, Any] = {"model": str(folder), "device": "cpu", "dtype": "float32", "kv_cache_memory": 4 * MIB}
    return load_runner(RunnerOptions(**(values | options)), progress)


def test_what_is_reported(folder: Path) -> None:
    lines: list[tuple[str, str]] = []
    loaded = load(folder, lines)
    config = loaded.model_config
    # 2 x 4 layers x 2 key heads x 32 elements x 4 bytes
    assert loaded.kv_bytes_per_token == 2 * 4 * 2 * 32 * 4
    assert loaded.num_blocks == 4 * MIB // (16 * loaded.kv_bytes_per_token)
    assert loaded.kv_bytes == loaded.runner.storage.data.nbytes <= 4 * MIB
    assert loaded.runner.storage.num_blocks == loaded.num_blocks
    assert (loaded.device, loaded.dtype, loaded.kv_cache_dtype, loaded.attention) == (
        "cpu",
        "float32",
        "float32",
        f"cpu-{available()[0]}",
    )
    assert loaded.max_model_len == config.max_position_embeddings == 512
    assert loaded.max_num_batched_tokens == 512
    assert loaded.rope_switch is None
    assert [stage for stage, _ in lines][:2] == ["weights", "weights"]
    assert {stage for stage, _ in lines} == {"weights", "kv cache", "warm-up"}
    assert all("\n" not in detail for _, detail in lines)


def test_it_generates_what_transformers_does(folder: Path) -> None:
    given = prompts(TINY["vocab_size"], (9, 33))
    driver = Driver(load(folder).runner)
    for prompt in given:
        driver.add(prompt)
    assert driver.run(16) == expected(folder, given)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_block_sizes(folder: Path, size: int) -> None:
    loaded = load(folder, block_size=size)
    (prompt,) = prompts(TINY["vocab_size"], [70])
    pool = KVPool(loaded.num_blocks, size)
    table = pool.new_table()
    assert pool.extend(table, 70, 0)
    row = Row(prompt, 70, 0, 70, table.blocks, GREEDY)
    ((token,),) = loaded.runner.execute(Batch([row])).result().tokens
    assert token == expected(folder, [prompt])[0][70]


def test_auto_holds_sixteen_bits_per_value(folder: Path) -> None:
    loaded = load(folder, dtype="auto")
    assert loaded.kv_cache_dtype == "bfloat16"
    assert loaded.kv_bytes_per_token == 2 * 4 * 2 * 32 * 2


def test_codes_take_less_and_want_heads_that_fit(tmp_path: Path) -> None:
    lines: list[tuple[str, str]] = []
    model = tiny.write(tmp_path / "tiny.gguf")
    loaded = load(model, lines, kv_cache_dtype="k8v4")
    assert loaded.kv_cache_dtype == "k8v4"
    # 2 layers x 2 key heads x (16 bytes, 8 bytes, two scales)
    assert loaded.kv_bytes_per_token == 2 * 2 * (16 + 8 + 2 * 2)
    assert ("kv cache", "k8v4: 112 bytes per token (2 layers x 2 KV heads x 16 x (8 + 4) bits, 2-byte scales)") in lines
    odd = replace(loaded.model_config, head_dim=24)
    precision = choose_precision("auto", "tq4", "bfloat16", torch.device("cpu"))
    with pytest.raises(ModelError, match=r"--kv-cache-dtype tq4: needs a head size that is a multiple of 16, not 24"):
        _layout(odd, precision, RunnerOptions(), 512)


def test_the_context_is_cut_to_the_pool_and_says_so(folder: Path) -> None:
    lines: list[tuple[str, str]] = []
    loaded = load(folder, lines, kv_cache_memory=MIB)
    assert loaded.max_model_len == (loaded.num_blocks - 1) * 16 < 512
    assert ("warning", "the kv cache holds 496 tokens of the 512 that a context may have") in lines


def test_a_context_that_was_asked_for_stays(folder: Path) -> None:
    lines: list[tuple[str, str]] = []
    assert load(folder, lines, kv_cache_memory=MIB // 2, max_model_len=400).max_model_len == 400
    assert ("warning", "the kv cache holds 240 tokens of the 400 that a context may have") in lines


def test_a_derived_budget_holds_what_the_users_can_use(folder: Path) -> None:
    loaded = load(folder, kv_cache_memory=None, max_num_seqs=2)
    assert loaded.num_blocks <= 1 + 2 * 512 // 16


def test_layers_that_slide_share_pages(tmp_path: Path) -> None:
    """Two groups of two layers, whose pages serve either; a longer context fits than where all layers keep all."""
    build("gemma2", tmp_path)
    lines: list[tuple[str, str]] = []
    loaded = load(tmp_path, lines, kv_cache_memory=MIB // 2, max_num_batched_tokens=32)
    assert loaded.windows == (None, 8)
    said = "2 of 4 layers slide: a sequence keeps the blocks of its last 8 tokens in those"
    assert ("kv cache", said) in lines
    whole = load(tmp_path, lines, kv_cache_memory=MIB // 2, one_group=True)
    assert whole.windows == (None,)
    assert "blocks hold all layers, for a tier's sake" in lines[-3][1] + lines[-2][1]
    pages = loaded.num_blocks - 1
    assert (whole.num_blocks, pages) == (loaded.num_blocks // 2, loaded.num_blocks - 1)
    assert whole.max_model_len == (whole.num_blocks - 1) * 16
    assert loaded.max_model_len == min(512, (pages - 4) * 16)
    given = prompts(TINY["vocab_size"], (9, 33))
    driver = Driver(loaded.runner)
    for prompt in given:
        driver.add(prompt)
    assert driver.run(16) == expected(tmp_path, given)
    assert load(tmp_path, max_model_len=8).windows == (None,), "nobody outgrows the window"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 513}, "--max-model-len 513: must be between 1 and the model's 512"),
        ({"quantization": "awq"}, "--quantization awq: must be int8 or int4"),
        ({"dtype": "int3"}, "--dtype int3: must be auto"),
    ],
)
def test_mistakes_in_options(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(folder, **options)


def test_a_budget_below_one_row_of_blocks(folder: Path) -> None:
    with pytest.raises(BudgetError, match="raise --kv-cache-memory"):
        load(folder, kv_cache_memory=1000)


def test_a_budget_beyond_the_machine_is_refused_before_anything_is_loaded(folder: Path) -> None:
    lines: list[tuple[str, str]] = []
    with pytest.raises(BudgetError, match="--kv-cache-memory 512 TiB is more than"):
        load(folder, lines, kv_cache_memory=2**49)
    assert "weights" not in [stage for stage, _ in lines]


def test_only_dynamic_scaling_goes_beyond_the_trained_context(folder: Path) -> None:
    config: ModelConfig = load(folder).model_config
    stretched = replace(config, rope=RopeConfig(1e4, 1.0, "dynamic", {"factor": 2.0}))
    assert _longest(stretched, None) == 512
    assert _longest(stretched, 1024) == 1024
    with pytest.raises(ModelError):
        _longest(stretched, 1025)


def test_grad_is_off(folder: Path) -> None:
    runner = load(folder).runner
    (prompt,) = prompts(TINY["vocab_size"], [10])
    runner.execute(Batch([Row(prompt, 10, 0, 10, [1], GREEDY)])).result()
    assert not runner.storage.data.requires_grad
    assert torch.is_grad_enabled()


def test_a_gpu_without_triton_is_served_in_plain_torch_and_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "model.attention.triton", None)
    lines: list[tuple[str, str]] = []
    attention = choose_attention(torch.device("cuda"), None, lambda stage, detail: lines.append((stage, detail)))
    assert attention.name == "reference"
    assert [stage for stage, _ in lines] == ["warning"]
    assert "plain torch instead" in lines[0][1]
