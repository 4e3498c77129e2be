"""Token ids to text, one token at a time, on bytes.

A character may be spread over tokens; its bytes wait until it is complete or can no longer become
so. Whatever the cutting, the pieces add up to `bytes.decode("utf-8", "replace")` of all the tokens' bytes.
"""

from __future__ import annotations

from codecs import utf_8_decode
from typing import Protocol


class Vocabulary(Protocol):
    """What text needs of a tokenizer (`model.tokenizer.Tokenizer` has it)."""

    @property
    def strips_leading_space(self) -> bool: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class Detokenizer:
    """One sequence's tokens as text."""

    __slots__ = ("_shown", "_skip_special", "_strip", "_vocabulary", "_waiting")

    def __init__(
        self,
        vocabulary: Vocabulary,
        skip_special_tokens: bool = True,
        new_text: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`new_text`: nothing stands before these tokens, so that SentencePiece's leading space is no text.

        `shown`: special tokens that are text all the same.
        """
        self._vocabulary = vocabulary
        self._skip_special = skip_special_tokens
        self._shown = shown
        self._strip = new_text and vocabulary.strips_leading_space
        self._waiting = b""
        """The beginning of a character."""

    def push(self, token_id: int) -> str:
        """The text that this token completes, "" where there is none."""
        if self._skip_special and self._vocabulary.is_special(token_id) and token_id not in self._shown:
            return ""
        data = self._vocabulary.token_bytes(token_id)
        if self._strip and data:
            self._strip = False
            if data[0] == 0x20:
                data = data[1:]
        if self._waiting:
            data = self._waiting + data
        text, used = utf_8_decode(data, "replace")
        self._waiting = data[used:]
        return text

    def finish(self) -> str:
        """What is left at the end: "", or U+FFFD for an incomplete character (two for the beginning of a surrogate)."""
        text, self._waiting = self._waiting.decode("utf-8", "replace"), b""
        return text

    @property
    def incomplete(self) -> bool:
        """Whether bytes of a character are waiting for the rest of it."""
        return bool(self._waiting)

    def copy(self) -> Detokenizer:
        """One that goes on from here by itself."""
        twin = Detokenizer(self._vocabulary, self._skip_special, new_text=False, shown=self._shown)
        twin._strip = self._strip
        twin._waiting = self._waiting
        return twin


def decode(vocabulary: Vocabulary, token_ids: list[int], skip_special_tokens: bool = True) -> str:
    """A whole text at once."""
    detokenizer = Detokenizer(vocabulary, skip_special_tokens)
    return "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()
