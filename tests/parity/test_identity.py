"""In fewer bits than 32 there is no right answer to compare with, but there is one answer: the same alone, in a batch
of 32, in chunks of any size, and with drafts."""

from __future__ import annotations

from typing import Any

import pytest

from model.kernels.loaded import load_kernels
from model.runner import RunnerOptions, load_runner
from model.source import resolve
from model.tokenizer import load_tokenizer
from scheduler.messages import SamplingParams
from tests.parity.session import Session
from tests.parity.test_demo import TEXTS

NEW = 24
ALONE = range(0, 32, 5)
"""Those of the 32 that are asked alone too."""


@pytest.mark.parametrize(
    ("quantization", "kv"), [(None, "bfloat16"), ("int8", "int8"), ("int4", "bfloat16"), (None, "tq4")]
)
def test_a_request_gets_one_answer(quantization: str | None, kv: str) -> None:
    if load_kernels() is None:
        pytest.skip("plain torch sums one row and several in different orders")
    loaded = load_runner(RunnerOptions(kv_cache_memory=128 << 20, quantization=quantization, kv_cache_dtype=kv))
    assert (loaded.dtype, loaded.kv_cache_dtype) == ("bfloat16", kv)
    tokenizer = load_tokenizer(resolve(None))
    texts = [*TEXTS, *(f"Chapter {number}. {text}" for number, text in enumerate(TEXTS[:12]))]
    asked = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95}]
    for kind in kinds:
        params = SamplingParams(max_tokens=NEW, seed=3, **kind)
        together = Session(loaded.runner, guesses=8)
        answers = together.ask(asked, NEW, params=params)
        assert together.accepted > 0
        assert Session(loaded.runner, chunk=40).ask(asked, NEW, params=params) == answers
        for place in ALONE:
            assert Session(loaded.runner).ask([asked[place]], NEW, params=params) == [answers[place]]
