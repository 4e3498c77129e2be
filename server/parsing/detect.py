"""AnswerFormats: how this model writes calls and reasoning, found in the text of its chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from server.parsing.answer import AnswerFormat
from server.parsing.formats import GRANITE, HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, PYTHONIC, TOOL_FORMATS, ToolFormat
from server.parsing.reasoning import REASONING_FORMATS, ReasoningFormat
from server.tools import ToolUse

_SIGNS = (
    ("[TOOL_CALLS]", MISTRAL),
    ("<|tool_call|>", GRANITE),
    ("<tool_call>", HERMES),
    ("<|python_tag|>", LLAMA),
    ('"parameters": dictionary of argument name and its value', LLAMA),
    ("<|python_start|>", PYTHONIC),
    ("params_name1=params_value1", PYTHONIC),
)
"""What a template says of calls; the first that is found decides."""


class Specials(Protocol):
    """What is asked of a tokenizer (`model.tokenizer.Tokenizer` has it)."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_text(self, token_id: int) -> str: ...


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """Of one model, for all requests."""

    tools: ToolFormat | None = HERMES
    """None: calls are not told apart from text."""
    reasoning: ReasoningFormat | None = None
    native: bool = False
    """The template knows the reasoning, so that the model is expected to begin with it, whatever comes next."""
    special: Mapping[str, int] = field(default_factory=dict)
    """Markers that are special tokens, which as text would be left out, and which no text of a grammar matches."""

    def answer(self, use: ToolUse, split: bool = True, inside: bool = False) -> AnswerFormat:
        """For one request. `split`: tell reasoning apart; `inside`: the prompt ends in the middle of it."""
        whole = use.whole
        return AnswerFormat(
            tools=self.tools if use.callable else None,
            names=use.allowed,
            customs=frozenset(tool.name for tool in use.callable if tool.custom),
            single=not use.parallel,
            whole=None if whole is None else whole.name,
            reasoning=self.reasoning if split else None,
            inside=inside,
        )

    def shown(self, answer: AnswerFormat) -> frozenset[int]:
        """Special tokens whose text is needed to read an answer. Those of reasoning also where it stays text."""
        markers = {*(answer.tools.markers if answer.tools else ()), *self._thought_markers}
        return frozenset(id for text, id in self.special.items() if text in markers)

    @property
    def _thought_markers(self) -> tuple[str, ...]:
        return () if self.reasoning is None else (self.reasoning.open, self.reasoning.close)

    def inside(self, prompt: str, continued: str | None = None) -> bool:
        """Whether the prompt ends in the middle of reasoning. `continued`: the message that the answer goes on with;
        nothing else of what a client wrote counts."""
        if self.reasoning is None:
            return False
        if continued is not None:
            return continued.rfind(self.reasoning.open) > continued.rfind(self.reasoning.close)
        return prompt.rstrip().endswith(self.reasoning.open)

    def thinks(self, prompt: str) -> bool:
        """Whether reasoning may come first: the template knows it, and the prompt has not closed it."""
        return self.native and self.reasoning is not None and not prompt.rstrip().endswith(self.reasoning.close)


def detect(template: str, tokenizer: Specials, tools: str = "auto", reasoning: str = "auto") -> AnswerFormats:
    """`tools` and `reasoning` are a format's name, auto or none."""
    call = _tool_format(template) if tools == "auto" else TOOL_FORMATS.get(tools)
    if call is MISTRAL and "[ARGS]" in template:
        call = MISTRAL_NAMED
    known = _reasoning_format(template)
    thought = known if reasoning == "auto" else REASONING_FORMATS.get(reasoning)
    formats = AnswerFormats(call, thought, native=thought is not None and thought is known)
    markers = {*(call.markers if call else ()), *((thought.open, thought.close) if thought else ())}
    return replace(formats, special=dict(_special(tokenizer, markers)))


def _tool_format(template: str) -> ToolFormat:
    """Hermes where the template says nothing: with it, models are told how to write calls that know of none."""
    return next((format for sign, format in _SIGNS if sign in template), HERMES)


def _reasoning_format(template: str) -> ReasoningFormat | None:
    return next(
        (format for format in REASONING_FORMATS.values() if format.open in template or format.close in template), None
    )


def _special(tokenizer: Specials, markers: set[str]) -> Iterable[tuple[str, int]]:
    for token in sorted(tokenizer.special_ids):
        if (text := tokenizer.token_text(token)) in markers:
            yield text, token
