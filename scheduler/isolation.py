"""A step that raises must not take innocent rows with it: halves are tried until the guilty row stands alone.

      [a b c d] raises  →  [a b] fine, [c d] raises  →  [c] fine, [d] raises: d fails

Trying again is sound: nothing of a step is committed before its result, a row writes only to positions ≥ its start in
blocks that are its own, and it writes them again. Block copies are not repeated, for their source may have been written
to since: they are a step of their own, before.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from model.batch import Batch, Executor, Pending, StepResult

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """The result of a step, row by row, and what went wrong in it."""

    result: StepResult
    failures: dict[int, Exception] = field(default_factory=dict)
    """By row number: why it fails; its entries in `result` say nothing."""


class Broken:
    """A step that raised before it was under way."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> StepResult:
        raise self._error


def launch(executor: Executor, batch: Batch) -> Pending:
    """Enqueue a step. Whatever its rows raise comes with the result."""
    if batch.copies:
        executor.execute(Batch([], batch.copies)).result()
    try:
        return executor.execute(Batch(batch.rows))
    except Exception as error:
        return Broken(error)


def collect(executor: Executor, batch: Batch, pending: Pending) -> Outcome:
    """Wait for a step. Where it raised, its rows are computed again in smaller parts; never raises for a row's sake."""
    try:
        return Outcome(pending.result())
    except Exception as error:
        log.exception("a step of %d rows raised", len(batch.rows))
        count = len(batch.rows)
        if count == 1:
            return Outcome(StepResult([[]], [[]], [None]), {0: error})
        whole = Outcome(StepResult([], [], []))
        for start, end in ((0, count // 2), (count // 2, count)):
            part = Batch(batch.rows[start:end])
            outcome = collect(executor, part, launch(executor, part))
            whole.result.tokens += outcome.result.tokens
            whole.result.logprobs += outcome.result.logprobs
            whole.result.prompt_logprobs += outcome.result.prompt_logprobs
            whole.result.pooled.update({start + row: vector for row, vector in outcome.result.pooled.items()})
            whole.failures.update({start + row: failure for row, failure in outcome.failures.items()})
        return whole
