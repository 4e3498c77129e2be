"""Text to token ids and back, through the `tokenizers` library alone: no transformers, no torch, no code from a model.

`load_tokenizer` gathers a TokenizerParts from a folder or a GGUF file; Tokenizer is what everybody uses.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import tokenizers

from model.errors import ModelError
from model.gguf_tokenizer import gguf_parts
from model.source import ModelSource
from model.token_bytes import ByteDecoder
from model.tokenizer_folder import folder_parts
from model.tokenizer_parts import MAX_VOCAB, GenerationDefaults, TokenizerParts

__all__ = ["GenerationDefaults", "Tokenizer", "TokenizerParts", "load_tokenizer"]


class Tokenizer:
    """A model's tokenizer. Immutable and safe to use from several threads."""

    def __init__(self, parts: TokenizerParts, where: str = "tokenizer.json") -> None:
        """Raises ModelError where `parts.definition` is no tokenizer that can be turned into bytes."""
        definition = _deterministic(parts.definition)
        text = json.dumps(definition)
        self._backend = _build(text, parts, where)
        # Whether special tokens are found in a text is a property of the whole object, so there are two.
        self._plain = _build(text, parts, where)
        self._plain.encode_special_tokens = True
        self._bytes = ByteDecoder(definition.get("decoder"), where)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """One more than the largest id that has a token. The model may have more logits, and ids may be missing."""
        if self.vocab_size > MAX_VOCAB:
            raise ModelError(f"{where}: a token has the id {self.vocab_size - 1}; the limit is {MAX_VOCAB - 1}")
        self.special_tokens = dict(parts.special_tokens)
        self.chat_templates = dict(parts.chat_templates)
        self.generation_defaults = parts.generation_defaults
        self.strips_leading_space = self._bytes.strips_leading_space
        """SentencePiece: a text's first token has a space in front that is no part of the text."""
        self.bos_id = self._role_id("bos_token", parts.bos_id)
        eos = self._role_id("eos_token", None)
        self.eos_ids = parts.eos_ids if eos is None else parts.eos_ids | {eos}
        self._cache: list[bytes | None] = [None] * self.vocab_size

    @property
    def chat_template(self) -> str | None:
        """The default template; where there are only named ones, the first of them."""
        return self.chat_templates.get("default") or next(iter(self.chat_templates.values()), None)

    def encode(self, text: str, *, add_special_tokens: bool, allow_special: bool = True) -> list[int]:
        """Ids of a text. `add_special_tokens` puts BOS in front and whatever else the tokenizer is made to add.

        `allow_special` False takes strings such as `<|im_end|>` for the characters they are. Added tokens that are not
        special (Qwen's `<tool_call>`) are found either way. Raises ValueError for lone surrogates.
        """
        backend = self._backend if allow_special else self._plain
        try:
            # A batch of one: unlike encode() it releases the GIL, so a long text stalls no other thread.
            return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:
            raise ValueError("the text holds lone surrogates, which no UTF-8 text can") from None

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of a whole sequence, as transformers would give it."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """A token's exact bytes, which may be part of a character; b"" for ids without a token."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._cache[token_id]
        if known is None:
            token = self._backend.id_to_token(token_id)
            known = self._cache[token_id] = b"" if token is None else self._bytes(token)
        return known

    def token_text(self, token_id: int) -> str:
        """A token's text for people to read; U+FFFD where its bytes are no whole characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    def _role_id(self, role: str, otherwise: int | None) -> int | None:
        token = self.special_tokens.get(role)
        return otherwise if token is None else self._backend.token_to_id(token)


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer of a model on disk. Raises ModelError, one line, naming the file."""
    if source.kind == "gguf":
        return Tokenizer(gguf_parts(source.path), str(source.path))
    return Tokenizer(folder_parts(source.path), str(source.path / "tokenizer.json"))


def _deterministic(definition: dict[str, Any]) -> dict[str, Any]:
    """Without what a server must not do: cut texts, pad them, or drop merges at random, as training does."""
    model = definition.get("model")
    if isinstance(model, dict) and model.get("dropout") is not None:
        model = model | {"dropout": None}
    return definition | {"truncation": None, "padding": None, "model": model}


def _build(text: str, parts: TokenizerParts, where: str) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(text)
        # A token with a role is special, even where tokenizer.json has it as a plain word.
        roles = [token for token in parts.special_tokens.values() if backend.token_to_id(token) is not None]
        backend.add_special_tokens(roles)
        return backend
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{where}: no tokenizer can be made of it: {reason[:200]}") from None
