"""Files that are no JSON object of a sane size and depth, and values that only look like numbers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from model.config_fields import MAX_DEPTH, Fields, read_json, read_list
from model.errors import MAX_MESSAGE, ModelError


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_json(path)
    return str(caught.value)


def test_depth_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for depth in (MAX_DEPTH, MAX_DEPTH + 1, 900):
        objects, arrays = b'{"a":' * depth + b"1" + b"}" * depth, b"[" * depth + b"]" * depth
        path.write_bytes(objects)
        if depth == MAX_DEPTH:
            assert set(read_json(path)) == {"a"}
            path.write_bytes(arrays)
            assert read_list(path) != []
        else:
            assert "levels deep" in refused(path, objects)
            assert "levels deep" in refused(path, arrays)
    assert "no JSON" in refused(path, b"[" * 100_000)
    for scalar in (b"7", b'"text"', b"null"):
        assert "no JSON object" in refused(path, scalar)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(ModelError, match="no file"):
            read_json(tmp_path / name)


def test_numbers_beyond_every_float() -> None:
    fields = Fields({"one": 10**400, "list": [1.0, 10**400], "nan": [float("nan")], "inf": [float("inf")]}, "x")
    for key, length in (("list", 2), ("nan", 1), ("inf", 1)):
        with pytest.raises(ModelError, match=key):
            fields.numbers(key, 0, 1e6, length)
    with pytest.raises(ModelError, match="one"):
        fields.number("one", 0, 1e6)


def test_a_message_is_one_line_of_bounded_length(tmp_path: Path) -> None:
    """It may quote a file's names, and a log or a terminal would obey what they hold."""
    error = ModelError("a\nb\x1b[31m\u2028\ud83d é 家" + "x" * 5000)
    assert str(error).startswith(r"a\nb\x1b[31m\u2028\ud83d é 家xxx")
    assert len(str(error)) == MAX_MESSAGE
