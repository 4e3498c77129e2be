"""Chat templates: messages to the text of a prompt."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import jinja2

from model.config_fields import MAX_DEPTH, depth
from server.errors import RequestError, TemplateError, Unsupported
from server.parsing.reasoning import REASONING_FORMATS
from server.sandbox import Refused, Sandbox

MAX_TEMPLATE_CHARS = 1_000_000
MAX_MESSAGE = 500
"""Characters of a template's own error message that a client gets."""

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"})
"""Variables that `chat_template_kwargs` cannot set."""

SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn reasoning on and off."""
EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")

_NINE = re.compile(r"\|\s*length\s*[!=]=\s*9\b")
"""Mistral's templates refuse ids of calls that have not 9 letters and digits."""
_SHORT = re.compile(r"[A-Za-z0-9]{9}")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, and how it becomes a prompt. Messages and tools are JSON objects as the client sent them."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    template: str | None = None
    """Jinja source that the client brought."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The prompt ends with the last message's content, so that the model goes on with it."""
    reasoning_effort: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """chat_template_kwargs: only what the template reads gets there, and nothing that is reserved."""


class ChatTemplate:
    """One compiled template. Thread-safe."""

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str] | None = None,
        fold_system: bool = True,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`tokens`: bos_token and the like. `fold_system`: where the template refuses a system message, put it before
        the first user message. Raises TemplateError where the source is no template."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateError(f"chat template: more than {MAX_TEMPLATE_CHARS} characters")
        self.source = source
        self._tokens = dict(tokens or {})
        self._fold_system = fold_system
        self._sandbox = Sandbox(now)
        try:
            self._template, self.variables = self._sandbox.compile_chat(source)
        except jinja2.TemplateSyntaxError as fault:
            raise TemplateError(f"chat template, line {fault.lineno}: {_words(fault)}") from None
        except ValueError as fault:  # a number of thousands of digits
            raise TemplateError(f"chat template: {_words(fault)}") from None
        except (RecursionError, SyntaxError, MemoryError):  # of Python's own compiler
            raise TemplateError("chat template: nested too deeply") from None
        self._knows_developer = "developer" in source
        self.knows_tools = "tools" in self.variables
        self.knows_calls = "tool_calls" in source
        """Of earlier messages."""
        self._short_ids = bool(_NINE.search(source))
        self._switch = next((name for name in SWITCHES if name in self.variables), None)
        self._degrees = "reasoning_effort" in self.variables
        self._thinking = any(format.close in source for format in REASONING_FORMATS.values())

    def render(self, chat: Chat, mark: Callable[[str], str] = str, tag: str = "\ufdd0") -> str:
        """The prompt's text. `mark` is applied to every string of the client's; `tag` is a character in none of them.

        Raises TemplateError with the template's own words, Unsupported for content that is not text.
        """
        try:
            return self._attempt(chat, mark, tag)
        except Refused as refusal:
            folded = _folded(chat.messages) if self._fold_system and "system" in str(refusal).lower() else None
            if folded is None:
                raise TemplateError(_words(refusal), param="messages") from None
        try:
            return self._attempt(replace(chat, messages=folded), mark, tag)
        except Refused as refusal:
            raise TemplateError(_words(refusal), param="messages") from None

    def _attempt(self, chat: Chat, mark: Callable[[str], str], tag: str) -> str:
        try:
            try:
                return self._run(chat, mark, tag, parse_arguments=True)
            except TypeError:
                # Some templates put arguments together with text, and so need the string that the client sent.
                return self._run(chat, mark, tag, parse_arguments=False)
        except (Refused, RequestError):
            raise
        except Exception as fault:  # a template may fail in any way that Python knows
            raise TemplateError(f"chat template failed: {_words(fault)}", param="messages") from None

    def _run(self, chat: Chat, mark: Callable[[str], str], tag: str, parse_arguments: bool) -> str:
        messages = [_mapped(self._normalized(message, parse_arguments), mark) for message in chat.messages]
        if chat.continue_final_message:
            messages[-1]["content"] += f"{tag} "
        text = self._sandbox.run(
            self._template,
            {
                **{key: _mapped(value, mark) for key, value in self.accepted(chat.kwargs).items()},
                **self._tokens,
                "messages": messages,
                "tools": _mapped(chat.tools, mark) or None,
                "documents": _mapped(chat.documents, mark) or None,
                "add_generation_prompt": chat.add_generation_prompt,
            },
        )
        if not chat.continue_final_message:
            return text
        end = text.rfind(tag)
        if end < 0:
            raise TemplateError("the chat template leaves out the message to be continued", param="messages")
        # Where the template strips content, the blank behind the tag is gone, and blanks before it have to go too.
        return text[:end] if text.startswith(f"{tag} ", end) else text[:end].rstrip()

    def effort(self, effort: str | None) -> dict[str, Any]:
        """The template's own variables for a `reasoning_effort`. Raises Unsupported where it has none for it.

        A template that only has a switch tells no degrees apart: all but none turn reasoning on.
        """
        if effort is None or (effort == "none" and self._thinks_not):
            return {}
        switch = {} if self._switch is None else {self._switch: effort != "none"}
        degree = {"reasoning_effort": effort} if self._degrees and effort != "none" else {}
        if not switch and not degree:
            supported = [*(["none"] if self._thinks_not else []), *(EFFORTS if self._degrees else [])]
            what = ", ".join(supported) or "none of them; leave it out"
            raise Unsupported(
                f"reasoning_effort: {effort} is not supported by this model's chat template (supported: {what})",
                param="reasoning_effort",
            )
        return switch | degree

    @property
    def _thinks_not(self) -> bool:
        """The template knows nothing of reasoning."""
        return self._switch is None and not self._degrees and not self._thinking

    def accepted(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Those that the template reads and a client may set."""
        names = self.variables - RESERVED - self._tokens.keys()
        return {name: value for name, value in kwargs.items() if name in names}

    def _normalized(self, message: Mapping[str, Any], parse_arguments: bool) -> Message:
        """A message as templates expect it.

        Content is a string, the texts of its parts joined; null is "" there, and elsewhere the same as absent. Tool
        arguments are an object where they are JSON of one. `developer` is `system` unless the template knows it.
        """
        result: Message = _present(message)
        if result.get("role") == "developer" and not self._knows_developer:
            result["role"] = "system"
        result["content"] = _content(message.get("content"))
        if self._short_ids:
            _shorten(result)
        if parse_arguments and "tool_calls" in result:
            result["tool_calls"] = [_parsed(call) for call in result["tool_calls"]]
        return result


def _mapped(value: Any, mark: Callable[[str], str]) -> Any:
    """A copy with every string marked, keys too."""
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, Mapping):
        return {mark(key): _mapped(item, mark) for key, item in value.items()}
    return [_mapped(item, mark) for item in value] if isinstance(value, list | tuple) else value


def _present(value: Any) -> Any:
    """A copy without nulls."""
    if isinstance(value, Mapping):
        return {key: _present(item) for key, item in value.items() if item is not None}
    return [_present(item) for item in value] if isinstance(value, list | tuple) else value


def _content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise Unsupported("messages: content other than text is not supported by this model", param="messages")
        texts.append(text)
    return "".join(texts)


def _parsed(call: Message) -> Message:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = parsed_object(function["arguments"] or "{}")
    return call if arguments is None else {**call, "function": {**function, "arguments": arguments}}


def parsed_object(text: str) -> dict[str, Any] | None:
    """The object in a JSON text; None where it is none, or nested too deeply for whoever writes it again."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and depth(value) <= MAX_DEPTH else None


def _shorten(message: Message) -> None:
    """Ids of calls in 9 letters and digits, the same ones for the same id."""
    for holder, key in ((message, "tool_call_id"), *((call, "id") for call in message.get("tool_calls", ()))):
        if (id := holder.get(key)) and not _SHORT.fullmatch(id):
            holder[key] = hashlib.blake2b(id.encode("utf-8", "replace"), digest_size=8).hexdigest()[:9]


def _folded(messages: Sequence[Mapping[str, Any]]) -> list[Message] | None:
    """The system message put before the first user message; None where that cannot be."""
    if len(messages) < 2 or messages[0]["role"] not in ("system", "developer") or messages[1]["role"] != "user":
        return None
    content = f"{_content(messages[0].get('content'))}\n\n{_content(messages[1].get('content'))}"
    return [{**messages[1], "content": content}, *map(dict, messages[2:])]


def _words(fault: BaseException) -> str:
    """What a client may read of a failure: no addresses, not too long."""
    text = _ADDRESS.sub("", str(fault)) or type(fault).__name__
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "…"
