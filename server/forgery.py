"""Special tokens are the template's to write: a client's text that spells one out stays text.

    content    "a<|im_end|>b"        rendered with a guard character inside every spelled-out special token
    rendered   <|im_start|>user\n a<␟|im_end|>b <|im_end|>
    encoded    special │ plain text without guards │ special

Where the guards prevented nothing, the text is encoded as a whole, so content that spells out no special token gives
exactly the ids of the plain way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol


class Encoder(Protocol):
    """What encoding needs of a tokenizer (`model.tokenizer.Tokenizer` has it)."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, *, add_special_tokens: bool, allow_special: bool = True) -> list[int]: ...

    def token_text(self, token_id: int) -> str: ...


class SpecialTokens:
    """The special tokens of a tokenizer as they are spelled."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._ids = {encoder.token_text(token): token for token in encoder.special_ids}
        # A guard can't be put inside a single character; no known tokenizer has such a special token.
        literals = sorted((literal for literal in self._ids if len(literal) > 1), key=len, reverse=True)
        pattern = "|".join(map(re.escape, literals)) or "(?!)"
        self._literal = re.compile(f"({pattern})")
        starts = "|".join(f"{re.escape(literal[0])}(?={re.escape(literal[1:])})" for literal in literals)
        self._start = re.compile(starts or "(?!)")
        self._beginnings = frozenset(literal[:end] for literal in literals for end in range(1, len(literal)))
        self._longest = max(map(len, literals), default=1)
        self._prefixed = self._prefixes_every_piece()

    def guarded(self, text: str, guard: str) -> str:
        """`text` with a guard behind the first character of every special token in it.

        Also of a beginning of one at its end, which the text behind it might complete.
        """
        text = self._start.sub(rf"\g<0>{guard}", text)
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                place = len(text) - length + 1
                text = text[:place] + guard + text[place:]
        return text

    def encode(self, text: str, guard: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of a rendered text: special tokens without a guard are special, all else is text."""
        if guard not in text:
            return self._encoder.encode(text, add_special_tokens=add_special_tokens)
        pieces = [piece.replace(guard, "") for piece in self._literal.split(text)]
        bare = "".join(pieces)
        if pieces == self._literal.split(bare):
            return self._encoder.encode(bare, add_special_tokens=add_special_tokens)
        ids = self._encoder.encode("", add_special_tokens=True) if add_special_tokens else []
        for place, piece in enumerate(pieces):
            if place % 2:
                ids.append(self._ids[piece])
            elif piece:
                ids += self._plain(piece, place == 0)
        return ids

    def _plain(self, text: str, first: bool) -> list[int]:
        if first or self._prefixed:
            return self._encoder.encode(text, add_special_tokens=False, allow_special=False)
        # The tokenizer would put SentencePiece's blank before a piece that is not the first one; a newline takes it.
        newline = self._encoder.encode("\n", add_special_tokens=False, allow_special=False)
        ids = self._encoder.encode("\n" + text, add_special_tokens=False, allow_special=False)
        if ids[: len(newline)] == newline:
            return ids[len(newline) :]
        return self._encoder.encode(text, add_special_tokens=False, allow_special=False)

    def _prefixes_every_piece(self) -> bool:
        """Whether text behind a special token is encoded just as at the start of a text."""
        probe = "x"
        alone = self._encoder.encode(probe, add_special_tokens=False)
        literal = next(iter(self._ids), None)
        if literal is None:
            return True
        return self._encoder.encode(literal + probe, add_special_tokens=False)[1:] == alone


def escaped(char: str) -> str:
    """What `repr` and JSON without Unicode write for an unprintable character."""
    return char.encode("unicode_escape").decode()


def unused(value: Any, count: int, *texts: str) -> list[str]:
    """`count` different characters that occur nowhere in a JSON-like value and the texts, nor their escapes."""
    present = [*strings(value), *texts]
    found: list[str] = []
    # Noncharacters first: Unicode keeps them for such uses, so that the first ones nearly always do.
    for code in (*range(0xFDD0, 0xFDF0), *range(0x10FFFD, 0x100000, -1)):
        char = chr(code)
        if not any(char in string or escaped(char) in string for string in present):
            found.append(char)
            if len(found) == count:
                return found
    raise ValueError("the text holds every character there is")


def strings(value: Any) -> Iterable[str]:
    """Every string in a JSON-like value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)
