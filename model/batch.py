"""What one step computes, and what comes back. Plain records: the scheduler fills them, the runner reads them.

A row is one sequence's part of a step; prefill, chunk, decode and resume differ only in `start` and `count`:

        tokens   p p p p p p p p g g            p: prompt, g: generated
                 └ cached ┘└ count ┘
                          start    start + count == len(tokens): the last logits draw a token

A row that draws may carry a draft, guessed tokens behind its last one (`model.speculation`): it then draws after each
of them too, as far as the guesses are right.

A batch may be launched while the one before it is under way. What a row of it begins with is then perhaps a token that
nobody has read yet: `Row.source` says which row of that one draws it, and it need not leave the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from model.params import Logprob, SamplingParams
from model.pooling import Vector

if TYPE_CHECKING:
    from model.grammar import Matcher

NO_TOKEN = -1
"""The row's masks leave no token to draw, and its sequence must end; or there is none to send."""
BAD_LOGITS = -2
"""The row's logits were not finite; its request must fail, its neighbours must not."""

BAD_GRAMMAR = -3
"""The row's matcher failed: see `Matcher.error`. As above."""


@dataclass(slots=True)
class Row:
    """One sequence's part of a step. `tokens` and `blocks` are the owner's lists: read only until it is collected."""

    tokens: list[int]
    """Every token known so far, prompt and generated; `length` of them, or one less until `source` has drawn it."""
    prompt_len: int
    start: int
    """tokens[start : start + count] are computed; everything before lies in the pool."""
    count: int
    blocks: list[int]
    """Block table; covers start + count tokens."""
    params: SamplingParams
    index: int = 0
    """Number of the sequence within its request; its random stream."""
    samples: bool = True
    """Whether a token is drawn after the row's last token."""
    draft: list[int] = field(default_factory=list)
    """Tokens guessed to follow; computed too, so `blocks` covers them. Only where start + count == length, and `source`
    is -1."""
    plain: bool = False
    """`params.plain`, where that is known: asking takes longer than drawing."""
    matcher: Matcher | None = None
    """Says what may be drawn. It has followed `tokens`; the draft is valid to it."""
    pooled: Vector | None = None
    """Where `params.pooling` asks for it: what the row's step before this one gave in `StepResult.pooled`."""
    length: int = 0
    """Tokens of the sequence, the one that `source` draws included; 0 as it is made: those in `tokens`."""
    source: int = -1
    """The row of `Batch.after` that draws tokens[start], where that was not read yet; start + 1 == length then. If that
    row draws none, nobody will look at what this one brings: any token does. -1: all tokens are known."""

    more: Sequence[list[int]] = ()
    """Block tables of the pool's other groups (`kvpool.groups`); `blocks` is that of the first."""

    def __post_init__(self) -> None:
        if not self.length:
            self.length = len(self.tokens)

    @property
    def groups(self) -> tuple[list[int], ...]:
        return (self.blocks, *self.more)


@dataclass(slots=True)
class Batch:
    """One step. `copies` (source block, destination block) are made before anything is computed."""

    rows: list[Row]
    copies: list[tuple[int, int]] = field(default_factory=list)
    after: Pending | None = None
    """The step that is under way, where a row has a `source` in it."""


@dataclass(slots=True)
class StepResult:
    """What a step computed; every list has one entry per row of the batch."""

    tokens: list[list[int]]
    """What the row drew: the beginning of its draft that it would have drawn anyway, and one token more, which may be
    NO_TOKEN, BAD_LOGITS or BAD_GRAMMAR. Empty where the row draws nothing."""
    logprobs: list[list[Logprob]]
    """Of those that are tokens, where `params.logprobs` asks for it; else empty."""
    prompt_logprobs: list[list[Logprob] | None]
    """Where `params.prompt_logprobs` asks for it: for every computed position p with p + 1 < prompt_len, in order,
    the logprob of tokens[p + 1]."""
    pooled: dict[int, Vector] = field(default_factory=dict)
    """By row number, where `params.pooling` asks for it: the states up to the row's last one, pooled."""


class Pending(Protocol):
    """A step that is under way."""

    def result(self) -> StepResult:
        """Wait for it. Raises what the step raised."""
        ...


class Executor(Protocol):
    """What the engine needs of a runner; the tests have a fake one."""

    def execute(self, batch: Batch) -> Pending: ...
