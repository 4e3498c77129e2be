"""Tokenizers of both kinds, for everything that turns tokens into text and back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

from model.source import resolve
from model.tokenizer import Tokenizer, load_tokenizer
from model.tokenizer_parts import TokenizerParts
from tests.server.running import server, shared

__all__ = ["server", "shared"]

# Two cores are shared with everything else that runs: no example is late.
settings.register_profile("server", deadline=None)
settings.load_profile("server")

WORDS = ("▁Hello", "▁there", "▁is", "▁the", "it", "▁it", "▁▁", "▁x", "user", "world")


def sentencepiece(normalizer: dict[str, Any] | None, pre_tokenizer: dict[str, Any] | None) -> Tokenizer:
    """A Llama 2 style tokenizer: blanks are ▁, unknown characters are byte tokens, `<s>` and `</s>` are special."""
    specials = ["<unk>", "<s>", "</s>", "[INST]"]
    vocab = {token: id_ for id_, token in enumerate([*specials, *(f"<0x{byte:02X}>" for byte in range(256))])}
    merges: list[tuple[str, str]] = []
    for char in "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?<>/|_-\n[]":
        vocab.setdefault(char, len(vocab))
    for word in WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    assert all(a in vocab and b in vocab for a, b in merges)
    definition = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": vocab[token],
                "content": token,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for token in specials
        ],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": merges,
            "byte_fallback": True,
            "unk_token": "<unk>",
            "fuse_unk": True,
        },
    }
    return Tokenizer(
        TokenizerParts(
            definition=definition,
            special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
            eos_ids=frozenset({2}),
            bos_id=1,
        )
    )


@pytest.fixture(scope="session")
def smol() -> Tokenizer:
    """The demo model's: byte-level BPE."""
    return load_tokenizer(resolve(None))


@pytest.fixture(scope="session")
def llama() -> Tokenizer:
    """SentencePiece as of old: every piece of text between special tokens begins with ▁."""
    steps = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    return sentencepiece({"type": "Sequence", "normalizers": steps}, None)


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    """SentencePiece as of late: only the first piece does."""
    return sentencepiece(None, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False})
