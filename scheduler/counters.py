"""Counters: what the engine has done so far, and the figures of one moment that go out with every step."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.cost import Work
from scheduler.messages import EngineStats
from scheduler.policy import SchedulerState


@dataclass(slots=True)
class Counters:
    """They never fall, save the last three: of the step collected last. No tokens: the last call collected none."""

    preemptions: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    computed_tokens: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    failed_raised: int = 0
    failed_memory: int = 0
    failed_logits: int = 0
    failed_grammar: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    step_tokens: int = 0
    step_rows: int = 0

    def step(self, rows: int, work: Work, seconds: float) -> None:
        """One more was collected."""
        self.steps += 1
        self.step_rows = rows
        self.step_tokens = work.rows + work.prefill
        self.step_seconds = seconds

    def failed(self, reason: str) -> None:
        """A row that somebody still waits for. `reason`: one of those of `scheduler.isolation`."""
        name = f"failed_{reason}"
        setattr(self, name, getattr(self, name) + 1)

    def stats(self, state: SchedulerState, unborn: int) -> EngineStats:
        """With the state as it is now. `unborn`: sequences that wait for their leader."""
        usage, tier, size = state.pool.usage(), state.pool.tier, state.pool.block_size
        tables = [*((s.table, s.num_computed) for s in state.running), *state.retired.tables]
        return EngineStats(
            running=len(state.running),
            waiting=len(state.waiting) + unborn,
            waiting_tokens=state.waiting.tokens,
            blocks_total=usage.total,
            blocks_free=usage.free,
            blocks_cached=usage.cached,
            blocks_active=usage.active,
            tokens_active=state.pool.tokens_held(tables),
            preemptions=self.preemptions,
            prefix_queried_tokens=self.prefix_queried_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            computed_tokens=self.computed_tokens,
            drafts=self.drafts,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            failed_raised=self.failed_raised,
            failed_memory=self.failed_memory,
            failed_logits=self.failed_logits,
            failed_grammar=self.failed_grammar,
            tier_bytes_used=tier.used * tier.block_bytes if tier else 0,
            tier_bytes_total=tier.total * tier.block_bytes if tier else 0,
            tier_restores=tier.counts.restores if tier else 0,
            tier_restored_tokens=tier.counts.restored * size if tier else 0,
            tier_stored_tokens=tier.counts.stored * size if tier else 0,
            tier_refused_tokens=tier.counts.refused * size if tier else 0,
            steps=self.steps,
            step_seconds=self.step_seconds,
            step_tokens=self.step_tokens,
            step_rows=self.step_rows,
        )
