"""What an answer consists of once reasoning and calls are told apart from text: the events of every chat-like route."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    """More of the text that is meant for the user. Never empty."""

    text: str
    start: int = field(default=0, compare=False)
    """Where in the text that the model wrote, in code points; its logprobs are found by that."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the text that the model wrote for itself. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. `index` counts the calls of one answer from 0; every CallArguments of it follows."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments. Those of one call, joined, are one JSON object; of a custom tool, its input's text.

    What the model cut short, or got wrong further in, is passed on as it is.
    """

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


def joined(pieces: list[Piece]) -> list[Piece]:
    """The same with neighbours of one kind made one."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(piece, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + piece.text, last.start)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + piece.text)
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments) and piece.index == last.index:
            result[-1] = CallArguments(piece.index, last.text + piece.text)
        else:
            result.append(piece)
    return result
