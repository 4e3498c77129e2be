"""With drafts and without: the same tokens, in fewer steps. What the drafts are made of is the sequence's own text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model.executor import Runner
from model.runner import RunnerOptions, load_runner
from model.source import resolve
from model.tokenizer import load_tokenizer
from scheduler.messages import SamplingParams
from tests.model.parity import build, make_runner, prompts
from tests.parity.session import Prompts, Session

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 11},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "seed": 5},
    "masks": {"temperature": 1.0, "allowed_token_ids": (5, 6, 7, 8), "bad_words": ((5, 6), (7,)), "seed": 2},
}


def same(runner: Runner, asked: Prompts, count: int, n: int = 1, **kind: Any) -> None:
    params = SamplingParams(**{"max_tokens": count, "seed": 0, **kind})
    plain, drafting = Session(runner), Session(runner, guesses=8)
    right = plain.ask(asked, count, n=n, params=params)
    assert drafting.ask(asked, count, n=n, params=params) == right
    assert drafting.accepted > 0
    assert drafting.steps <= plain.steps


@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_model(kind: str, tmp_path: Path) -> None:
    """Its text is noise. A few allowed tokens make it repeat itself."""
    build("llama", tmp_path)
    runner = make_runner(tmp_path)
    asked = [prompt * 4 for prompt in prompts(128, [9, 14, 5], seed=1)]
    same(runner, asked, 60, n=2, **{"allowed_token_ids": (9, 60, 61), **KINDS[kind]})


@pytest.fixture(scope="module")
def demo() -> tuple[Runner, Prompts]:
    """Asked to say again what the prompt says."""
    text = "The river Thames rises at Thames Head in Gloucestershire and flows into the North Sea near Tilbury."
    head = "    def push(self, item):"
    code = f"{head}\n        self.items.append(item)\n\n    def pop(self):\n        return self.items.pop()"
    tokenizer = load_tokenizer(resolve(None))
    asked = [
        f"Repeat this text word by word: {text}\n\n{text}\n\n{text[:40]}",
        f"{code}\n\n{code}\n\n{head}",
    ]
    loaded = load_runner(RunnerOptions(dtype="float32", kv_cache_memory=64 << 20))
    return loaded.runner, [tokenizer.encode(ask, add_special_tokens=False) for ask in asked]


@pytest.mark.parametrize("kind", ["greedy", "sampled", "penalties"])
def test_the_demo_model(kind: str, demo: tuple[Runner, Prompts]) -> None:
    runner, asked = demo
    same(runner, asked, 32, **KINDS[kind])
