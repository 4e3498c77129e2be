"""Beams: of all that the beams of a search could say next, the likeliest go on.

    live beams ── the likeliest next tokens of each ──▶ the `width` likeliest that do not end: the next live beams
                                                  └───▶ those that end among the `width` likeliest: ended, if they score

Pure, and blind to blocks: a beam lies in a slot, and a round says which slot goes on from which. Who goes on, what ends
count for and when it is over are as in transformers' `generate`, so that both find the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from model.params import Logprob
from scheduler.messages import BeamSearch

NOTHING = Logprob(0.0, 1, [], [])


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Beam:
    """A sequence of generated tokens: the last one, and what is before it."""

    before: Beam | None
    token: int
    value: Logprob
    """Of the token, with the alternatives that the client asked for."""
    logprob: float
    """Sum over all tokens, the one that ended it included."""
    stopped: bool
    """By its last token."""

    def steps(self) -> list[Beam]:
        """Itself after each of its tokens."""
        steps: list[Beam] = []
        beam = self
        while beam.before is not None:
            steps.append(beam)
            beam = beam.before
        return steps[::-1]


ROOT = Beam(None, -1, NOTHING, 0.0, False)


class Move(NamedTuple):
    """A slot's part of the next round: it goes on from what another slot, or itself, holds, with one token more."""

    slot: int
    source: int
    token: int


class Beams:
    """One search. Every round each live beam is noted once, then they advance."""

    __slots__ = ("_ends", "_most", "_noted", "_search", "_shown", "done", "ended", "length", "live")

    def __init__(self, search: BeamSearch, ends: Collection[int], most: int, shown: int = 0) -> None:
        """`ends`: tokens that end a beam; `most` tokens do too. `shown`: alternatives that a token's value keeps."""
        self.live: dict[int, Beam] = {0: ROOT}
        """By slot, 0 … width - 1; best first."""
        self.ended: list[tuple[float, Beam]] = []
        """At most `width`, and their scores; best first."""
        self.length = 0
        """Tokens of every live beam."""
        self.done = False
        self._search = search
        self._ends = frozenset(ends)
        self._most = most
        self._shown = shown
        self._noted: dict[int, Logprob] = {}

    @property
    def wanted(self) -> int:
        """A beam's likeliest tokens that a round may need: all that go on may be its own, and as many may end it."""
        return self._search.width + len(self._ends)

    @property
    def complete(self) -> bool:
        """Whether every live beam is noted."""
        return len(self._noted) == len(self.live)

    def noted(self, slot: int) -> bool:
        return slot in self._noted

    def note(self, slot: int, values: Sequence[Logprob]) -> None:
        """What a live beam may go on with: the `wanted` likeliest tokens of one value; none where there is none."""
        self._noted[slot] = values[0] if values else NOTHING

    def forget(self) -> None:
        """Nobody is noted."""
        self._noted.clear()

    def advance(self) -> list[Move]:
        """End the round. Every new live beam's move; nobody moves out of a slot that another one moves into."""
        search, noted = self._search, self._noted
        self.length += 1
        last = self.length >= self._most
        grown = [
            (beam.logprob + logprob, slot, rank)
            for slot, beam in self.live.items()
            for rank, logprob in enumerate(noted[slot].top_logprobs)
        ]
        grown.sort(key=lambda entry: -entry[0])
        going: list[tuple[int, Beam]] = []
        for place, (logprob, slot, rank) in enumerate(grown):
            if len(going) == search.width:
                break
            token = noted[slot].top_ids[rank]
            stopped = token in self._ends
            beam = Beam(self.live[slot], token, self._value(noted[slot], rank), logprob, stopped)
            if not (stopped or last):
                going.append((slot, beam))
            elif place < search.width:
                self.ended.append((self._score(logprob, self.length), beam))
        self.ended.sort(key=lambda entry: -entry[0])
        del self.ended[search.width :]
        self.done = not going or self._settled(going[0][1])
        return self._moves(going)

    def _settled(self, best: Beam) -> bool:
        """Whether enough have ended, and the best live beam is not expected to get among them."""
        search = self._search
        if len(self.ended) < search.width or search.early_stopping is True:
            return len(self.ended) == search.width
        longest = search.early_stopping == "never" and search.length_penalty > 0
        return self._score(best.logprob, self._most if longest else self.length) <= self.ended[-1][0]

    def _moves(self, going: list[tuple[int, Beam]]) -> list[Move]:
        """Give each its slot. The first that goes on from a slot stays in it, so that few tables change."""
        self._noted.clear()
        self.live = {}
        kept = {source for source, _ in going}
        free = (slot for slot in range(self._search.width) if slot not in kept)
        moves = []
        for source, beam in going:
            slot = next(free) if source in self.live else source
            self.live[slot] = beam
            moves.append(Move(slot, source, beam.token))
        return moves

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self._search.length_penalty)

    def _value(self, found: Logprob, rank: int) -> Logprob:
        shown = self._shown
        return Logprob(found.top_logprobs[rank], rank + 1, found.top_ids[:shown], found.top_logprobs[:shown])


def most_tokens(prompt_len: int, width: int, blocks: int, size: int) -> int:
    """How many tokens each of `width` beams may hold in a pool of `blocks` blocks, prompt included: at worst they have
    nothing in common but the full blocks of the prompt. Half a block per beam is for plan(): where two are about to
    part in a block, it counts a copy for both."""
    shared = prompt_len // size
    return (shared + (blocks - shared - width // 2) // width) * size
