"""Speculation: which rows of a step get a draft. Drafts live on what the plan leaves over, and nobody pays for them.

      tokens   of the budget, behind decodes and prompts
      blocks   free ones that no row of the step needs; what a wrong draft took is given back when it is collected,
               so between steps the pool is as it would be without drafts, and nobody is preempted for one
      time     a draft must bring more tokens than all rows lose by waiting for it; on a CPU, steps with a part of a
               prompt have none to spare

With R rows in a step of T seconds, everybody together gets R / T tokens a second. A guess that makes the step longer
by c seconds costs R · c / T tokens: next to nothing for one stream, where a step waits for weights to be read, most of
a token where many rows keep the step busy computing.
"""

from __future__ import annotations

from dataclasses import replace

from kvpool.pool import KVPool
from model.batch import Row
from scheduler.cost import CostModel, Work
from scheduler.drafter import LONG_GUESS, Drafter
from scheduler.limits import Limits
from scheduler.policy import Plan
from scheduler.sequence import Phase, Sequence

LEAST_PRICE = 0.05
"""A guess costs at least so much, however little the steps say: it also has to be sampled and given back."""

GUESS_READS = 0.4
"""What a guess attends to costs so much of reading it once for the row's own token."""


class Speculation:
    """Owns no state but what it was made with: what is learned lies in the cost model and the sequences' drafters."""

    def __init__(self, pool: KVPool, limits: Limits, cost: CostModel) -> None:
        self._pool = pool
        self._cost = cost
        self._most = limits.num_speculative_tokens
        self._tokens = limits.max_num_batched_tokens
        self._lines = limits.max_num_seqs + self._most
        """Positions of a step that may draw: each needs memory for its logits."""
        self._switch = limits.rope_switch
        self._timed = limits.target_step_time is not None
        self._worthwhile = False
        """Whether there was room for a draft in the last step, and the surest guess was worth its price."""

    def attach(self, step: Plan, rows: list[Row]) -> Work:
        """Put drafts on rows of a plan, whose own blocks are all there; the plan's work and theirs."""
        work, self._worthwhile = step.work, False
        # Where steps have a length to keep, what one with a prompt may take was given to the prompt.
        if not self._most or not work.rows or (work.prefill and self._timed):
            return work
        left = min(self._tokens - work.rows - work.prefill, self._lines - len(rows))
        seconds = self._cost.decode_seconds(work.rows, work.context)
        # All rows wait for a guess: for its row, and for what it reads of a context of the usual length.
        guess = work.rows * self._cost.row_seconds + GUESS_READS * work.context * self._cost.read_seconds
        price = max(LEAST_PRICE, guess / seconds)
        self._worthwhile = left > 0 and price < LONG_GUESS
        drafted, read = 0, 0.0
        for row, sequence in zip(rows, step.counts, strict=True):
            known = row.samples and row.count == 1 and row.source < 0
            most = min(left - drafted, self._room(sequence)) if known else 0
            if most > 0:
                if sequence.drafter is None:
                    sequence.drafter = Drafter(sequence.tokens)
                draft = sequence.drafter.draft(price, most)
                # Where the grammar says that a guess is wrong, nothing behind it can be right.
                row.draft = self._covered(sequence, draft if row.matcher is None else row.matcher.valid(draft))
                drafted += len(row.draft)
                read += GUESS_READS * len(row.draft) * row.start
        return replace(work, rows=work.rows + drafted, context=work.context + int(read))

    def awaits(self, sequence: Sequence, row: Row) -> bool:
        """Whether a sequence had better wait for the token that this row draws, because a draft is likely to pay then:
        only a row whose tokens are all known can have one."""
        if not self._worthwhile or self._room(sequence) <= 0:
            return False
        if sequence.drafter is None:
            sequence.drafter = Drafter(sequence.tokens)
        return sequence.drafter.watch()

    def settle(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """A draft was verified: learn from it, and give back the blocks of what was wrong."""
        assert sequence.drafter is not None
        sequence.drafter.learn(drafted, accepted)
        if sequence.phase is Phase.RUNNING:
            self._pool.trim(sequence.table, sequence.num_computed)

    def bar(self, sequence: Sequence) -> None:
        """No more drafts for it."""
        assert sequence.drafter is not None
        sequence.drafter.stop()

    def _room(self, sequence: Sequence) -> int:
        """The longest draft of a sequence that lacks one token, wherever it ends: with it comes one token more."""
        known, request = len(sequence.tokens), sequence.request
        if request.unborn or request.beams is not None or request.prompt_values is not None:
            return 0  # Others are about to share its blocks, or every position's logits are asked for already.
        most = min(self._most, sequence.limit - known - 1)
        # The token that grows it past the switch must be the last one, for then its keys are turned anew.
        return most if self._switch is None or known > self._switch else min(most, self._switch - known)

    def _covered(self, sequence: Sequence, draft: list[int]) -> list[int]:
        """The draft, or as much of it as finds blocks."""
        known, table = len(sequence.tokens), sequence.table
        if draft and not self._pool.extend(table, known + len(draft), known):
            return draft[: len(table.blocks) * self._pool.block_size - known]
        return draft
