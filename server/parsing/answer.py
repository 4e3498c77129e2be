"""AnswerParser: a choice's text, in whatever pieces it comes, as reasoning, content and calls.

text ──▶ reasoning │ rest ──▶ tool format: content │ calls ──▶ pieces
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from server.parsing.calls import Calls, new_id
from server.parsing.formats import ToolFormat
from server.parsing.reader import Steps
from server.parsing.reasoning import ReasoningFormat, ReasoningSplitter
from server.pieces import CallArguments, CallStart, Content, Piece, Reasoning, joined


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How to read the answers to one request."""

    tools: ToolFormat | None = None
    """None: no calls are looked for."""
    names: frozenset[str] = frozenset()
    """What may be called. A call of anything else is content."""
    customs: frozenset[str] = frozenset()
    """Those of them that take a text."""
    single: bool = False
    """Only the first call of an answer counts."""
    whole: str | None = None
    """A custom tool whose input is the whole answer."""
    reasoning: ReasoningFormat | None = None
    """None: reasoning is text like all other."""
    inside: bool = False
    """The prompt ended with the marker that opens reasoning."""

    @property
    def plain(self) -> bool:
        """All text is content."""
        return self.tools is None and self.whole is None and self.reasoning is None


class AnswerParser:
    """One choice."""

    __slots__ = ("_begun", "_calls", "_format", "_length", "_new_id", "_splitter", "_steps")

    def __init__(self, format: AnswerFormat, new_id: Callable[[], str] = new_id) -> None:
        self._format = format
        self._new_id = new_id
        self._splitter = None if format.reasoning is None else ReasoningSplitter(format.reasoning, format.inside)
        self._begun = False
        """There was text behind the reasoning that is not white space."""
        self._length = 0
        """Of all text so far. What is not reasoning is always the end of it."""
        self._calls: Calls | None = None
        self._steps: Steps[None] | None = None
        if format.tools is not None and format.whole is None:
            self._calls = Calls(format.names, format.customs, format.single, new_id)
            self._steps = format.tools.read(self._calls, format.tools)
            next(self._steps)

    def feed(self, text: str) -> list[Piece]:
        """What more of the text brings. The pieces of all calls, joined, do not depend on where it was cut."""
        self._length += len(text)
        if self._splitter is None:
            return joined(self._rest(text))
        _, thought, rest = self._splitter.push(text)
        return self._both(thought, rest)

    def finish(self) -> list[Piece]:
        """What was held back at the end of the text."""
        pieces: list[Piece] = []
        if self._splitter is not None:
            _, thought, rest = self._splitter.finish()
            pieces = self._both(thought, rest)
        if self._format.whole is not None and not self._begun and not (self._splitter and self._splitter.inside):
            self._begun = True
            pieces.append(CallStart(0, self._new_id(), self._format.whole))
        if self._calls is not None and self._steps is not None:
            self._calls.reader.end()
            for _ in self._steps:
                raise AssertionError("a format asks for more at the end")
            pieces += self._taken(self._calls)
        return joined(pieces)

    def finish_reason(self, reason: str) -> str:
        """Of the choice: tool_calls where the text stopped and every call in it is whole, else `reason`."""
        if reason != "stop":
            return reason
        called = self._begun if self._format.whole is not None else self._whole_calls
        return "tool_calls" if called else reason

    @property
    def _whole_calls(self) -> bool:
        return self._calls is not None and 0 < self._calls.begun == self._calls.whole

    def _both(self, thought: str, rest: str) -> list[Piece]:
        pieces: list[Piece] = [Reasoning(thought)] if thought else []
        return pieces + self._rest(rest) if rest else pieces

    def _rest(self, text: str) -> list[Piece]:
        """Pieces of what is not reasoning."""
        if not self._begun and self._splitter is not None and self._splitter.opened:
            text = text.lstrip()
        if not text:
            return []
        begun, self._begun = self._begun, True
        if self._format.whole is not None:
            start = [] if begun else [CallStart(0, self._new_id(), self._format.whole)]
            return [*start, CallArguments(0, text)]
        if self._calls is None or self._steps is None:
            return [Content(text, self._length - len(text))]
        if not begun:
            self._calls.start = self._length - len(text)
        self._calls.reader.feed(text)
        next(self._steps)
        return self._taken(self._calls)

    @staticmethod
    def _taken(calls: Calls) -> list[Piece]:
        pieces, calls.out = calls.out, []
        return pieces
