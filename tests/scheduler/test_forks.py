"""What n > 1 costs: one prompt's tokens before the first token, and few blocks. And what the pool wastes. Counted."""

from __future__ import annotations

import random

from kvpool.pool import KVPool
from model.batch import Batch, StepResult
from model.params import SamplingParams
from scheduler.engine import Engine
from scheduler.limits import Limits
from scheduler.messages import Submit
from tests.scheduler.conftest import Done

SIZE = 16
PROMPT = 1000


class Parrot:
    """A runner that says the same token for ever, to save time."""

    def execute(self, batch: Batch) -> Done:
        nothing: list[list[int]] = [[] for _ in batch.rows]
        drawn = [[5] if row.samples else [] for row in batch.rows]
        return Done(StepResult(drawn, [[] for _ in nothing], [None] * len(nothing)))


def engine(blocks: int, seqs: int) -> Engine:
    limits = Limits(max_num_seqs=seqs, max_num_batched_tokens=512, max_model_len=4000)
    return Engine(KVPool(blocks + 1, SIZE), Parrot(), limits, lambda: 0.0)


def generate(n: int, output: int) -> tuple[int, int]:
    """Of one request: prompt tokens computed up to the first token, and the most blocks that were active."""
    it = engine(1000, 8)
    params = SamplingParams(max_tokens=output, seed=0, temperature=0.0)
    out = it.step([Submit(id=1, prompt_ids=list(range(PROMPT)), params=params, n=n)])
    while not out.ids:
        out = it.step()
    computed, most = out.stats.computed_tokens, out.stats.blocks_active
    while it.has_work:
        out = it.step()
        it.check()
        most = max(most, out.stats.blocks_active)
    assert out.stats.blocks_active == 0
    return computed, most


def test_eight_answers_to_a_long_prompt() -> None:
    one, blocks = generate(1, 24)
    eight, more = generate(8, 24)
    assert one == eight == PROMPT
    assert blocks == (PROMPT + 24) // SIZE
    assert more == PROMPT // SIZE + 8 * 2 < 1.25 * blocks


def test_waste_at_64_streams() -> None:
    """Slots of active blocks that hold no token: at most the rest of each stream's last block, half of it as a rule."""
    rng = random.Random(0)
    it = engine(64 * 100, 64)
    params = SamplingParams(max_tokens=200, seed=0, temperature=0.0)
    prompts = [[number, *range(rng.randint(600, 1200))] for number in range(64)]
    out = it.step([Submit(id=number, prompt_ids=prompt, params=params) for number, prompt in enumerate(prompts)])
    wastes: list[float] = []
    while it.has_work:
        out = it.step()
        if out.stats.step_rows == 64:
            wastes.append(1 - out.stats.tokens_active / (out.stats.blocks_active * SIZE))
    assert len(wastes) > 60
    assert max(wastes) < 0.02
    assert sum(wastes) / len(wastes) < 0.01
