"""Text that comes in pieces, read one character ahead by generators that yield where they need more of it.

    feed("<tool") ─▶ generator runs, yields │ feed('_call>{"na') ─▶ goes on where it was │ …

So a format is written down as if the whole text were there, and its result cannot depend on how the text was cut. What
is read since the last `mark` is kept: where the text turns out to be no call, it is content again. Every character is
read once, so the time is linear.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

BLANK = re.compile(r"\s*")
_STRING = re.compile(r'[^"\\\x00-\x1f]*')


class Fault(Exception):
    """The text is not what it began as."""


class Reader:
    __slots__ = ("_before", "_chunk", "_ended", "_held", "_mark", "_pos")

    def __init__(self) -> None:
        self._chunk = ""
        self._pos = 0
        self._ended = False
        self._before = 0
        """Length of the earlier chunks."""
        self._held: list[str] = []
        """What was read since the mark, in earlier chunks."""
        self._mark = 0

    def feed(self, text: str) -> None:
        """The next piece; everything before it has been read."""
        self._held.append(self._chunk[self._mark :])
        self._before += len(self._chunk)
        self._chunk, self._pos, self._mark = text, 0, 0

    def end(self) -> None:
        self.feed("")
        self._ended = True

    @property
    def position(self) -> int:
        """Characters read so far."""
        return self._before + self._pos

    def mark(self) -> None:
        """What was read so far will not be asked for again."""
        self._held.clear()
        self._mark = self._pos

    def held(self) -> str:
        """What was read since the mark, which moves here."""
        text = "".join(self._held) + self._chunk[self._mark : self._pos]
        self.mark()
        return text

    def peek(self) -> Steps[str]:
        """The next character, "" at the end of the text."""
        while self._pos == len(self._chunk):
            if self._ended:
                return ""
            yield
        return self._chunk[self._pos]

    def skip(self) -> None:
        """Past the character that `peek` gave."""
        self._pos += 1

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """All characters that a pattern `[…]*` covers from here."""
        parts = []
        while True:
            match = pattern.match(self._chunk, self._pos)
            assert match is not None
            parts.append(match[0])
            self._pos = match.end()
            if self._pos < len(self._chunk) or self._ended:
                return "".join(parts)
            yield

    @property
    def exhausted(self) -> bool:
        """Whether all that has come was read."""
        return self._pos == len(self._chunk)

    def chunk(self, pattern: re.Pattern[str]) -> str:
        """The same as far as it has come."""
        match = pattern.match(self._chunk, self._pos)
        assert match is not None
        self._pos = match.end()
        return match[0]

    def blank(self) -> Steps[None]:
        """Past white space."""
        yield from self.run(BLANK)

    def expect(self, text: str) -> Steps[None]:
        """Past exactly this text. Raises Fault."""
        for char in text:
            if (yield from self.peek()) != char:
                raise Fault
            self.skip()

    def one_of(self, texts: tuple[str, ...]) -> Steps[str | None]:
        """Past one of these texts, none of which begins another. None where there is none: past what began as one."""
        length = 0
        while texts:
            char = yield from self.peek()
            texts = tuple(text for text in texts if text[length] == char)
            if not texts:
                return None
            self.skip()
            length += 1
            if len(texts[0]) == length:
                return texts[0]
        return None

    def string(self) -> Steps[str]:
        """A JSON string, quotes and escapes as they are. Raises Fault."""
        parts = []
        yield from self.expect('"')
        while True:
            parts.append((yield from self.run(_STRING)))
            char = yield from self.peek()
            if char not in ('"', "\\"):
                raise Fault
            self.skip()
            if char == '"':
                return '"' + "".join(parts) + '"'
            escaped = yield from self.peek()
            if not escaped:
                raise Fault
            self.skip()
            parts.append(char + escaped)
