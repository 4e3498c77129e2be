"""Drafter: when one sequence guesses its next tokens, and how many of them.

A guess is worth its price while the chance that it is used is greater. Guess j is used where all before it are right:

      first · rest^(j - 1) ≥ price        rest: the chance behind a long match, for right guesses make the match long

`first` depends on how much of the text before the guess matches. On the demo model's own texts a pair of tokens was
followed by the same token as the last time in 45 % of the cases, four tokens in 95 %; each sequence learns its own.
Where `first` is below the price nothing is drafted but a single token now and then, ever more rarely while it is wrong.
"""

from __future__ import annotations

from math import log

from model.speculation import DEPTH, NgramIndex

SHORT_GUESS, LONG_GUESS = 0.45, 0.9
"""Chances behind a match of fewer than DEPTH tokens and of more, before anything is known of a sequence."""
TRUST = 2.0
"""Guesses that this first belief counts for."""
FORGETTING = 0.9
"""Weight of a draft after the next one."""
PATIENCE, MOST_PATIENCE = 8, 128
"""Matches that go unused before the chance is tried again: at first, and after many vain tries."""
CERTAIN = 0.99
"""No chance is believed to be higher."""


class Chance:
    """That a guess of one kind is right."""

    __slots__ = ("_guesses", "_patience", "_right", "_unused")

    def __init__(self, guess: float) -> None:
        self._right, self._guesses = guess * TRUST, TRUST
        self._patience = PATIENCE
        self._unused = 0

    @property
    def value(self) -> float:
        return min(self._right / self._guesses, CERTAIN)

    def learn(self, right: int, wrong: int) -> None:
        self._right = FORGETTING * self._right + right
        self._guesses = FORGETTING * self._guesses + right + wrong
        if right:
            self._patience = PATIENCE

    def retry(self) -> bool:
        """Whether to guess although it is not worth it: the text may have changed."""
        self._unused += 1
        if self._unused < self._patience:
            return False
        self._unused = 0
        self._patience = min(2 * self._patience, MOST_PATIENCE)
        return True


class Drafter:
    """What one sequence's drafts have come to so far, and where to take the next one from."""

    __slots__ = ("_first", "_guess", "_index", "_length", "_long", "_short", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        """`tokens`: the sequence's list."""
        self._index = NgramIndex(tokens)
        self._short, self._long = Chance(SHORT_GUESS), Chance(LONG_GUESS)
        self._first = self._short
        """Of the last draft's first token."""
        self._length = 2
        """Longest draft for now: one more than twice what was right in the last one."""
        self._tokens = tokens
        self._guess = 0, -1
        """Where `watch` guessed last, and what."""

    def draft(self, price: float, most: int) -> list[int]:
        """At most `most` guesses that are worth `price` each (0 < price: tokens that others lose by one guess)."""
        place, matched = self._index.find()
        if not matched:
            return []
        self._first = self._long if matched == DEPTH else self._short
        chance = self._first.value
        if chance <= price:
            return self._index.follow(place, min(1, self._length)) if self._first.retry() else []
        worth = 1 + int(log(price / chance) / log(self._long.value))
        return self._index.follow(place, min(worth, most, self._length))

    def learn(self, drafted: int, accepted: int) -> None:
        """Of the last draft `drafted` > 0 tokens were computed and `accepted` were right."""
        self._first.learn(min(accepted, 1), accepted == 0)
        if accepted:
            self._long.learn(accepted - 1, accepted < drafted)
        self._length = 2 * accepted + 1

    def watch(self) -> bool:
        """Guess the next token, without a draft; whether the last such guess was right."""
        at, token = self._guess
        right = at < len(self._tokens) and self._tokens[at] == token
        place, matched = self._index.find()
        self._guess = len(self._tokens), self._tokens[place] if matched else -1
        return right and self._length > 0

    def stop(self) -> None:
        """No drafts any more."""
        self._length = 0
