"""ChatReply: the pieces of an answer as a chat's message, and as the deltas of its chunks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from server.pieces import CallArguments, CallStart, Content, Piece, Reasoning

REASONING_FIELDS = {
    "both": ("reasoning_content", "reasoning"),
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
}


Delta = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatReply:
    """How one request is answered."""

    reasoning: tuple[str, ...] = REASONING_FIELDS["both"]
    """Fields that hold reasoning; none: it is left out."""
    customs: frozenset[str] = frozenset()
    """Names of custom tools."""
    legacy: bool = False
    """A call goes into the deprecated `function_call`."""

    def message(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """A whole answer. Content is null where there are only calls or reasoning."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[tuple[CallStart, list[str]]] = []
        for piece in pieces:
            match piece:
                case Content(text):
                    texts.append(text)
                case Reasoning(text):
                    thoughts.append(text)
                case CallStart():
                    calls.append((piece, []))
                case CallArguments(index, text):
                    calls[index][1].append(text)
        content = "".join(texts) or (None if calls or thoughts else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if thoughts:
            message |= dict.fromkeys(self.reasoning, "".join(thoughts))
        if calls and self.legacy:
            start, arguments = calls[0]
            message["function_call"] = {"name": start.name, "arguments": "".join(arguments)}
        elif calls:
            message["tool_calls"] = [self._call(start, "".join(arguments)) for start, arguments in calls]
        return message

    def _call(self, start: CallStart, arguments: str) -> dict[str, Any]:
        if start.name in self.customs:
            return {"id": start.id, "type": "custom", "custom": {"name": start.name, "input": arguments}}
        return {"id": start.id, "type": "function", "function": {"name": start.name, "arguments": arguments}}

    def deltas(self, pieces: Iterable[Piece], customs: set[int]) -> list[Delta]:
        """A delta for every piece. `customs`: indices of the choice's calls that are custom, kept by whoever calls."""
        deltas: list[Delta] = []
        for piece in pieces:
            match piece:
                case Content(text):
                    deltas.append({"content": text})
                case Reasoning(text):
                    if self.reasoning:
                        deltas.append(dict.fromkeys(self.reasoning, text))
                case CallStart(index, id, name):
                    if name in self.customs:
                        customs.add(index)
                        # No `type`: in OpenAI's own types a streamed call is a function.
                        deltas.append(_calls({"index": index, "id": id, "custom": {"name": name, "input": ""}}))
                    elif self.legacy:
                        deltas.append({"function_call": {"name": name, "arguments": ""}})
                    else:
                        function = {"name": name, "arguments": ""}
                        deltas.append(_calls({"index": index, "id": id, "type": "function", "function": function}))
                case CallArguments(index, text):
                    if index in customs:
                        deltas.append(_calls({"index": index, "custom": {"input": text}}))
                    elif self.legacy:
                        deltas.append({"function_call": {"arguments": text}})
                    else:
                        deltas.append(_calls({"index": index, "function": {"arguments": text}}))
        return deltas

    def finish_reason(self, reason: str) -> str:
        """As it is called on this route."""
        return "function_call" if self.legacy and reason == "tool_calls" else reason


def _calls(call: Delta) -> Delta:
    return {"tool_calls": [call]}
