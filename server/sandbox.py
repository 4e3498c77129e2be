"""Jinja for chat templates, with every cost bounded.

Templates come from model files, and the data they read from clients: neither may reach Python, run for long or grow
without limit. Jinja's sandbox keeps a template from Python's internals; a thread can't be killed, so the rest is
metered from inside: loops and calls watch a deadline of CPU time, and whatever makes text longer watches its size.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 1.0
"""CPU time of one rendering."""
MAX_CHARS = 32 * 1024 * 1024
"""Of the output, and of any text on the way to it."""
MAX_NUMBER = 100_000
"""Largest integer that a template may hand to a function: widths and counts become memory."""

_WIDE = re.compile(r"\d{5}|\*|:[^}]*\{")
"""Widths in a format string that are large, or come from an argument."""
_METHODS_OUT = {"expandtabs", "translate", "format_map"}
_FILTERS_OUT = ("center", "wordwrap", "xmlattr", "urlize", "pprint", "batch", "slice", "round")
"""What makes much of little and no chat template uses."""
MAX_INDENT = 32


class Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class TooCostly(Exception):
    """A limit was hit."""


class _Meter:
    """What one rendering has used."""

    __slots__ = ("chars", "deadline", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self.chars = 0
        self.deadline = time.thread_time() + MAX_SECONDS

    def step(self) -> None:
        self.steps += 1
        if not self.steps & 63 and time.thread_time() > self.deadline:
            raise TooCostly(f"the chat template ran for more than {MAX_SECONDS:g} s")

    def emit(self, text: str) -> None:
        self.chars += len(text)
        fit(self.chars)


_METER: ContextVar[_Meter] = ContextVar("meter")


def fit(size: int) -> None:
    """Refuse to make anything of more characters or elements."""
    if size > MAX_CHARS:
        raise TooCostly(f"the chat template makes more than {MAX_CHARS} characters")


class _Loop:
    """What a for loop iterates over; each turn is a step."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        step = _METER.get().step
        for item in self._items:
            step()
            yield item

    def __len__(self) -> int:
        if isinstance(self._items, Sized):
            return len(self._items)
        raise TypeError("no length")


@jinja2.pass_context
def _looped(context: Context, items: Any) -> Any:
    return items if isinstance(items, jinja2.Undefined) else _Loop(items)


@jinja2.pass_context
def _literal(context: Context, text: str) -> str:
    return text


@jinja2.pass_context
def _concatenated(context: Context, items: list[Any]) -> str:
    texts = [str(item) for item in items]
    fit(sum(map(len, texts)))
    return "".join(texts)


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> str:
    """Everything that goes out, also into a set block or a macro's result, passes here."""
    text = str(value)
    _METER.get().emit(text)
    return text


def _replace(value: Any, old: str, new: str, count: int = -1) -> str:
    text = str(value)
    fit(len(text) + text.count(old) * len(new))
    return text.replace(old, new, count)


def _join(items: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
    texts = [str(item[attribute] if attribute else item) for item in items]
    fit(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = width if isinstance(width, str) else " " * min(width, MAX_NUMBER)
    fit(len(text) + len(margin) * (text.count("\n") + 1))
    lines = text.split("\n")
    return "\n".join(
        margin + line if (number or first) and (line or blank) else line for number, line in enumerate(lines)
    )


def _format(pattern: str, *args: Any, **kwargs: Any) -> str:
    if _WIDE.search(pattern):
        raise TooCostly("the chat template formats with a width that is large or not written out")
    return str(pattern % (kwargs or args))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: no HTML escapes."""
    if (indent or 0) > MAX_INDENT:
        raise TooCostly(f"the chat template indents JSON by more than {MAX_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> str:
    raise Refused(str(message))


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of all chat templates."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], finalize=_finalize
        )
        for name in _FILTERS_OUT:
            del self.filters[name]
        self.filters |= {"tojson": _tojson, "replace": _replace, "join": _join, "indent": _indent, "format": _format}
        self.filters |= {"_looped": _looped, "_literal": _literal, "_concatenated": _concatenated}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: now().strftime(pattern)

    def compile_chat(self, source: str) -> tuple[jinja2.Template, frozenset[str]]:
        """A metered template, and the variables it reads. Raises jinja2.TemplateSyntaxError."""
        tree = self.parse(source)
        variables = frozenset(meta.find_undeclared_variables(tree))
        for loop in tree.find_all(nodes.For):
            loop.iter = _filter(loop.iter, "_looped")
        for output in tree.find_all(nodes.Output):
            output.nodes = [
                _filter(nodes.Const(node.data), "_literal") if isinstance(node, nodes.TemplateData) else node
                for node in output.nodes
            ]
        _replace_concats(tree)
        tree.set_environment(self)
        return self.from_string(tree), variables

    def run(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """The rendered text. Raises Refused, TooCostly, or whatever went wrong in the template."""
        token = _METER.set(_Meter())
        try:
            return "".join(template.generate(variables))
        finally:
            _METER.reset(token)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _METHODS_OUT and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE.search(value.__self__):
            raise TooCostly("the chat template formats with a width that is large or not written out")
        return wrapped

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _METER.get().step()
        if not isinstance(__obj, Macro):
            for value in (*args, *kwargs.values()):
                if isinstance(value, int) and abs(value) > MAX_NUMBER:
                    raise TooCostly(f"the chat template calls a function with a number above {MAX_NUMBER}")
            owner = getattr(__obj, "__self__", None)
            if isinstance(owner, str):
                __obj = {"replace": lambda *a: _replace(owner, *a), "join": lambda a: _join(a, owner)}.get(
                    __obj.__name__, __obj
                )
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            fit(len(left) + len(right))
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, Sized) and isinstance(other, int):
                    fit(len(one) * other)
            if isinstance(left, int) and isinstance(right, int) and abs(left * right) >= 1 << 64:
                raise TooCostly("the chat template multiplies beyond 64 bits")
        elif operator == "**" and not (abs(left) <= MAX_NUMBER and abs(right) <= 64):
            raise TooCostly("the chat template raises to a high power")
        elif operator == "%" and isinstance(left, str):
            return _format(left, *(right if isinstance(right, tuple) else (right,)))
        return super().call_binop(context, operator, left, right)


def _filter(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno or 1)


def _replace_concats(node: nodes.Node) -> None:
    """`a ~ b` becomes a filter over [a, b], innermost first."""
    for field, value in node.iter_fields():
        if isinstance(value, list):
            for place, child in enumerate(value):
                if isinstance(child, nodes.Node):
                    _replace_concats(child)
                    if isinstance(child, nodes.Concat):
                        value[place] = _concat_filter(child)
        elif isinstance(value, nodes.Node):
            _replace_concats(value)
            if isinstance(value, nodes.Concat):
                setattr(node, field, _concat_filter(value))


def _concat_filter(node: nodes.Concat) -> nodes.Filter:
    return _filter(nodes.List(list(node.nodes), lineno=node.lineno), "_concatenated")
