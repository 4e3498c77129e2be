"""Cells as written on the command line, and prompts of exactly their lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.cells import Cell, Words, parse_cells
from loadtest.workloads import BadWorkload
from model.source import resolve
from model.tokenizer import Tokenizer, load_tokenizer
from tests.loadtest import tiny


@pytest.fixture(scope="module")
def tokenizer(tiny_gguf: Path) -> Tokenizer:
    return load_tokenizer(resolve(str(tiny_gguf)))


def test_parse() -> None:
    assert parse_cells("512/128@1,8") == [Cell(0, 512, 128, 1), Cell(0, 512, 128, 8)]
    assert parse_cells("512+32/64@32") == [Cell(512, 32, 64, 32)]
    for text in ("512/128@1", "512+32/64@32"):
        (cell,) = parse_cells(text)
        assert cell.name == text
    assert Cell(512, 32, 64, 32).length == 608


@pytest.mark.parametrize(
    "text", ["", "512/128", "512@8", "512/128@", "0/8@1", "+8/8@1", "8/8@1,", "8/9999999@1", "a/b@c"]
)
def test_what_is_no_cell(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not IN/OUT@CLIENTS"):
        parse_cells(text)


def test_prompts(tokenizer: Tokenizer) -> None:
    words = Words(tokenizer)
    cell = Cell(5, 7, 3, 2)
    prompts = words.prompts(cell, 20, (0, 1))
    assert prompts == words.prompts(cell, 20, (0, 1))
    assert prompts != words.prompts(cell, 20, (0, 2))
    assert {(len(prompt.content), prompt.input_len, prompt.output_len) for prompt in prompts} == {(12, 12, 3)}
    assert len({tuple(prompt.content[:5]) for prompt in prompts}) == 1
    assert len({tuple(prompt.content[5:]) for prompt in prompts}) == 20
    first = words.prompts(Cell(0, 12, 3, 2), 1, (0, 1))[0]
    assert first.content[:5] != prompts[0].content[:5], "cells share nothing"


def test_text_is_read_back_as_the_same_tokens(tokenizer: Tokenizer) -> None:
    words = Words(tokenizer)
    for prompt in words.prompts(Cell(0, 50, 3, 2), 20, (3,)):
        text = words.as_text(prompt)
        assert isinstance(text.content, str)
        assert len(text.content.split()) == 50
        assert tokenizer.encode(text.content, add_special_tokens=True) == prompt.content


def test_vocabulary_without_words(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(tiny.LETTERS) ** 2 > 256
    monkeypatch.setattr(tokenizer, "vocab_size", 400)
    with pytest.raises(BadWorkload, match="has 0 whole words; at least 256 are needed"):
        Words(tokenizer)
