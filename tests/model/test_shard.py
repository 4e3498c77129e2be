"""How a model is cut: every row once, heads with the keys they read, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model.config import ModelConfig, RopeConfig
from model.errors import ModelError
from model.shard import Shard, Span, check_split

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    native=True,
    vocab_size=907,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=12,
    num_kv_heads=4,
    head_dim=16,
    max_position_embeddings=512,
    norm_eps=1e-5,
    layer_types=("full", "full"),
    rope=RopeConfig(10_000.0),
)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_ranks_have_every_row_once(size: int) -> None:
    config = replace(CONFIG, num_kv_heads=12)
    check_split(config, size)
    shards = [Shard(config, rank, size) for rank in range(size)]
    for spans, whole in (
        ([shard.query for shard in shards], 12 * 16),
        ([shard.key for shard in shards], 12 * 16),
        ([shard.inner for shard in shards], 96),
        ([shard.vocab for shard in shards], 907),
    ):
        assert [row for span in spans for row in range(span.start, span.stop)] == list(range(whole))
        assert {span.whole for span in spans} == {whole}
        assert max(span.size for span in spans) == spans[0].size


@pytest.mark.parametrize(("size", "kv_heads"), [(2, 2), (4, 1), (12, 1)])
def test_a_rank_has_the_keys_that_its_queries_read(size: int, kv_heads: int) -> None:
    check_split(replace(CONFIG, intermediate_size=120), size)
    for rank in range(size):
        shard = Shard(CONFIG, rank, size)
        assert (shard.config.num_heads, shard.config.num_kv_heads) == (12 // size, kv_heads)
        queries = range(shard.query.start // 16, shard.query.stop // 16)
        keys = list(range(shard.key.start // 16, shard.key.stop // 16))
        group = shard.config.num_heads // kv_heads
        assert [query // 3 for query in queries] == [keys[place // group] for place in range(len(queries))]


def test_one_rank_has_everything() -> None:
    assert Shard(CONFIG).config == CONFIG
    assert Shard(CONFIG).vocab == Span(0, 907, 907)


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (5, {}, "does not divide the model's 12 attention heads"),
        (6, {}, "neither divides the model's 4 key heads nor is a multiple of them"),
        (4, {"intermediate_size": 90}, "does not divide the model's intermediate size of 90"),
        (4, {"vocab_size": 5}, "leaves ranks without any of the model's 5 tokens"),
        (2, {"native": False}, "LlamaForCausalLM runs through transformers' code, which is not split"),
    ],
)
def test_what_is_refused(size: int, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        check_split(replace(CONFIG, **changes), size)  # type: ignore[arg-type]
    assert str(caught.value) == f"--tensor-parallel-size {size}: {message}"
