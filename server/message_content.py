"""MessageContent: the pieces of an answer as Anthropic's content blocks, and as the events that tell of them.

content_block_start ─ content_block_delta* ─ content_block_stop     for a text, a thought, a call; one after the other
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json

from server.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from server.template import parsed_object

Event = dict[str, Any]
Block = dict[str, Any]
TEXT_FIELD = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
DELTA = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


class MessageContent:
    """One answer."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        """Complete but for the last one, which may still grow."""
        self._texts: list[str] = []
        """Of the block that is open."""
        self._open: Block | None = None

    def feed(self, pieces: Iterable[Piece]) -> list[Event]:
        """What the pieces of one step bring."""
        events: list[Event] = []
        for piece in pieces:
            match piece:
                case Content(text):
                    events += self._grow({"type": "text", "text": ""}, text)
                case Reasoning(text):
                    events += self._grow({"type": "thinking", "thinking": "", "signature": ""}, text)
                case CallStart(_, id, name):
                    events += self._begin({"type": "tool_use", "id": id, "name": name, "input": {}})
                case CallArguments(_, text):
                    events.append(self._delta(text))
        return events

    def finish(self) -> list[Event]:
        """Closes the open block. Arguments that were cut short are read as far as they go."""
        block, text = self._open, "".join(self._texts)
        if block is None:
            return []
        if block["type"] == "tool_use":
            block["input"] = arguments(text)
        else:
            block[TEXT_FIELD[block["type"]]] = text
        self._open = None
        self._texts = []
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _grow(self, block: Block, text: str) -> list[Event]:
        events = [] if self._open is not None and self._open["type"] == block["type"] else self._begin(block)
        return [*events, self._delta(text)]

    def _begin(self, block: Block) -> list[Event]:
        events = self.finish()
        self._open = block
        self.blocks.append(block)
        return [*events, {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": {**block}}]

    def _delta(self, text: str) -> Event:
        assert self._open is not None
        self._texts.append(text)
        kind = self._open["type"]
        delta = {"type": DELTA[kind], TEXT_FIELD[kind]: text}
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def arguments(text: str) -> dict[str, Any]:
    """Of a call, or as much of them as there is; what is no object at all becomes none."""
    try:
        value = from_json(text, allow_partial=True)
    except ValueError:
        value = parsed_object(text)  # which takes half a surrogate pair
    return value if isinstance(value, dict) else {}
