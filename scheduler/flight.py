"""Flight: a step between its launch and its collection."""

from __future__ import annotations

from dataclasses import dataclass

from model.batch import Batch, Pending
from scheduler.cost import Work
from scheduler.policy import Plan


@dataclass(slots=True)
class Flight:
    """A step that was launched and not yet collected."""

    plan: Plan
    batch: Batch
    pending: Pending
    work: Work
    """The plan's, and its drafts."""
    launched: float
