"""The definition of correct: in float32 the engine's greedy tokens are those of transformers' `generate`.

For a tiny model of every family, whatever the engine does on the way: requests alone or together, chunks of any size,
preemption, prefix hits, forks; with the compiled kernels, in plain torch, and through transformers' own modelling code.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.conftest import FAMILIES
from tests.model.parity import NEW_TOKENS, build, expected, make_runner, prompts
from tests.parity.session import assert_parity


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("way", ["kernels", "torch", "transformers"])
def test_every_family_equals_generate(family: str, way: str, tmp_path: Path) -> None:
    build(family, tmp_path)
    asked = prompts(128, [5, 33, 50, 64, 79], seed=3)
    right = [tokens[len(prompt) :] for prompt, tokens in zip(asked, expected(tmp_path, asked), strict=True)]
    assert len({tuple(answer) for answer in right}) > 1
    assert len(right[0]) == NEW_TOKENS
    runner = make_runner(tmp_path, native=way != "transformers", compiled=way != "torch", grouped=True)
    assert_parity(runner, asked, right)
