"""Models whose layers slide, in a pool that takes early blocks back: transformers' tokens, to the last one."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.config_reader import read_config
from model.source import ModelSource
from tests.model.parity import Driver, build, expected, make_runner, prompts


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("family", "groups"), [("mistral", 1), ("qwen2", 2), ("gemma2", 2), ("gemma3", 4)])
def test_tokens_are_those_of_transformers(tmp_path: Path, family: str, groups: int, compiled: bool) -> None:
    """Forks, a prefix that is found, chunks; prompts many times as long as the window."""
    layer_types = {"layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]}
    build(family, tmp_path, **(layer_types if family == "gemma3" else {}))
    config = read_config(ModelSource("folder", tmp_path, "tiny"))
    asked = prompts(config.vocab_size, (150, 40, 7, 129))
    driver = Driver(make_runner(tmp_path, compiled=compiled, num_blocks=48, grouped=True))
    pool = driver.pool
    assert len(pool.windows) == groups
    assert set(pool.windows) == set(config.windows)
    for prompt in asked:
        driver.add(prompt)
    for _ in range(12):
        driver.step(16)
    most = sum(pool.paging.pages(len(track.tokens), 16) for track in driver.tracks)
    assert pool.usage().active <= most, "of what slides a window and a chunk each"
    driver.fork(driver.tracks[0])
    driver.add(asked[0], cached=True)
    assert driver.tracks[-1].computed == 144
    pool.check([track.table for track in driver.tracks])
    right = expected(tmp_path, asked)
    assert driver.run(16) == [*right, right[0], right[0]]
    assert pool.usage().active == 0


def test_kinds_that_share_pages(tmp_path: Path) -> None:
    """A window that no sequence outgrows is none."""
    build("gemma2", tmp_path)
    config = read_config(ModelSource("folder", tmp_path, "tiny"))
    assert config.windows == (8, None, 8, None)
    assert config.outgrown(9) == config.windows
    assert config.outgrown(8) == (None,) * 4
