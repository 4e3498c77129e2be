"""What an answer consists of, once reasoning and tool calls are told apart from text: the events of every chat-like route."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """More of the text that is meant for the user. Never empty."""

    text: str


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
    """More of a call's arguments. Those of one call, joined, are one JSON object."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments
