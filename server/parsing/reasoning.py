"""Where the reasoning at the beginning of an answer ends.

    <think>  I wonder …  </think>   The answer
    └──────── block ──────────────┘└── rest ──┘
             └ thought ┘

Reasoning only ever comes first: a marker further on is text.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_BLANK = 64
"""White space before the opening marker; more, and the answer has no reasoning."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """What stands before and behind the reasoning."""

    name: str
    open: str
    close: str


REASONING_FORMATS = {
    format.name: format
    for format in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("thinking", "<thinking>", "</thinking>"),
        ReasoningFormat("thought", "<thought>", "</thought>"),
        ReasoningFormat("reasoning", "<reasoning>", "</reasoning>"),
        ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
    )
}


class ReasoningSplitter:
    """One answer's text, cut in two. What it makes of a text does not depend on how the text came in pieces."""

    __slots__ = ("_begun", "_close", "_gap", "_held", "_open", "inside", "opened", "undecided")

    def __init__(self, format: ReasoningFormat, inside: bool = False) -> None:
        """`inside`: the prompt ended with the opening marker."""
        self._open, self._close = format.open, format.close
        self.undecided = not inside
        """All text so far may still become the opening marker."""
        self.inside = inside
        self.opened = inside
        self._held = ""
        """Undecided: all text. Inside: what may become the closing marker."""
        self._begun = False
        self._gap: list[str] = []
        """White space behind the thought so far: it goes if the closing marker follows."""

    def push(self, text: str) -> tuple[str, str, str]:
        """(block, thought, rest): more of the raw reasoning with its markers, of the reasoning alone, of what follows.

        The block comes at once; the thought without what may still become part of the closing marker.
        """
        if self.undecided:
            return self._decide(text)
        return self._inside(text) if self.inside else ("", "", text)

    def finish(self) -> tuple[str, str, str]:
        """What was held back. Reasoning that nothing closed ends here."""
        held, self._held = self._held, ""
        if self.inside:
            return "", self._thought(held), ""
        self.undecided = False
        return "", "", held

    def _decide(self, text: str) -> tuple[str, str, str]:
        held = self._held + text
        bare = held.lstrip()
        blank = len(held) - len(bare)
        if blank <= MAX_BLANK and len(bare) < len(self._open) and self._open.startswith(bare):
            self._held = held
            return "", "", ""
        self._held, self.undecided = "", False
        if blank > MAX_BLANK or not bare.startswith(self._open):
            return "", "", held
        self.inside = self.opened = True
        start = blank + len(self._open)
        block, thought, rest = self._inside(held[start:])
        return held[:start] + block, thought, rest

    def _inside(self, text: str) -> tuple[str, str, str]:
        joint = self._held + text
        end = joint.find(self._close)
        if end < 0:
            keep = _overlap(joint, self._close)
            self._held = joint[len(joint) - keep :]
            return text, self._thought(joint[: len(joint) - keep]), ""
        behind = end + len(self._close)
        block, thought = joint[len(self._held) : behind], self._thought(joint[:end])
        self._held, self.inside = "", False
        return block, thought, joint[behind:]

    def _thought(self, text: str) -> str:
        """The text without white space at either end of the reasoning, as far as that is known."""
        bare = text.rstrip()
        if not bare:
            self._gap.append(text)
            return ""
        gap = "".join(self._gap) if self._begun else ""
        self._gap = [text[len(bare) :]]
        bare = bare if self._begun else bare.lstrip()
        self._begun = True
        return gap + bare


def _overlap(text: str, marker: str) -> int:
    """Length of the longest proper beginning of `marker` that `text` ends with."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
