"""Calls written in Python: `[f(a=1, b="x"), g()]`. Each is passed on once its closing parenthesis is there, as JSON."""

from __future__ import annotations

import json
import re
from typing import Any

from server.parsing.calls import Calls
from server.parsing.reader import Fault, Steps

_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_PLAIN = re.compile(r"[^\"'()\[\]{}]*")
_STRINGS = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>[rb]?"(?:[^"\\]|\\.)*"|[rb]?'(?:[^'\\]|\\.)*')"""
    r"""|(?P<number>[-+]?(?:\d[\d_]*)?\.?\d[\d_]*(?:[eE][-+]?\d+)?\.?)|(?P<word>[^\W\d][\w-]*)|(?P<sign>[][(){}:,=]))""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_CLOSING = {"[": "]", "{": "}", "(": ")"}
MAX_DEPTH = 64


def pythonic(calls: Calls, begins: tuple[str, ...]) -> Steps[None]:
    """A list of calls, where the answer begins or behind a marker."""
    reader = calls.reader
    yield from reader.blank()
    found = (yield from reader.peek()) == "["
    if not found:
        calls.failed()
    while found or (yield from calls.text_until(begins)):
        found = False
        try:
            yield from reader.blank()
            yield from reader.expect("[")
            while True:
                yield from reader.blank()
                yield from _call(calls)
                if not (yield from calls.another(",")):
                    break
            yield from calls.closer("]")
        except Fault:
            calls.failed()
        else:
            yield from calls.closer("<|python_end|>")


def _call(calls: Calls) -> Steps[None]:
    reader = calls.reader
    name = calls.known((yield from reader.run(_NAME)))
    yield from reader.blank()
    yield from reader.expect("(")
    parts: list[str] = []
    depth = 1
    while depth:
        parts.append((yield from reader.run(_PLAIN)))
        char = yield from reader.peek()
        if not char:
            raise Fault
        reader.skip()
        parts.append(char)
        if char in _STRINGS:
            parts.append((yield from _string(calls, char)))
        else:
            depth += 1 if char in _CLOSING else -1
    calls.call(name, json.dumps(keywords("".join(parts)[:-1]), ensure_ascii=False))


def _string(calls: Calls, quote: str) -> Steps[str]:
    """The rest of a string, its closing quote too."""
    reader, parts = calls.reader, []
    while True:
        parts.append((yield from reader.run(_STRINGS[quote])))
        char = yield from reader.peek()
        if not char:
            raise Fault
        reader.skip()
        parts.append(char)
        if char == quote:
            return "".join(parts)
        parts.append((yield from reader.peek()))
        reader.skip()


class _Tokens:
    """The tokens of a Python expression."""

    def __init__(self, text: str) -> None:
        self._text = text.rstrip()
        self._pos = 0
        self.kind = ""
        self.value = ""
        self.advance()

    def advance(self) -> None:
        if self._pos == len(self._text):
            self.kind = self.value = ""
            return
        match = _TOKEN.match(self._text, self._pos)
        if match is None or match.lastgroup is None:
            raise Fault
        self._pos = match.end()
        self.kind, self.value = match.lastgroup, match[match.lastgroup]

    def take(self, value: str) -> bool:
        """Past this sign, if it is the next token."""
        if self.kind != "sign" or self.value != value:
            return False
        self.advance()
        return True

    def need(self, value: str) -> None:
        if not self.take(value):
            raise Fault


def keywords(text: str) -> dict[str, Any]:
    """Keyword arguments, all of them literals, of Python or of JSON. Raises Fault."""
    tokens = _Tokens(text)
    result: dict[str, Any] = {}
    while tokens.kind:
        if tokens.kind != "word":
            raise Fault
        key = tokens.value
        tokens.advance()
        tokens.need("=")
        result[key] = _literal(tokens, 0)
        if tokens.kind:
            tokens.need(",")
    return result


def _literal(tokens: _Tokens, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise Fault
    kind, value = tokens.kind, tokens.value
    tokens.advance()
    if kind == "string":
        text = _unquoted(value)
        while tokens.kind == "string":
            text += _unquoted(tokens.value)
            tokens.advance()
        return text
    if kind == "number":
        return _number(value)
    if kind == "word" and value in _CONSTANTS:
        return _CONSTANTS[value]
    if kind != "sign" or value not in _CLOSING:
        raise Fault
    closing = _CLOSING[value]
    entries: list[Any] = []
    fields: dict[str, Any] = {}
    while not tokens.take(closing):
        entry = _literal(tokens, depth + 1)
        if closing == "}":
            tokens.need(":")
            fields[entry if isinstance(entry, str) else json.dumps(entry)] = _literal(tokens, depth + 1)
        else:
            entries.append(entry)
        if not tokens.take(","):
            tokens.need(closing)
            break
    return fields if closing == "}" else entries


def _number(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
        json.dumps(number, allow_nan=False)
    except ValueError:
        raise Fault from None
    return number


def _unquoted(text: str) -> str:
    raw = text[0] == "r"
    text = text.lstrip("rb")[1:-1]
    if raw or "\\" not in text:
        return text
    try:
        # Two escapes may be the halves of one character.
        return _ESCAPE.sub(_character, text).encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise Fault from None


def _character(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    if code is None:
        return _ESCAPED.get(match[4], match[4] if match[4] in "\\'\"/" else match[0])
    return chr(int(code, 16)) if int(code, 16) < 0x110000 else match[0]


def python_value(value: Any) -> str:
    """A JSON value as a Python literal."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{python_value(key)}: {python_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(python_value, value)) + "]"
    if value is None or isinstance(value, bool):
        return str(value)
    return json.dumps(value, ensure_ascii=False)
