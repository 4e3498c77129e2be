"""Speculation without a second model: what follows is guessed from what came before, and verified in one step.

    tokens   … the river Thames rises at Thames Head … the river ┊ Thames rises in
                                                                 └ draft: what followed this pair the last time ┘
    drawn behind `river` and each token of the draft:              Thames rises near Thames

Two tokens of the draft were right, `near` is the token more that every row draws, the rest is dropped.

A draft changes how many steps a text takes, never the text. Which token a row draws at a position is a function of the
tokens before it, of its parameters, and of one uniform number that depends on (seed, index, position) alone
(`model.uniform`). Behind the first i tokens of its draft a row draws as if they were tokens of its own (`positions`).
So, by induction over i: while the draft was right so far, the tokens before the position are those that a row without
a draft would have, hence the token drawn is the same too. The first one that differs from the draft is still such a
token; those behind it follow a wrong one and are not used. That holds for argmax and for any sampling. No distribution
has to be corrected, as it must where a second model draws the draft: ours is a single point, which a draw hits or not.
What can differ is the rounding in a step of another shape, as with a prompt's chunks.
"""

from __future__ import annotations

from dataclasses import replace

from model.batch import BAD_LOGITS, Row

DEPTH = 4
"""A match of so many tokens is as good as a longer one."""
CATCH_UP = 4096
"""Tokens that are indexed in one go: a few milliseconds. A long prompt takes several steps, so that none is held up."""


class NgramIndex:
    """Where each pair of neighbouring tokens ended last, in a list that grows.

    O(1) a token, caught up with when somebody asks; some 130 bytes a token, far less than its keys and values take.
    """

    __slots__ = ("_ends", "_indexed", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        """`tokens` is the owner's list; it may only be appended to."""
        self._tokens = tokens
        self._ends: dict[tuple[int, int], int] = {}
        self._indexed = 1
        """Pairs that end before it are in the index."""

    def find(self) -> tuple[int, int]:
        """Where the text goes on behind the latest earlier occurrence of its last two tokens, and how many tokens
        before that place equal its last ones: 2 to DEPTH. (0, 0) where there is no such place, or none known yet."""
        tokens, ends = self._tokens, self._ends
        last = len(tokens) - 1
        until = min(last, self._indexed + CATCH_UP)
        for end in range(self._indexed, until):
            ends[tokens[end - 1], tokens[end]] = end
        self._indexed = max(self._indexed, until)
        end = ends.get((tokens[-2], tokens[-1]), 0) if 0 < last == until else 0
        if not end:
            return 0, 0
        matched = 2
        while matched < min(DEPTH, end + 1) and tokens[end - matched] == tokens[last - matched]:
            matched += 1
        return end + 1, matched

    def follow(self, place: int, count: int) -> list[int]:
        """`count` tokens from `place` on; where the list ends, what was just guessed goes on, so periods repeat."""
        guesses = self._tokens[place : place + count]
        period = len(self._tokens) - place
        while len(guesses) < count:
            guesses.append(guesses[-period])
        return guesses


def positions(row: Row) -> list[Row]:
    """The row as it stands where it draws: as it is, and behind each token of its draft as if it had drawn that."""
    if not row.draft:
        return [row]
    places = range(len(row.draft) + 1)
    return [replace(row, tokens=row.tokens + row.draft[:i], length=row.length + i, draft=[]) for i in places]


def agreed(draft: list[int], drawn: list[int]) -> list[int]:
    """What a row has really drawn, given what it drew at each of its `positions`: up to the first token that its draft
    does not have. One broken position breaks the row, for backends may multiply its numbers by zero everywhere."""
    if draft and BAD_LOGITS in drawn:
        return [BAD_LOGITS]
    right = next((i for i, token in enumerate(draft) if drawn[i] != token), len(draft))
    return drawn[: right + 1]
