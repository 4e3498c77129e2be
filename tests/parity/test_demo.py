"""The same for the demo model: twenty prompts, 64 tokens each, against transformers' own reading of the same file.

Token by token that takes ten minutes on two slow cores, so those ways get the first prompts only, unless
OCTAVO_PARITY=full is set.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from model.runner import RunnerOptions, load_runner
from model.source import resolve
from model.tokenizer import load_tokenizer
from scheduler.messages import BeamSearch
from tests.model.parity import make_runner
from tests.parity import searched
from tests.parity.session import Answers, Prompts, Session, assert_parity

pytestmark = pytest.mark.timeout(1200)  # 1,280 tokens one by one, several times

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
SEARCH, BEAM_TOKENS = BeamSearch(width=4), 12


@dataclass(frozen=True, slots=True)
class Demo:
    """Twenty prompts, transformers' 64 greedy tokens of each, its beams of the first two, and its model as a folder."""

    asked: Prompts
    right: Answers
    beams: list[list[searched.Beam]]
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
    ends = tuple(tokenizer.eos_ids)
    beams = [found for prompt in asked[:2] for found in searched.right(module, [prompt], SEARCH, ends, BEAM_TOKENS)]
    # transformers does not save a model that it loaded from GGUF, so its weights move to a fresh one.
    config = {key: value for key, value in module.config.to_dict().items() if key != "quantization_config"}
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    plain.load_state_dict(module.state_dict())
    folder = tmp_path_factory.mktemp("demo")
    plain.save_pretrained(folder)
    return Demo(asked, right, beams, folder)


def test_the_demo_model_equals_generate(demo: Demo) -> None:
    loaded = load_runner(RunnerOptions(dtype="float32", kv_cache_memory=512 << 20))
    assert_parity(loaded.runner, demo.asked, demo.right, None if os.environ.get("OCTAVO_PARITY") == "full" else 4)
    ends = tuple(load_tokenizer(resolve(None)).eos_ids)
    searched.assert_same(searched.found(Session(loaded.runner), demo.asked[:2], SEARCH, ends, BEAM_TOKENS), demo.beams)


def test_the_demo_model_equals_generate_through_transformers(demo: Demo) -> None:
    runner = make_runner(demo.folder, native=False, num_blocks=1024)
    assert Session(runner).ask(demo.asked, TEXT_TOKENS) == demo.right
