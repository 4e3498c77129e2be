"""A step that raises must not take innocent rows with it: halves are tried until the guilty row stands alone.

      [a b c d] raises  →  [a b] fine, [c d] raises  →  [c] fine, [d] raises: d fails

Every row is tried twice before it fails. Trying again is sound: nothing of a step is committed before its result, a row
writes only to positions ≥ its start in blocks that are its own, and it writes them again. Block copies are not
repeated, for their source may have been written to since: they are a step of their own, before. A step launched behind
one that raised is ended first, unread: it began with tokens, or keys, that never came.

What ran out of memory gets it back first: an exception holds the frames it passed, and they the tensors of the step.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from model.batch import Batch, Executor, Pending, Row, StepResult

log = logging.getLogger(__name__)

RAISED, MEMORY, LOGITS, GRAMMAR = "raised", "memory", "logits", "grammar"
"""Why a row fails: its step raised, or ran out of memory; its logits are not finite; its grammar's matcher failed."""
NO_MEMORY = ("not enough memory", "out of memory", "bad_alloc", "cannot allocate memory", "status_alloc_failed")
"""What torch says in a RuntimeError, on a GPU in one of its own; the last of them is cuBLAS's."""
NO_DEVICE = ("illegal memory access", "device-side assert", "unspecified launch failure", "misaligned address")
"""What a GPU says once and then to everything, until the process has ended."""


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
        executor.execute(Batch([], batch.copies))
    try:
        return executor.execute(Batch(batch.rows, after=batch.after))
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # the next step may be launched before this one is collected
        return Broken(error)


def collect(executor: Executor, batch: Batch, pending: Pending, land: Callable[[], None] = lambda: None) -> Outcome:
    """Wait for a step. Where it raised, its rows are computed again in smaller parts; never raises for a row's sake,
    only where the device is lost to the process. `land` ends what was launched behind it, before that."""
    try:
        return Outcome(pending.result())
    except Exception as error:
        _note(error, len(batch.rows))
    land()
    for row in batch.rows:
        row.source = -1  # What the step before drew is known by now.
        if len(row.tokens) < row.length:  # Its sequence ended instead: any token does, for nobody looks at the row.
            row.tokens = [*row.tokens, 0]
    return _again(executor, batch.rows)


def end(pending: Pending) -> None:
    """Wait for a step whose result does not matter, nor what it raised."""
    with suppress(Exception):
        pending.result()


def reason(error: Exception) -> str:
    """Why the row failed whose step raised this."""
    return MEMORY if out_of_memory(error) else RAISED


def out_of_memory(error: Exception) -> bool:
    """Whether it says that memory could not be had."""
    words = str(error).lower()
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(w in words for w in NO_MEMORY))


def _again(executor: Executor, rows: list[Row]) -> Outcome:
    """Rows whose step raised, in halves; a single one once more."""
    middle = (len(rows) + 1) // 2
    whole = Outcome(StepResult([], [], []))
    for start, part in ((0, rows[:middle]), (middle, rows[middle:])):
        if not part:
            continue
        failure = None
        try:
            outcome = Outcome(launch(executor, Batch(part)).result())
        except Exception as error:
            _note(error, len(part))
            failure = error
        if failure is not None and len(part) == 1:
            outcome = Outcome(StepResult([[]], [[]], [None]), {0: failure})
        elif failure is not None:
            outcome = _again(executor, part)
        whole.result.tokens += outcome.result.tokens
        whole.result.logprobs += outcome.result.logprobs
        whole.result.prompt_logprobs += outcome.result.prompt_logprobs
        whole.result.pooled.update({start + row: vector for row, vector in outcome.result.pooled.items()})
        whole.failures.update({start + row: failure for row, failure in outcome.failures.items()})
    return whole


def _note(error: Exception, rows: int) -> None:
    """Log it, and let go of what it holds. Raises where nothing will go well any more."""
    log.error("a step of %d rows raised", rows, exc_info=error)
    if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in NO_DEVICE):
        raise RuntimeError("the device is lost to this process") from error
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None
