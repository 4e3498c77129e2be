"""Calls: what all formats of tool calls have in common, and the pieces that come of reading them.

A call begins for the client once its name is known and its arguments have begun as those of a call must: an object,
its first key, the beginning of a value. From there on arguments go out as they come, verbatim. Whatever went wrong
before is content, as the model wrote it; whatever goes wrong later can't be taken back, and the call ends where its
braces do.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Set
from typing import Any

from server.parsing.reader import BLANK, Fault, Reader, Steps
from server.pieces import CallArguments, CallStart, Content, Piece
from server.tools import INPUT

ARGUMENTS = ("arguments", "parameters")
"""The key of a call's arguments, by any of its names."""
_VALUE_START = tuple('"{[-0123456789tfn')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_PLAIN = re.compile(r'[^"{}\[\]]*')
_OPEN = re.compile(r'[^"{}]*')
_QUOTED = re.compile(r'[^"\\]*')


def new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class Calls:
    """Reads one answer's content; formats (`server.parsing.formats`) say in which order.

    The pieces of what was read are in `out`.
    """

    __slots__ = (
        "_beside",
        "_blank",
        "_new_id",
        "_quiet",
        "_single",
        "_turns",
        "begun",
        "customs",
        "names",
        "out",
        "reader",
        "start",
        "whole",
    )

    def __init__(
        self,
        names: Set[str],
        customs: Set[str] = frozenset(),
        single: bool = False,
        new_id: Callable[[], str] = new_id,
    ) -> None:
        """`names`: what may be called; `customs`: those of them that take a text. `single`: only the first call counts,
        later ones are left out."""
        self.reader = Reader()
        self.start = 0
        """Where in the model's text the reader's begins."""
        self.out: list[Piece] = []
        self.names = names
        self.customs = customs
        self.begun = 0
        """Calls that began; `whole`: those whose arguments are complete."""
        self.whole = 0
        self._single = single
        self._new_id = new_id
        self._quiet = False
        """The call that is being read is left out."""
        self._turns = 0
        """Calls that began, those that are left out too."""
        self._beside = False
        """No content since the last call."""
        self._blank: list[str] = []
        """White space that is content only if content follows."""

    def content(self, text: str, behind: int = 0) -> None:
        """Text that was read, up to `behind` characters before where the reader is, is content."""
        if text:
            text = "".join(self._blank) + text
            self.out.append(Content(text, self.start + self.reader.position - behind - len(text)))
            self._blank.clear()
            self._beside = False

    def text_until(self, markers: tuple[str, ...]) -> Steps[bool]:
        """Past one of the markers, all before it content, but for white space beside a call. False at the end."""
        reader = self.reader
        firsts = "".join(sorted({marker[0] for marker in markers}))
        inside = re.compile(f"[^{re.escape(firsts)}]*")
        while True:
            reader.mark()
            if not (yield from reader.peek()):
                blank = "".join(self._blank)
                self._blank.clear()
                if not self._beside:
                    self.content(blank)
                return False
            text = reader.chunk(inside)
            bare = text.rstrip()
            self.content(bare, len(text) - len(bare))
            if len(bare) < len(text):
                self._blank.append(text[len(bare) :])
            if not text:
                reader.mark()
                if (yield from reader.one_of(markers)) is not None:
                    return True
                self.content(reader.held())

    def failed(self) -> None:
        """What was read since the mark is content."""
        text = self.reader.held()
        if text.strip():
            self.content(text)
        else:
            self._blank.append(text)

    def committed(self) -> None:
        """What was read so far belongs to a call."""
        self.reader.mark()
        self._blank.clear()
        self._beside = True

    def json_calls(self) -> Steps[None]:
        """One call, or a list of calls. Raises Fault."""
        reader = self.reader
        yield from reader.blank()
        if (yield from reader.peek()) != "[":
            yield from self.json_call()
            return
        reader.skip()
        while True:
            yield from reader.blank()
            yield from self.json_call()
            if not (yield from self.another(",")):
                break
        yield from self.closer("]")

    def another(self, separator: str) -> Steps[bool]:
        """Past white space, and past the character between two calls where another one follows."""
        reader = self.reader
        self._blank.append((yield from reader.run(BLANK)))
        reader.mark()
        if (yield from reader.peek()) != separator:
            return False
        reader.skip()
        yield from reader.blank()
        return (yield from reader.peek()) != ""

    def closer(self, marker: str) -> Steps[None]:
        """Past white space and the marker behind a call, or what the end of the text has left of it. Else both stay."""
        reader = self.reader
        self._blank.append((yield from reader.run(BLANK)))
        reader.mark()
        if (yield from reader.one_of((marker,))) is not None or not (yield from reader.peek()):
            self.committed()
        else:
            self.failed()

    def json_call(self) -> Steps[None]:
        """{"name": …, "arguments": {…}}, keys in any order; others are passed over. Raises Fault."""
        reader, begun = self.reader, self._turns
        try:
            yield from self._keys()
        except Fault:
            # Behind the arguments there is nothing that the end of the text could cut.
            if begun == self._turns or (yield from reader.peek()):
                raise
        self.committed()

    def _keys(self) -> Steps[None]:
        reader, begun = self.reader, self._turns
        name: str | None = None
        arguments = "{}"
        yield from reader.expect("{")
        while True:
            yield from reader.blank()
            key = _decoded((yield from reader.string()))
            yield from reader.blank()
            yield from reader.expect(":")
            yield from reader.blank()
            if key == "name" and name is None:
                name = self.known(_decoded((yield from reader.string())))
            elif key not in ARGUMENTS or begun != self._turns:
                yield from self._value()
            elif name is not None and (yield from reader.peek()) == "{":
                yield from self.arguments(name)
            else:
                arguments = _arguments((yield from self._value()))
            yield from reader.blank()
            char = yield from reader.peek()
            if char not in (",", "}"):
                raise Fault
            reader.skip()
            if char == "}":
                break
        if begun == self._turns:
            self.call(self.known(name), arguments)

    def known(self, name: object) -> str:
        """Raises Fault where nothing of that name may be called."""
        if not isinstance(name, str) or name not in self.names:
            raise Fault
        return name

    def arguments(self, name: str) -> Steps[None]:
        """An object, passed on as it comes. Raises Fault as long as it has not begun well."""
        reader = self.reader
        yield from reader.expect("{")
        begin = "{" + (yield from reader.run(BLANK))
        char = yield from reader.peek()
        if char != "}" or name in self.customs:
            key = yield from reader.string()
            begin += key + (yield from reader.run(BLANK))
            yield from reader.expect(":")
            begin += ":" + (yield from reader.run(BLANK))
            char = yield from reader.peek()
            if char not in _VALUE_START if name not in self.customs else (char != '"' or _decoded(key) != INPUT):
                raise Fault
        self._start(name)
        if name in self.customs:
            yield from self._text()
        else:
            self._argue(begin)
            yield from self._braces()

    def _braces(self) -> Steps[None]:
        """To the brace that closes the arguments, all of it passed on. Or to the end of the text."""
        reader = self.reader
        depth, quoted, escaped = 1, False, False
        while depth:
            if not escaped:
                reader.chunk(_QUOTED if quoted else _OPEN)
            if reader.exhausted:
                self._argue(reader.held())
            char = yield from reader.peek()
            if not char:
                return
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = quoted
            elif char == '"':
                quoted = not quoted
            elif not quoted:
                depth += {"{": 1, "}": -1}.get(char, 0)
            reader.skip()
        self._argue(reader.held())
        self.whole += not self._quiet

    def _text(self) -> Steps[None]:
        """A custom tool's input out of the string that holds it, and the closing brace."""
        reader, high = self.reader, ""
        reader.skip()
        while True:
            if text := reader.chunk(_QUOTED):
                self._argue(high + text)
                high = ""
            char = yield from reader.peek()
            if char not in ('"', "\\"):
                if char:
                    continue
                self._argue(high)
                return
            reader.skip()
            if char == '"':
                break
            raw = "\\" + (yield from self._characters(1))
            if raw == "\\u":
                raw += yield from self._characters(4)
            pair = _decoded(f'"{high}{raw}"') if high else None
            if pair is not None and len(pair) == 1:
                text, high = pair, ""
            else:
                # Half of a pair waits for the other; one that stays alone is no character.
                self._argue(high)
                text = _decoded(f'"{raw}"')
                half = text is not None and "\ud800" <= text <= "\udfff"
                high = raw if half else ""
                text = "" if half else raw if text is None else text
            self._argue(text)
        self._argue(high)
        self.committed()
        self.whole += not self._quiet
        yield from reader.blank()
        yield from reader.expect("}")

    def _characters(self, count: int) -> Steps[str]:
        text = ""
        while len(text) < count and (char := (yield from self.reader.peek())):
            self.reader.skip()
            text += char
        return text

    def call(self, name: str, arguments: str) -> None:
        """A call whose arguments, a JSON object, are all there. Raises Fault."""
        if name in self.customs:
            text = json.loads(arguments).get(INPUT)
            if not isinstance(text, str):
                raise Fault
            arguments = text
        if any("\ud800" <= char <= "\udfff" for char in arguments):
            raise Fault
        self._start(name)
        self._argue(arguments)
        self.whole += not self._quiet

    def _start(self, name: str) -> None:
        self.committed()
        self._turns += 1
        self._quiet = self._single and self.begun > 0
        if not self._quiet:
            self.out.append(CallStart(self.begun, self._new_id(), name))
            self.begun += 1

    def _argue(self, text: str) -> None:
        if text and not self._quiet:
            self.out.append(CallArguments(self.begun - 1, text))

    def _value(self) -> Steps[str]:
        """Any JSON value, as it is. Raises Fault."""
        reader = self.reader
        char = yield from reader.peek()
        if char == '"':
            return (yield from reader.string())
        parts: list[str] = []
        depth = 0
        while True:
            parts.append((yield from reader.run(_SCALAR if not depth else _PLAIN)))
            char = yield from reader.peek()
            if char == '"' and depth:
                parts.append((yield from reader.string()))
                continue
            if char and char in "{[":
                depth += 1
            elif char and char in "}]" and depth:
                depth -= 1
            else:
                break
            reader.skip()
            parts.append(char)
            if not depth:
                break
        text = "".join(parts)
        if _decoded(text) is None and text != "null":
            raise Fault
        return text


def _decoded(text: str) -> Any:
    """The JSON value, None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _arguments(value: str) -> str:
    """Arguments that came otherwise than as an object: none, or an object written in a string. Raises Fault."""
    decoded = _decoded(value)
    if decoded is None:
        return "{}"
    if isinstance(decoded, str):
        value, decoded = decoded, _decoded(decoded)
    if not isinstance(decoded, dict):
        raise Fault
    return value
