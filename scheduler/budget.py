"""The budget of one step, and the purse that prompts are paid from once the decoding rows are counted.

On a CPU a step is bounded in seconds, on a GPU in tokens alone; the purse holds both, and what runs out first ends it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, sqrt

from scheduler.cost import CostModel
from scheduler.limits import Limits

MAX_SLOWDOWN = 2.2
"""A step with a prompt chunk takes at most so many times the step that only decodes: streams must not wait for three
usual gaps, and neither the estimate nor the machine is steady."""
MIN_SLOWDOWN = 2.0
"""A step that is longer than the target anyway still does so much prompt work, relative to itself."""
RESTING_SLOWDOWN = 3.0 - MAX_SLOWDOWN
"""A step that others sit out may take so many times what it would take with them: with the next, which may be slowed,
they wait three usual gaps."""
PATIENCE, MAX_PATIENCE = 4.0, 4.0
"""What makes a step longer costs every stream that time, and gives it to every prompt that waits for its first token.
Waiting for that is worth so many times the wait for a next one, and a step takes at most so many times what it would
beside a single prompt. Many prompts are served sooner this way, and all of them in less time: a step with more rows, or
with a longer chunk, reads the same weights."""
ALONE_SLOWDOWN = 5.0
"""Where no stream waits, a step may take so many times what it costs to read the weights once, whatever the target:
shorter chunks would spend most of their time on that reading."""


class Purse:
    """What a step may still spend on prompts: tokens, and seconds at a fixed, a linear and a quadratic price."""

    __slots__ = ("_pair", "_reach", "_seconds", "_token", "min_chunk", "tokens")

    def __init__(
        self,
        tokens: int,
        min_chunk: int,
        seconds: float = inf,
        token_seconds: float = 0.0,
        pair_seconds: float = 0.0,
        reach_seconds: float = 0.0,
    ) -> None:
        self.tokens = max(0, tokens)
        self.min_chunk = min(min_chunk, self.tokens)
        self._seconds = seconds
        self._token = token_seconds
        self._pair = pair_seconds
        self._reach = reach_seconds

    def afford(self, start: int, share: float = 1.0, begun: bool = False) -> int:
        """How many tokens after `start` others can be had for this share of what is left.

        n tokens cost reach · start + token · n + pair · (start · n + n² / 2); the first part is paid once a chunk, so
        not where the chunk has `begun`.
        """
        tokens = ceil(self.tokens * share)
        if self._seconds == inf:
            return tokens
        seconds = max(0.0, self._seconds * share - (0.0 if begun else self._reach * start))
        price = self._token + self._pair * start
        return min(tokens, int(2 * seconds / (price + sqrt(price * price + 2 * self._pair * seconds))))

    def spend(self, start: int, count: int, begun: bool = False) -> None:
        self.tokens -= count
        self._seconds -= self._token * count + self._pair * count * (start + count / 2)
        if not begun:
            self._seconds -= self._reach * start


@dataclass(frozen=True, slots=True)
class Budget:
    """Of one step."""

    tokens: int
    min_chunk: int = 8
    target: float = inf
    """Seconds; needs `cost`."""
    cost: CostModel | None = None

    @staticmethod
    def of(limits: Limits, cost: CostModel) -> Budget:
        """In seconds where the limits have some."""
        if limits.target_step_time is None:
            return Budget(limits.max_num_batched_tokens, limits.min_chunk)
        return Budget(limits.max_num_batched_tokens, limits.min_chunk, limits.target_step_time, cost)

    def purse(
        self, rows: int, context: int, prompts: int = 1, resting_rows: int = 0, resting_context: int = 0
    ) -> Purse:
        """What is left for `prompts` that wait for a first token, beside `rows` decoding rows that read `context`
        tokens. Where others sit the step out, it may take almost as long as it would with them."""
        tokens = self.tokens - rows
        cost = self.cost
        if cost is None:
            return Purse(tokens, self.min_chunk)
        alone = cost.decode_seconds(rows, context)
        if rows:
            allowed = min(max(self.target, MIN_SLOWDOWN * alone), MAX_SLOWDOWN * alone)
            allowed *= min(max(1.0, PATIENCE * (prompts - 1) / rows), MAX_PATIENCE)
        else:
            allowed = max(self.target, ALONE_SLOWDOWN * alone)
        if resting_rows:
            whole = cost.decode_seconds(rows + resting_rows, context + resting_context)
            allowed = max(allowed, RESTING_SLOWDOWN * whole)
        prices = cost.token_seconds, cost.pair_seconds, cost.reach_seconds
        return Purse(tokens, self.min_chunk, allowed - alone, *prices)
