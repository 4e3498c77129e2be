"""The arithmetic of `octavo plan`, with the worked numbers of the project's first texts."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from kvpool.budget import GIB, BudgetError, given_budget
from kvpool.formats import FORMATS
from model.config import ModelConfig
from model.config_reader import config_from_json
from model.plan import CapacityPlan, plan_capacity


def llama(**changes: Any) -> ModelConfig:
    """Llama 3.1 8B."""
    return config_from_json(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "vocab_size": 128256,
        }
        | changes
    )


def rows(plan: CapacityPlan) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in plan.table()[1:]}


def test_ten_users_of_the_seeds_need_five_gigabytes_and_a_block_of_padding() -> None:
    budget = given_budget(5 * GIB + 16 * 131_072)
    plan = plan_capacity(llama(), budget, lengths=[4096])
    assert rows(plan)["bfloat16"] == ["131,072", "2", "MiB", "2,560", "40,960", "1.00", "10"]
    assert rows(plan)["float32"][0] == "262,144"
    assert rows(plan)["float32"][-2:] == ["0.50", "4"]


def test_without_shared_heads_a_quarter_of_the_users_fit() -> None:
    """Llama 2 7B's half a megabyte a token."""
    plan = plan_capacity(llama(num_key_value_heads=32), given_budget(16 * GIB + 16 * 524_288), lengths=[4096])
    assert rows(plan)["float16"] == ["524,288", "8", "MiB", "2,048", "32,768", "1.00", "8"]


def test_every_format_has_its_line_the_largest_first() -> None:
    plan = plan_capacity(llama(), given_budget(GIB))
    assert {pool.layout.format.name for pool in plan.pools} == set(FORMATS)
    sizes = [pool.layout.bytes_per_token for pool in plan.pools]
    assert sizes == sorted(sizes, reverse=True)
    assert plan.lengths == (1024, 4096, 131_072)
    assert len({len(line) for line in plan.table()}) == 1


def test_the_picture_is_sound_and_its_bars_are_to_scale() -> None:
    plan = plan_capacity(llama(), given_budget(4 * GIB))
    root = ElementTree.fromstring(plan.picture("<Llama> & co"))
    _, *rects = root.iter("{http://www.w3.org/2000/svg}rect")
    bars = [float(rect.get("width", "0")) for rect in rects]
    tokens = [pool.num_tokens for pool in plan.pools]
    assert bars == pytest.approx([bars[-1] * count / tokens[-1] for count in tokens], rel=0.01)
    assert "<Llama> & co" in "".join(root.itertext())


@pytest.mark.parametrize("length", [0, 131_073])
def test_a_length_that_the_model_cannot_have(length: int) -> None:
    with pytest.raises(ValueError, match=f"{length} tokens: must be between 1 and the model's 131072"):
        plan_capacity(llama(), given_budget(GIB), lengths=[length])


def test_a_budget_of_no_block_is_refused() -> None:
    with pytest.raises(BudgetError, match="raise --kv-cache-memory"):
        plan_capacity(llama(), given_budget(1000))


GEMMA3_270M = {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "vocab_size": 262144,
}


def test_layers_that_slide_keep_their_window() -> None:
    """Six groups of three layers: a user of n tokens has n / 16 pages in one, and a window and a block in five."""
    config = config_from_json(GEMMA3_270M)
    plan = plan_capacity(config, given_budget(4 * GIB), lengths=[256, 4096, 32768])
    page = 16 * 3 * 2 * 256 * 2
    pages = 4 * GIB // page - 1
    assert plan.title.endswith("blocks of 16 tokens in 3 layers, 6 for all")
    assert rows(plan)["bfloat16"] == [
        "18,432",
        "48",
        "KiB",
        f"{pages:,}",
        f"{pages // 6 * 16:,}",
        "1.00",
        *(f"{pages // need:,}" for need in (6 * 16, 256 + 5 * 33, 2048 + 5 * 33)),
    ]
    whole = plan_capacity(
        config_from_json(GEMMA3_270M | {"sliding_window": 32768}), given_budget(4 * GIB), lengths=[32768]
    )
    assert (plan.users(plan.pools[1])[-1], whole.users(whole.pools[1])[-1]) == (39, 7)
