"""The definition of correct: in float32 the engine's greedy tokens are those of transformers' `generate`.

For the demo model and a tiny model of every family, whatever the engine does on the way: requests alone or together,
chunks of any size, preemption, prefix hits, forks; and the same through transformers' own modelling code.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvpool.pool import KVPool
from model.executor import Runner
from model.runner import RunnerOptions, load_runner
from model.source import resolve
from model.tokenizer import load_tokenizer
from scheduler.engine import Engine
from scheduler.limits import Limits
from scheduler.messages import FinishReason, SamplingParams, Submit
from tests.model.conftest import FAMILIES
from tests.model.parity import NEW_TOKENS, build, expected, make_runner, prompts

BLOCK = 16
Prompts = list[list[int]]
Answers = list[list[int]]


class Session:
    """One engine over a runner; `ask` runs requests to their end and keeps the engine for the next ones."""

    def __init__(self, runner: Runner, *, blocks: int = 0, chunk: int = 512, seqs: int = 32) -> None:
        storage_blocks = runner.storage.data.shape[2]
        switch = runner.model.rope_switch
        limits = Limits(max_num_seqs=seqs, max_num_batched_tokens=chunk, max_model_len=512, rope_switch=switch)
        self.engine = Engine(KVPool(blocks or storage_blocks, BLOCK), runner, limits, time.monotonic)
        self.ids = itertools.count()
        self.preemptions = 0
        self.cached: list[int] = []
        """Prompt tokens that came from the prefix cache, by request."""

    def ask(self, requests: Prompts, new_tokens: int, *, n: int = 1) -> Answers:
        """Greedy tokens of each request; with n > 1 those of its sequences one after the other."""
        params = SamplingParams(max_tokens=new_tokens, seed=0, temperature=0.0)
        numbers = {next(self.ids): place for place, _ in enumerate(requests)}
        inbox = [Submit(id=i, prompt_ids=requests[place], params=params, n=n) for i, place in numbers.items()]
        self.cached += [0] * len(requests)
        answers: Answers = [[] for _ in range(n * len(requests))]
        while inbox or self.engine.has_work:
            out = self.engine.step(inbox)
            self.engine.check()
            inbox = []
            self.preemptions = out.stats.preemptions
            for started in out.started:
                self.cached[started.id] = started.cached_tokens
            for i, index, token, finish in zip(out.ids, out.indices, out.tokens, out.finishes, strict=True):
                assert finish in (FinishReason.RUNNING, FinishReason.LENGTH), out.errors
                if token >= 0:
                    answers[numbers[i] * n + index].append(token)
        assert out.stats.blocks_active == 0
        return answers


def each(one: Prompts, answers: Callable[[list[int]], Answers]) -> Answers:
    return [answer for prompt in one for answer in answers(prompt)]


def assert_parity(runner: Runner, asked: Prompts, right: Answers) -> None:
    """All the ways there are to compute the same tokens. `asked` has prompts of more than three blocks."""
    new = len(right[0])
    assert each(asked, lambda prompt: Session(runner).ask([prompt], new)) == right, "alone"
    assert Session(runner).ask(asked, new) == right, "together"
    for chunk in (1, 7, 64):
        assert Session(runner, chunk=chunk).ask(asked, new) == right, f"chunks of {chunk}"

    # Enough blocks for the longest and a little more. Answers of one token teach the engine to expect short ones, so
    # that it admits more than fit and the sequences push one another out.
    longest = max(map(len, asked)) + new
    small = Session(runner, blocks=longest // BLOCK + 4, chunk=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scheduler.estimate.MIN_REMAINING", 1)
        small.ask(asked * 3, 1)
        assert small.ask(asked, new) == right, "preempted"
    assert small.preemptions > 0

    session = Session(runner)
    session.ask(asked, new)
    assert session.ask(asked, new) == right, "full prefix hit"
    hits = session.cached[len(asked) :]
    assert hits == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in asked]

    half = [prompt[: len(prompt) // 2] for prompt in asked]
    session = Session(runner)
    session.ask(half, 1)
    assert session.ask(asked, new) == right, "partial prefix hit"
    hits = session.cached[len(asked) :]
    assert any(0 < hit < (len(prompt) - 1) // BLOCK * BLOCK for hit, prompt in zip(hits, asked, strict=True))

    twins = [answer for answer in right for _ in range(2)]
    assert Session(runner).ask(asked, new, n=2) == twins, "forked"


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("native", [True, False], ids=["native", "transformers"])
def test_every_family_equals_generate(family: str, native: bool, tmp_path: Path) -> None:
    build(family, tmp_path)
    asked = prompts(128, [5, 33, 50, 64, 79], seed=3)
    right = [tokens[len(prompt) :] for prompt, tokens in zip(asked, expected(tmp_path, asked), strict=True)]
    assert len({tuple(answer) for answer in right}) > 1
    assert len(right[0]) == NEW_TOKENS
    assert_parity(make_runner(tmp_path, native=native), asked, right)


TEXTS = [
    "The capital of France is",
    "Once upon a time, in a land far away,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "1, 2, 3, 4, 5, 6, 7, 8, 9,",
    "Water boils at a temperature of",
    "The three primary colours are red,",
    "Dear Sir or Madam,\n\nI am writing to you because",
    "To make a cup of tea, first",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nName a fruit.<|im_end|>\n<|im_start|>assistant\n",
    "import numpy as np\n\n# The mean of an array\n",
    "Q: What is 12 times 12?\nA:",
    "The mitochondrion is the powerhouse of the cell. It",
    "In 1969, the first human being walked on the Moon. " * 3,
    "The quick brown fox jumps over the lazy dog. " * 8 + "Then the dog",
    "Le chat est sur la table. The cat is",
    '{"name": "Alice", "age": 30, "city":',
    "The river runs past the old mill and the quiet town. " * 6,
    "Photosynthesis is the process by which plants",
    "My favourite book is",
]
TEXT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Demo:
    """Twenty prompts, transformers' 64 greedy tokens of each, and its model saved as a folder."""

    asked: Prompts
    right: Answers
    folder: Path


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """From transformers' own reading of the file that we read."""
    source = resolve(None)
    tokenizer = load_tokenizer(source)
    asked = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(
        source.path.parent, gguf_file=source.path.name, dtype=torch.float32
    )
    module.generation_config.eos_token_id = None
    right = []
    for prompt in asked:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = module.generate(ids, attention_mask=mask, max_new_tokens=TEXT_TOKENS, do_sample=False, pad_token_id=0)
        right.append(out[0, len(prompt) :].tolist())
    # transformers does not save a model that it loaded from GGUF, so its weights move to a fresh one.
    config = {key: value for key, value in module.config.to_dict().items() if key != "quantization_config"}
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    plain.load_state_dict(module.state_dict())
    folder = tmp_path_factory.mktemp("demo")
    plain.save_pretrained(folder)
    return Demo(asked, right, folder)


def test_the_demo_model_equals_generate(demo: Demo) -> None:
    loaded = load_runner(RunnerOptions(dtype="float32", kv_cache_memory=512 << 20))
    assert_parity(loaded.runner, demo.asked, demo.right)


def test_the_demo_model_equals_generate_through_transformers(demo: Demo) -> None:
    assert_parity(make_runner(demo.folder, native=False, num_blocks=1024), demo.asked, demo.right)
