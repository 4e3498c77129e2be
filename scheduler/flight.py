"""Flight: a step between its launch and its collection, and what may be planned meanwhile.

A row that draws is planned for again before its token is read, as long as nothing but the device needs that token.
Where something else does, the row sits the next step out:

    grammar, penalties, bad words   what may be drawn depends on all tokens before
    search                          so does what its beams are ranked by
    first token of several          the siblings are forked from the leader's table
    draft, or the hope of one       how many tokens a draft brings, and what to guess next, is seen on the host
    last token                      known beforehand where it is the limit's; of a stop token nobody knows, so one
                                    token too many is computed, and dropped
    rotary switch                   all keys are computed anew

What needs only the number of tokens (min_tokens), or none of them (bias, allowed ids, logprobs), goes on.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from model.batch import Batch, Pending, Row
from scheduler.cost import Work
from scheduler.limits import Limits
from scheduler.policy import Plan
from scheduler.sequence import Sequence
from scheduler.speculation import Speculation

STALLED = 4
"""Where one in so many of a step's rows would sit the next one out, that one waits instead, for all: it costs everybody
the time between two steps, a tenth or two of one, and spares those rows half of their speed."""


@dataclass(slots=True)
class Flight:
    """A step that was launched and not yet collected."""

    number: int
    """Counted from 1."""
    plan: Plan
    batch: Batch
    pending: Pending
    work: Work
    """The plan's, and its drafts."""
    launched: float
    stalls: bool
    """Whether the next step is planned only once this one is collected."""


def look_ahead(step: Plan, rows: Items[Row], limits: Limits, speculation: Speculation) -> bool:
    """Count the token that each row is about to draw as one that its sequence has, where the next step can do without
    knowing it. Whether that should wait for this one; it must where a part of a prompt is to be pooled."""
    sitting = 0
    for place, (sequence, row) in enumerate(zip(step.counts, rows, strict=True)):
        sequence.slot = place
        if not row.samples:
            if row.params.pooling is not None and row.start + row.count < row.length:
                return True
        elif row.length + 1 < sequence.limit:
            if _goes_on(sequence, row, limits) and not speculation.awaits(sequence, row):
                sequence.ahead += 1
            else:
                sitting += 1
    return sitting * STALLED >= max(1, len(rows))


def _goes_on(sequence: Sequence, row: Row, limits: Limits) -> bool:
    request = sequence.request
    return not (request.serial or request.unborn or row.draft or row.length == limits.rope_switch)
