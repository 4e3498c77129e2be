"""What the fuzzers share: how hard they try, and what they do to good bytes and good JSON.

A plain run tries a little. `make fuzz` sets FUZZ, which multiplies the examples; then every run tries others.
"""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

FACTOR = int(os.environ.get("FUZZ", "1"))
SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


def fuzz(examples: int) -> settings:
    """For a test that takes any number of examples."""
    if FACTOR == 1:
        return settings(max_examples=examples, deadline=None, suppress_health_check=SLOW)
    return settings(max_examples=examples * FACTOR, deadline=None, suppress_health_check=SLOW, derandomize=False)


@contextmanager
def within(seconds: float, bytes: int) -> Iterator[None]:
    """Whatever happens inside takes no more seconds of the processor, and never allocates more through Python."""
    tracemalloc.start()
    began = time.process_time()
    try:
        yield
    finally:
        took = time.process_time() - began
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert took < seconds, f"{took:.1f} s of the processor"
    assert peak < bytes, f"{peak} bytes"


@st.composite
def mangled(draw: st.DrawFn, good: bytes) -> bytes:
    """A file or message that was good: bytes overwritten, cut out, doubled, put in, or the end cut off."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        size = draw(st.sampled_from([1, 2, 4, 8]) | st.integers(1, 64))
        change = draw(st.sampled_from(["number", "number", "bytes", "cut", "double", "insert", "end"]))
        if change == "number":
            limit = 2 ** (8 * min(size, 8)) - 1
            value = draw(st.sampled_from([0, 1, limit, limit // 2, limit // 2 + 1]) | st.integers(0, limit))
            data[at : at + min(size, 8)] = value.to_bytes(min(size, 8), "little")
        elif change == "bytes":
            data[at : at + size] = draw(st.binary(min_size=size, max_size=size))
        elif change == "cut":
            del data[at : at + size]
        elif change == "double":
            data[at:at] = data[at : at + size]
        elif change == "insert":
            data[at:at] = draw(st.binary(max_size=size))
        else:
            del data[at:]
    return bytes(data)


NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
EXTREMES = st.sampled_from(
    [0, -1, 1, 2**31, 2**53, 2**63, 2**64 - 1, -(2**63), 1e308, -1e308, 5e-324, 0.5, "", "\0", "\u2028", "x" * 5000]
)
TEXTS = st.text(max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | EXTREMES | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=10,
)
LARGE = st.sampled_from(
    [
        [[]] * 3000,
        ["x"] * 3000,
        list(range(3000)),
        {str(number): number for number in range(3000)},
        "word " * 20_000,
    ]
)


def nested(depth: int, dicts: bool) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"a": value} if dicts else [value]
    return value


DEEP = st.builds(nested, st.integers(20, 60), st.booleans())


@st.composite
def altered(draw: st.DrawFn, good: Any, names: tuple[str, ...] = ()) -> Any:
    """JSON that was good: some of its values, at any depth, are others; some keys, of `names` too, are new."""
    value = good
    for _ in range(draw(st.integers(1, 3))):
        value = draw(_altered_once(value, names))
    return value


@st.composite
def _altered_once(draw: st.DrawFn, value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        keys = sorted(value)
        change = draw(st.integers(0, 5))
        if keys and change < 3:
            key = draw(st.sampled_from(keys))
            return {**value, key: draw(_altered_once(value[key], ()))}
        if keys and change == 3:
            key = draw(st.sampled_from(keys))
            return {name: entry for name, entry in value.items() if name != key}
        if change < 5:
            new = st.sampled_from(names) | st.sampled_from(names) | TEXTS if names else TEXTS
            return {**value, draw(new): draw(JSON | LARGE | DEEP)}
    elif isinstance(value, list) and value and draw(st.integers(0, 3)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], draw(_altered_once(value[at], ())), *value[at + draw(st.integers(0, 1)) :]]
    return draw(JSON | LARGE | DEEP)
