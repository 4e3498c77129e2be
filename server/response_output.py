"""ResponseOutput: the pieces of an answer as the items of a response, and as the events that tell of them.

    response.output_item.added ─ content_part.added ─ delta* ─ done ─ content_part.done ─ output_item.done     a message
                               └ reasoning_text.delta* ─ done ──────────────────────────┘
                               └ function_call_arguments.delta* ─ done ─────────────────┘

What is streamed and what is not are the same items: both are made here.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from server.logprobs import ChatToken, TokenEntry, chat_logprobs
from server.pieces import CallArguments, CallStart, Content, Piece, Reasoning

Event = dict[str, Any]
Item = dict[str, Any]


class ResponseOutput:
    """One answer."""

    def __init__(self, customs: frozenset[str] = frozenset(), scored: bool = False) -> None:
        """`customs`: names of custom tools. `scored`: texts have logprobs."""
        self.items: list[Item] = []
        """Complete but for the last one, which may still grow."""
        self._customs = customs
        self._scored = scored
        self._texts: list[str] = []
        """Of the item that is open."""
        self._open: Item | None = None
        self._logprobs: list[ChatToken] = []
        """Of the open message."""
        self._waiting: deque[TokenEntry] = deque()
        """Tokens of which it is not known yet whether their text is that of a message."""
        self._span = 0, 0
        """Of the open message, so far, in the model's text."""

    def feed(self, pieces: Iterable[Piece], entries: Iterable[TokenEntry] = ()) -> list[Event]:
        """What the pieces of one step bring. `entries`: its tokens; those of reasoning and calls are left out."""
        events: list[Event] = []
        self._waiting += entries
        for piece in pieces:
            match piece:
                case Content(text, start):
                    if self._kind != "message":
                        events += self._begin(self._message())
                        self._span = start, start
                    scores = self._scores(start, start + len(text))
                    self._logprobs += scores
                    events.append(self._delta("output_text", text, content_index=0, logprobs=scores))
                case Reasoning(text):
                    if self._kind != "reasoning":
                        events += self._begin(_reasoning())
                    events.append(self._delta("reasoning_text", text, content_index=0))
                case CallStart():
                    events += self._begin(self._call(piece))
                case CallArguments(_, text):
                    custom = self._kind == "custom_tool_call"
                    events.append(self._delta("custom_tool_call_input" if custom else "function_call_arguments", text))
        return events

    def _scores(self, start: int, end: int) -> list[ChatToken]:
        """Of the tokens that the open message takes up with its text from `start` to `end`."""
        first, last = self._span
        self._span = first, end
        found = []
        while self._waiting and self._waiting[0].offset < end:
            entry = self._waiting.popleft()
            behind = entry.offset + (len(entry.text) or 1)
            # A token comes with the last of its text, and so perhaps later than the rest of it.
            if behind > start or (entry.offset < last and behind > first):
                cut = max(0, first - entry.offset)  # of a token that begins before the message
                found.append(replace(entry, text=entry.text[cut:]) if cut else entry)
        return chat_logprobs(found)

    def finish(self, complete: bool) -> list[Event]:
        """The end; an answer without anything is an empty message."""
        events = [] if self.items else self._begin(self._message())
        return events + self._end("completed" if complete else "incomplete")

    @property
    def _kind(self) -> str | None:
        return None if self._open is None else str(self._open["type"])

    def _message(self) -> Item:
        return {"id": _id("msg"), "type": "message", "role": "assistant", "status": "in_progress", "content": []}

    def _call(self, start: CallStart) -> Item:
        if start.name in self._customs:
            return {"id": _id("ctc"), "type": "custom_tool_call", "call_id": start.id, "name": start.name, "input": ""}
        item = {"id": _id("fc"), "type": "function_call", "call_id": start.id, "name": start.name, "arguments": ""}
        return {**item, "status": "in_progress"}

    def _begin(self, item: Item) -> list[Event]:
        events = self._end("completed")
        self._open = item
        self.items.append(item)
        events.append({"type": "response.output_item.added", "output_index": self._index, "item": {**item}})
        if item["type"] == "message":
            events.append(self._about("content_part.added", content_index=0, part=self._text_part("", [])))
        return events

    def _end(self, status: str) -> list[Event]:
        """Closes the open item."""
        item, text = self._open, "".join(self._texts)
        if item is None:
            return []
        events: list[Event] = []
        match item["type"]:
            case "message":
                part = self._text_part(text, self._logprobs)
                item["content"] = [part]
                done = self._about("output_text.done", content_index=0, text=text, logprobs=self._logprobs)
                events += [done, self._about("content_part.done", content_index=0, part=part)]
            case "reasoning":
                item["content"] = [{"type": "reasoning_text", "text": text}]
                events.append(self._about("reasoning_text.done", content_index=0, text=text))
            case "function_call":
                item["arguments"] = text
                events.append(self._about("function_call_arguments.done", name=item["name"], arguments=text))
            case _:
                item["input"] = text
                events.append(self._about("custom_tool_call_input.done", input=text))
        if "status" in item:
            item["status"] = status
        events.append({"type": "response.output_item.done", "output_index": self._index, "item": item})
        self._open = None
        self._texts, self._logprobs = [], []
        return events

    def _delta(self, kind: str, text: str, **fields: Any) -> Event:
        self._texts.append(text)
        return self._about(f"{kind}.delta", delta=text, **fields)

    def _about(self, kind: str, **fields: Any) -> Event:
        """An event about the open item."""
        assert self._open is not None
        return {"type": f"response.{kind}", "item_id": self._open["id"], "output_index": self._index, **fields}

    def _text_part(self, text: str, logprobs: list[ChatToken]) -> dict[str, Any]:
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        return {**part, "logprobs": logprobs} if self._scored else part

    @property
    def _index(self) -> int:
        return len(self.items) - 1


def _reasoning() -> Item:
    return {"id": _id("rs"), "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
