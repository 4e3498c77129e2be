"""Stop strings over text that arrives in pieces, with the least hold-back.

Every stop string is matched by its own Knuth-Morris-Pratt automaton, so the cost of a character does not depend on how
much text came before. The state of an automaton is the length of the longest proper prefix of its string that the
text ends with; the longest of them is exactly the text that must wait, since it alone may become part of a stop.

        text sent ───────────────┐┌─ held: "DE", a prefix of "DEF"
        A B C A B C D E A B C D E

The match that ends first wins; of those that end at the same character, the longest.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """The stop strings of a request, shared by its sequences."""

    __slots__ = ("_borders", "firsts", "include", "strings")

    def __init__(self, strings: Iterable[str], include: bool = False) -> None:
        """`include`: the stop string belongs to the text. Raises ValueError for an empty string."""
        self.strings = tuple(dict.fromkeys(strings))
        if "" in self.strings:
            raise ValueError("a stop string must not be empty")
        self.firsts = frozenset(string[0] for string in self.strings)
        self.include = include
        self._borders = [[0, 0] for _ in self.strings]

    def border(self, which: int, length: int) -> int:
        """Length of the longest proper border of the first `length` characters of a string.

        The tables grow only as deep as matches go, so that 64 long strings cost nothing at the start of a request.
        """
        table = self._borders[which]
        string = self.strings[which]
        while len(table) <= length:
            char = string[len(table) - 1]
            border = table[-1]
            while border and string[border] != char:
                border = table[border]
            table.append(border + 1 if string[border] == char else 0)
        return table[length]


class StopMatcher:
    """One sequence's state."""

    __slots__ = ("_held", "_states", "_stops", "matched")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._states = [0] * len(stops.strings)
        self._held = ""
        self.matched: str | None = None
        """The stop string, once one was found; nothing may be pushed after that."""

    def push(self, text: str, armed: bool = True) -> str:
        """The text that may be sent now. Stops that end in this piece count only if it is `armed`."""
        stops = self._stops
        if not self._held and stops.firsts.isdisjoint(text):
            return text
        states = self._states
        buffer = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            longest = 0
            for which, string in enumerate(stops.strings):
                state = states[which]
                while state and string[state] != char:
                    state = stops.border(which, state)
                if string[state] == char:
                    state += 1
                    if state == len(string):
                        longest = max(longest, state)
                        state = stops.border(which, state)
                states[which] = state
            if longest and armed:
                self.matched = buffer[end - longest : end]
                self._held = ""
                return buffer[: end if stops.include else end - longest]
        sent = len(buffer) - max(states)
        self._held = buffer[sent:]
        return buffer[:sent]

    def flush(self) -> str:
        """The end of the text: what was held back is text after all."""
        held, self._held = self._held, ""
        return held
