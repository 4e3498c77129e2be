"""What a rank that is not the first does with a step: its part of the forward pass, and nothing of what follows.

Rank 0 alone has the logits, so it draws, asks the grammars, and pools; the others are told what came of it.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, wait

import torch
from llguidance import LLMatcher
from torch import Tensor

from model.batch import Row, StepResult
from model.executor import PROMPT_ROWS, Draws, Runner
from model.grammar import Grammars, Mask, Matcher
from model.inputs import draws


class FollowingRunner(Runner):
    """A Runner whose results are empty."""

    def _ahead(self, logits: Tensor, places: list[Row]) -> None:
        return None

    def _collect(
        self,
        rows: list[Row],
        drawing: Draws | None,
        prompts: dict[int, tuple[Tensor, list[int]]],
        states: dict[int, Tensor],
    ) -> StepResult:
        with torch.inference_mode():
            for hidden, following in prompts.values():
                for begin in range(0, len(following), PROMPT_ROWS):
                    self.model.logits(hidden[begin : begin + PROMPT_ROWS])
        return StepResult([[] for _ in rows], [[] for _ in rows], [None] * len(rows))


def joined(rows: list[Row]) -> tuple[list[int], list[int]]:
    """Of how many positions at a time a step with these rows asks for the logits: to draw, and for logprobs of prompts.
    See `Decoder.abstain`."""
    drawing = sum(1 + len(row.draft) for row in rows if draws(row))
    asked: list[int] = []
    for row in rows:
        if row.params.prompt_logprobs is not None:
            count = min(row.start + row.count, row.prompt_len - 1) - row.start
            asked += [min(PROMPT_ROWS, count - begin) for begin in range(0, count, PROMPT_ROWS)]
    return [drawing] if drawing else [], asked


class RankedMatcher(Matcher):
    """Says the same on every rank. Only rank 0 makes masks, so only what these take counts against the allowance, and
    what comes of that is in the step's result."""

    __slots__ = ()

    def fill(self, masks: Mask, draft: list[int]) -> bool:
        began = time.thread_time()
        super().fill(masks, draft)
        super()._charge(began)
        return self.error is None

    def _charge(self, began: float) -> None:
        """Elsewhere clocks would decide."""


class RankedGrammars(Grammars):
    """Grammars whose compilation is waited for: that of another rank may take longer, and all must go on together."""

    def compile(self, text: str) -> Future[LLMatcher]:
        compiled = super().compile(text)
        wait([compiled])
        return compiled

    def matcher(self, compiled: LLMatcher, prompt_len: int, stops: tuple[int, ...]) -> Matcher:
        base = self._base.result()
        closed = [token for token in base.ends if token not in stops]
        return RankedMatcher(compiled.deep_copy(), prompt_len, base.ends, closed, base.width)
