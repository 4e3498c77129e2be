"""Greedy generation by the whole engine, in every way there is to come to the same tokens."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest

from kvpool.pool import KVPool
from model.executor import Runner
from scheduler.engine import Engine
from scheduler.limits import Limits
from scheduler.messages import FinishReason, SamplingParams, Submit

BLOCK = 16
Prompts = list[list[int]]
Answers = list[list[int]]


class Session:
    """One engine over a runner; `ask` runs requests to their end and keeps the engine for the next ones."""

    def __init__(
        self, runner: Runner, *, blocks: int = 0, chunk: int = 512, seqs: int = 32, guesses: int = 0, depth: int = 0
    ) -> None:
        """`guesses`: tokens of a draft at most. `depth`: the engine's."""
        storage_blocks = runner.storage.num_blocks
        switch = runner.model.rope_switch
        limits = Limits(
            max_num_seqs=seqs,
            max_num_batched_tokens=chunk,
            max_model_len=512,
            rope_switch=switch,
            num_speculative_tokens=guesses,
        )
        pool = KVPool(blocks or storage_blocks, BLOCK, windows=runner.storage.groups.windows)
        self.paging = pool.paging
        self.engine = Engine(pool, runner, limits, time.monotonic, depth=depth)
        self.ids = itertools.count()
        self.preemptions = 0
        self.steps = 0
        self.accepted = 0
        """Tokens of drafts that were right."""
        self.cached: list[int] = []
        """Prompt tokens that came from the prefix cache, by request."""

    def ask(self, requests: Prompts, new_tokens: int, *, n: int = 1, params: SamplingParams | None = None) -> Answers:
        """Tokens of each request, greedy without `params`; with n > 1 those of its sequences one after the other."""
        params = params or SamplingParams(max_tokens=new_tokens, seed=0, temperature=0.0)
        numbers = {next(self.ids): place for place, _ in enumerate(requests)}
        inbox = [Submit(id=i, prompt_ids=requests[place], params=params, n=n) for i, place in numbers.items()]
        self.cached += [0] * len(requests)
        answers: Answers = [[] for _ in range(n * len(requests))]
        while inbox or self.engine.has_work:
            out = self.engine.step(inbox)
            self.engine.check()
            inbox = []
            self.preemptions = out.stats.preemptions
            self.steps = out.stats.steps
            self.accepted = out.stats.accepted_tokens
            for started in out.started:
                self.cached[started.id] = started.cached_tokens
            for i, index, token, finish in zip(out.ids, out.indices, out.tokens, out.finishes, strict=True):
                assert finish in (FinishReason.RUNNING, FinishReason.LENGTH), out.errors
                if token >= 0:
                    answers[numbers[i] * n + index].append(token)
        assert out.stats.blocks_active == 0
        return answers


def knowing_drafter(asked: Prompts, right: Answers) -> type:
    """Drafters that know the answers, and are wrong somewhere in most of their drafts."""

    class Knowing:
        def __init__(self, tokens: list[int]) -> None:
            self.tokens = tokens
            self.prompt_len, self.answer = next(
                (len(p), answer) for p, answer in zip(asked, right, strict=True) if tokens[: len(p)] == p
            )

        def draft(self, price: float, most: int) -> list[int]:
            begin = len(self.tokens) - self.prompt_len
            guesses = self.answer[begin : begin + most]
            spoiled = len(self.tokens) % (most + 2)
            if spoiled < len(guesses):
                guesses[spoiled] = (guesses[spoiled] + 1) % 128
            return guesses

        def learn(self, drafted: int, accepted: int) -> None:
            pass

    return Knowing


def each(one: Prompts, answers: Callable[[list[int]], Answers]) -> Answers:
    return [answer for prompt in one for answer in answers(prompt)]


def assert_parity(runner: Runner, asked: Prompts, right: Answers, slowly: int | None = None) -> None:
    """All the ways there are to compute the same tokens. `asked` has prompts of more than three blocks.

    slowly: how many of the requests are computed token by token too; None: all.
    """
    new = len(right[0])
    few = asked[:slowly]
    assert each(few, lambda prompt: Session(runner).ask([prompt], new)) == right[:slowly], "alone"
    assert Session(runner, chunk=1).ask(few, new) == right[:slowly], "token by token"
    assert Session(runner).ask(asked, new) == right, "together"
    for chunk in (7, 64):
        assert Session(runner, chunk=chunk).ask(asked, new) == right, f"chunks of {chunk}"

    # Enough blocks for the longest and a little more. Answers of one token teach the engine to expect short ones, so
    # that it admits more than fit and the sequences push one another out.
    longest = max(map(len, asked)) + new
    paging = Session(runner).paging
    small = Session(runner, blocks=paging.pages(longest, 64) + 3, chunk=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scheduler.estimate.MIN_REMAINING", 1)
        small.ask(asked * 3, 1)
        assert small.ask(asked, new) == right, "preempted"
    assert small.preemptions > 0 or None not in paging.windows, "what a window will hold is known"

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

    knowing = knowing_drafter(asked, right)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scheduler.speculation.Drafter", knowing)
        drafting = Session(runner, guesses=5)
        assert drafting.ask(asked, new) == right, "with drafts"
        assert drafting.accepted > new

    twins = [answer for answer in right for _ in range(2)]
    assert Session(runner).ask(asked, new, n=2) == twins, "forked"
