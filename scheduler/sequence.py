"""Request and Sequence: what the engine knows of one Submit.

A request has n sequences; each is scheduled by itself. A fresh request computes its prompt once: sequence 0 leads, the
others are unborn until it has drawn its first token, then they are forked from its table.

      UNBORN ──fork──▶ RUNNING ◀──admit── WAITING          every phase ──end──▶ FINISHED
         └──no seat, or the leader ended──────▲ ▲
                          RUNNING ──preempt─────┘

In a search each sequence is a slot for a beam. All live ones run, and one that is through with a round's step waits for
the others; or one waits, or computes again what it knows, and the others are unborn: they are forked from it.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum

import msgspec

from kvpool.table import BlockTable
from model.batch import Row
from model.grammar import Matcher
from model.params import Logprob, SamplingParams
from model.pooling import Vector, finished
from scheduler.beams import Beams
from scheduler.drafter import Drafter
from scheduler.messages import FinishReason, Submit

Rank = tuple[int, float, int, int]
"""Priority, arrival, request id, index: the smallest goes first, the largest is preempted first."""


class Phase(IntEnum):
    """Where a sequence is; exactly one place each."""

    UNBORN = 0
    """In `Request.unborn`."""
    WAITING = 1
    """In the waiting queue; holds no block."""
    RUNNING = 2
    """In the running list; its table is live."""
    FINISHED = 3
    """Nowhere."""


class Request:
    """One Submit and what its sequences share."""

    __slots__ = (
        "alive",
        "beams",
        "billed",
        "forks",
        "id",
        "n",
        "params",
        "plain",
        "pooled",
        "prompt_len",
        "prompt_values",
        "salt",
        "sequences",
        "serial",
        "started",
        "tenant",
        "unborn",
    )

    def __init__(self, submit: Submit, capacity: int, rope_switch: int | None = None) -> None:
        """`capacity`: tokens that one sequence may hold at most (context, pool). `submit` has passed `refusal`."""
        self.id = submit.id
        self.salt = submit.salt
        self.tenant = submit.tenant
        self.prompt_len = len(submit.prompt_ids)
        self.started = False
        self.n = submit.n
        """Sequences of the answer."""
        width = submit.n if submit.search is None else submit.search.width
        self.forks = width > 1
        """Whether its sequences may share a block that one of them still writes to."""
        self.alive = width - len(set(submit.finished))
        """Sequences that have not ended."""
        resumed = any(submit.generated) or bool(submit.finished)
        self.billed = self.prompt_len if resumed else 0
        """Prompt tokens up to which its tenant was charged; what is computed again is not."""
        # Once there is a token or an end, the prompt's logprobs were sent with it at the latest.
        collects = submit.params.prompt_logprobs is not None and not resumed
        self.params = submit.params if collects else without_prompt_logprobs(submit.params)
        self.prompt_values: list[Logprob] | None = [] if collects else None
        """Logprobs of prompt tokens 1, 2, … so far; None once sent or never asked for."""
        self.pooled: Vector | None = None
        """Where `params.pooling` asks for it: the hidden states since it was admitted, pooled."""
        self.serial = submit.search is not None or submit.params.reads_tokens
        """Whether no step of its can be launched before the token of the one before is read."""
        limit = min(self.prompt_len + submit.params.max_tokens, capacity)
        self.beams: Beams | None = None
        if submit.search is not None:
            params = submit.params
            self.beams = Beams(submit.search, params.stop_token_ids, limit - self.prompt_len, params.logprobs or 0)
            self.params = SamplingParams(
                max_tokens=params.max_tokens,
                seed=params.seed,
                temperature=0.0,
                stop_token_ids=params.stop_token_ids,
                logprobs=self.beams.wanted,
                prompt_logprobs=self.params.prompt_logprobs,
            )
        self.plain = self.params.plain
        self.sequences = [
            Sequence(
                self,
                index,
                submit.prompt_ids + (submit.generated[index] if index < len(submit.generated) else []),
                limit,
                (submit.priority, submit.arrival, submit.id, index),
            )
            for index in range(width)
        ]
        for sequence in self.sequences:
            sequence.salt = prefix_salt(submit.salt, len(sequence.tokens), rope_switch)
        self.unborn: list[Sequence] = []
        if not resumed:
            self.unborn = self.sequences[1:]
            for sequence in self.unborn:
                sequence.phase = Phase.UNBORN
        for index in submit.finished:
            self.sequences[index].phase = Phase.FINISHED

    @property
    def reads_cache(self) -> bool:
        """Not where every position counts: a cached one has keys, and neither logits nor a hidden state."""
        pooling = self.params.pooling
        return self.prompt_values is None and (pooling is None or pooling.kind != "mean")

    @property
    def parts(self) -> bool:
        """Whether live beams are unborn: they go on from wherever they part from the one that runs, perhaps behind its
        window."""
        return self.beams is not None and bool(self.unborn) and len(self.beams.live) > 1

    @property
    def seats(self) -> int:
        """That must be free before it begins: its beams cannot do without one another."""
        return 1 if self.beams is None else len(self.sequences)

    @property
    def left(self) -> list[Sequence]:
        """Those that have not ended, the unborn first: ended in this order, nobody is made leader only to end next."""
        return sorted((s for s in self.sequences if s.phase is not Phase.FINISHED), key=lambda s: s.phase)

    def bill(self, start: int, end: int) -> int:
        """How many of the prompt's tokens `start`, …, `end` - 1 are computed for the first time, now that they are."""
        first = max(start, self.billed)
        self.billed = max(self.billed, min(end, self.prompt_len))
        return max(0, self.billed - first)

    def vector(self) -> bytes | None:
        """Of a prompt that is computed; None where it is not finite."""
        assert self.pooled is not None
        assert self.params.pooling is not None
        return finished(self.pooled, self.prompt_len, self.params.pooling)

    def collect_prompt(self, start: int, end: int, values: list[Logprob] | None) -> list[Logprob] | None:
        """Keep the logprobs of `start`, …, `end` - 1 that are new: after a preemption positions are computed again.
        All of them once the prompt is computed; they are to be sent then, and not asked for again."""
        kept = self.prompt_values
        assert kept is not None
        if values is not None:
            kept += values[len(kept) - start :] if len(kept) > start else values
        if end < self.prompt_len:
            return None
        self.prompt_values = None
        self.params = without_prompt_logprobs(self.params)
        return kept


class Sequence:
    """One stream of tokens. `num_computed` chases `len(tokens)`: prefill, chunk, decode and resume are one rule."""

    __slots__ = (
        "ahead",
        "bypasses",
        "chunked",
        "drafter",
        "flown",
        "hashes",
        "index",
        "limit",
        "matcher",
        "num_computed",
        "phase",
        "preempted",
        "preemptions",
        "prompt_len",
        "rank",
        "request",
        "salt",
        "shared",
        "slot",
        "table",
        "tokens",
        "yields",
    )

    def __init__(self, request: Request, index: int, tokens: list[int], limit: int, rank: Rank) -> None:
        self.request = request
        self.index = index
        self.tokens = tokens
        self.prompt_len = request.prompt_len
        self.limit = limit
        """It ends with LENGTH as soon as it holds so many tokens."""
        self.rank = rank
        self.phase = Phase.WAITING
        self.salt = b""
        """Of its prefix hashes."""
        self.num_computed = 0
        """Those that a step in flight computes included."""
        self.ahead = 0
        """Tokens behind `tokens` that steps in flight draw for it, and that nobody has read."""
        self.flown = 0
        """Number of its last step."""
        self.slot = 0
        """Number of its row in that step."""
        self.table = BlockTable()
        self.hashes: list[bytes] = []
        """Prefix digests of the full blocks of `tokens`, as far as they were needed; only ever extended."""
        self.shared = 0
        """Leading columns of blocks that another table held when this one took them; for estimates only."""
        self.preempted = False
        """Waits because it was preempted: goes before those that never ran."""
        self.preemptions = 0
        self.yields = 0
        """Preemptions that made room for another tenant. They say nothing of how much it generates."""
        self.bypasses = 0
        """Sequences that were admitted past it while it was the head."""
        self.chunked = False
        """Had a chunk in the last step: whoever needs the same prefix does well to wait for it."""
        self.drafter: Drafter | None = None
        """Made when a draft could first be worth its price; keeps what it knows through preemption."""
        self.matcher: Matcher | None = None
        """Has followed what is generated; that a sequence is preempted or computed anew changes nothing for it."""

    @property
    def place(self) -> tuple[int, bool, float, int, int]:
        """Its place in the waiting queue."""
        priority, arrival, request, index = self.rank
        return priority, not self.preempted, arrival, request, index

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    def row(self, count: int) -> Row:
        """Its next `count` tokens as a part of a step. The table covers them."""
        request, start, table = self.request, self.num_computed, self.table
        length = len(self.tokens) + self.ahead
        return Row(
            self.tokens,
            self.prompt_len,
            start,
            count,
            table.blocks,
            request.params,
            self.index,
            samples=start + count == length and request.params.max_tokens > 0,
            plain=request.plain,
            matcher=self.matcher,
            pooled=request.pooled,
            length=length,
            source=self.slot if self.ahead else -1,
            more=table.more,
        )

    @property
    def finish(self) -> FinishReason:
        """Whether its last token ends it."""
        params, known = self.request.params, len(self.tokens)
        if self.tokens[-1] in params.stop_token_ids and known - self.prompt_len > params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if known >= self.limit else FinishReason.RUNNING


def seats_taken(running: Collection[Sequence]) -> int:
    """Those of the running, and those kept for the beams that are forked from one of them."""
    searches = {sequence.request for sequence in running if sequence.request.beams is not None}
    return len(running) + sum(len(request.unborn) for request in searches)


def prefix_salt(salt: bytes, length: int, rope_switch: int | None) -> bytes:
    """Keeps apart what must not share a block: other salts, and keys turned by the other kind of rotary factors."""
    if rope_switch is None:
        return salt
    return (b"long:" if length > rope_switch else b"short:") + salt


def without_prompt_logprobs(params: SamplingParams) -> SamplingParams:
    return params if params.prompt_logprobs is None else msgspec.structs.replace(params, prompt_logprobs=None)
