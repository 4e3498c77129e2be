"""A runner whose steps end the same on every rank of a split model: all have computed, or all fail, for the same rows.

A step is a row of collectives, and whoever does not come to one lets the others wait for ever. So a rank on which a
step raises makes the rest of them with zeros, and says so when the ranks settle how the step ended. What is tried again
then is tried again by all (`scheduler.isolation`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch

from model.batch import Batch, Pending, StepResult
from model.decoder import Decoder
from model.executor import Runner
from model.follower import joined
from model.parallel import Group, Tally

Settle = Callable[[int, Exception | None, StepResult | None], StepResult]
"""Given which step this was, and what came of it here, its error or its result: the result for all ranks. Raises where
one of them failed, the error that was given if there was one."""


class Stranded(BaseException):
    """The ranks are no longer together, and this process must end. Nothing in the engine catches it."""


def mark(batch: Batch) -> int:
    """A number that ranks have in common where they compute the same step: of integers, whose hashes are no secret."""
    return hash(tuple((r.start, r.count, *r.draft, len(r.tokens), r.tokens[-1], *r.blocks[-1:]) for r in batch.rows))


class RankedRunner:
    """See `model.batch.Executor`. Every rank has one, and gives it the same batches."""

    def __init__(self, runner: Runner, group: Group, settle: Settle) -> None:
        # Not one that is captured as graphs: nobody would see how far a step is.
        assert isinstance(runner.model, Decoder)
        self.runner = runner
        self.model = runner.model
        self.group = group
        self.settle = settle

    def execute(self, batch: Batch) -> Pending:
        """Enqueue a step. Never raises for a row's sake: that comes with the result."""
        return RankedStep(self, batch) if batch.rows else self.runner.execute(batch)


class RankedStep:
    """A step under way on all ranks."""

    def __init__(self, owner: RankedRunner, batch: Batch) -> None:
        self._owner = owner
        self._mark = mark(batch)
        self._tokens = sum(row.count + len(row.draft) for row in batch.rows)
        self._drawing, self._joins = joined(batch.rows)
        self._tally = owner.group.tally = Tally()
        self._pending: Pending | None = None
        self._error: Exception | None = None
        self._done: StepResult | None = None
        try:
            self._pending = owner.runner.execute(batch)
        except Exception as error:
            self._error = error
            self._abstain(self._drawing)

    def result(self) -> StepResult:
        """Wait for it, on all ranks."""
        if self._done is None:
            self._owner.group.tally = self._tally
            found: StepResult | None = None
            if self._pending is not None:
                try:
                    found = self._pending.result()
                except Exception as error:
                    self._error = error
            if self._error is not None:
                self._abstain(self._drawing + self._joins)
            self._done = self._owner.settle(self._mark, self._error, found)
        return self._done

    def _abstain(self, joins: list[int]) -> None:
        """After an error, make what is left of the step's collectives up to these joins."""
        assert self._error is not None
        traceback.clear_frames(self._error.__traceback__)  # they hold the step's tensors, and memory may be short
        try:
            with torch.inference_mode():
                self._owner.model.abstain(self._tokens, joins)
        except Exception as error:
            raise Stranded("a step that failed cannot be brought to its end") from error
