"""The exact bytes of one token: a tokenizer's own decoder works on sequences, but streaming needs every token alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from model.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MAX_NESTING = 8


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


class ByteDecoder:
    """Turns a token's text into bytes, by the `decoder` of its tokenizer.json: byte-level BPE or SentencePiece."""

    def __init__(self, decoder: Any, where: str) -> None:
        """Raises ModelError for a decoder whose effect on one token depends on its neighbours."""
        self.strips_leading_space = False
        self._replacements: list[tuple[str, str]] = []
        self._byte_tokens = False
        self._alphabet: dict[str, int] | None = None
        for step in _steps(decoder, where):
            kind = step.get("type")
            pattern = step.get("pattern")
            if kind == "ByteLevel":
                self._alphabet = byte_level_alphabet()
            elif kind == "ByteFallback":
                self._byte_tokens = True
            elif kind == "Replace" and isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
                old, new = pattern["String"], str(step.get("content", ""))
                if len(new) > len(old):  # a few of these in a row, and one token is gigabytes of text
                    raise ModelError(f"{where}: the decoder replaces a text by a longer one")
                self._replacements.append((old, new))
            elif kind == "Metaspace":
                self._replacements.append((str(step.get("replacement", "▁")), " "))
                self.strips_leading_space = step.get("prepend_scheme", "always") != "never"
            elif kind == "Strip" and step.get("content") == " " and not step.get("stop"):
                self.strips_leading_space = bool(step.get("start"))
            elif kind != "Fuse":
                raise ModelError(f"{where}: the decoder {str(kind)[:40]!r} cannot be streamed")

    def __call__(self, token: str) -> bytes:
        for old, new in self._replacements:
            token = token.replace(old, new)
        if self._byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if self._alphabet is not None and all(char in self._alphabet for char in token):
            return bytes(self._alphabet[char] for char in token)
        return token.encode("utf-8")


def _steps(decoder: Any, where: str, depth: int = 0) -> Iterator[dict[str, Any]]:
    """The decoders in a perhaps nested sequence, in order."""
    if not isinstance(decoder, dict) or depth > MAX_NESTING:
        raise ModelError(f"{where}: there is no decoder, so tokens cannot become text")
    if decoder.get("type") != "Sequence":
        yield decoder
        return
    decoders = decoder.get("decoders")
    for inner in decoders if isinstance(decoders, list) else []:
        yield from _steps(inner, where, depth + 1)
