"""A model whose layers all slide, in a pool that takes early blocks back: transformers' tokens, to the last one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvpool.pool import BlockTable, KVPool
from model.config_reader import read_config
from model.source import ModelSource
from tests.model.parity import Driver, build, expected, make_runner, prompts


class Sliding(KVPool):
    """Gives back as it commits, as the engine does."""

    def commit(self, table: BlockTable, tokens: Sequence[int], num_computed: int, salt: bytes) -> None:
        super().commit(table, tokens, num_computed, salt)
        self.slide(table, num_computed)


@pytest.mark.parametrize("compiled", [True, False])
def test_tokens_are_those_of_transformers(tmp_path: Path, compiled: bool) -> None:
    build("mistral", tmp_path)
    config = read_config(ModelSource("folder", tmp_path, "tiny"))
    assert config.window == config.sliding_window == 32
    asked = prompts(config.vocab_size, (150, 40, 7, 129))
    driver = Driver(make_runner(tmp_path, compiled=compiled, num_blocks=40))
    driver.pool = Sliding(40, 16, window=config.window)
    for prompt in asked:
        driver.add(prompt)
    for _ in range(12):
        driver.step(16)
    assert driver.pool.usage().active <= 4 * driver.pool.most_held + 4, "a chunk and a window each"
    driver.pool.check([track.table for track in driver.tracks])
    assert driver.run(16) == expected(tmp_path, asked)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "llama"])
def test_where_some_layer_sees_all_there_is_no_window(tmp_path: Path, family: str) -> None:
    build(family, tmp_path)
    assert read_config(ModelSource("folder", tmp_path, "tiny")).window is None
