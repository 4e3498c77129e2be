"""Logprobs of tokens: records aligned to the returned text, and OpenAI's two shapes of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from model.params import Logprob
from server.detokenizer import Vocabulary

FLOOR = -9999.0


@dataclass(slots=True, frozen=True)
class Alternative:
    """One of the likeliest tokens at a position."""

    token_id: int
    text: str
    data: bytes
    logprob: float


@dataclass(slots=True, frozen=True)
class TokenEntry:
    """One returned token. The texts of a choice's entries add up to the choice's text, code point for code point.

    A token that ends inside a character has the text "" and the one that completes it has the whole character; `data`
    holds each token's own bytes. A token cut by a stop string has only the returned part as its text.
    """

    token_id: int
    text: str
    data: bytes
    logprob: float | None
    """None: first token of an echoed prompt."""
    top: tuple[Alternative, ...] | None
    """Likeliest first; the token itself need not be among them."""
    offset: int
    """Of the text within the choice's text, echoed prompt included, in code points."""


@dataclass(slots=True, frozen=True)
class CompletionLogprobs:
    """`logprobs` of a /v1/completions choice: four lists of one length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@dataclass(slots=True, frozen=True)
class RankedToken:
    """One token of a position in vLLM's `prompt_logprobs`."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True, frozen=True)
class ChatTop:
    """One of `top_logprobs` of a chat token."""

    token: str
    logprob: float
    bytes: list[int]


@dataclass(slots=True, frozen=True)
class ChatToken:
    """One entry of `logprobs.content` of a chat choice."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTop]


def token_entry(
    vocabulary: Vocabulary, token_id: int, text: str, offset: int, value: Logprob | None, shown: bool = True
) -> TokenEntry:
    """The entry of a token that added `text` at `offset`. `shown`: False for a special token that is left out."""
    data = vocabulary.token_bytes(token_id) if shown else b""
    if value is None:
        return TokenEntry(token_id, text, data, None, None, offset)
    top = tuple(
        alternative(vocabulary, other, logprob)
        for other, logprob in zip(value.top_ids, value.top_logprobs, strict=True)
    )
    return TokenEntry(token_id, text, data, finite(value.logprob), top, offset)


def alternative(vocabulary: Vocabulary, token_id: int, logprob: float) -> Alternative:
    """A token as it reads by itself; bytes that are no text are written the way OpenAI does, "bytes:\\xf0\\x9f"."""
    data = vocabulary.token_bytes(token_id)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return Alternative(token_id, text, data, finite(logprob))


def finite(logprob: float) -> float:
    """A number that JSON has: at most 0, at least the floor; the floor for NaN."""
    return min(logprob, 0.0) if logprob > FLOOR else FLOOR


def completion_logprobs(entries: Iterable[TokenEntry], as_token_ids: bool = False) -> CompletionLogprobs:
    """The completions shape; `as_token_ids` writes "token_id:N" for every token string.

    A position's dict holds the likeliest tokens and the token itself; of two tokens with one string, the likelier.
    """
    shape = CompletionLogprobs([], [], [], [])
    for entry in entries:
        name = _name(entry.token_id) if as_token_ids else entry.text
        shape.tokens.append(name)
        shape.token_logprobs.append(entry.logprob)
        shape.text_offset.append(entry.offset)
        if entry.logprob is None or entry.top is None:
            shape.top_logprobs.append(None)
            continue
        top: dict[str, float] = {}
        for other in entry.top:
            # The token has the same string here as in `tokens`, where clients look for it.
            text = name if other.token_id == entry.token_id else _name(other.token_id) if as_token_ids else other.text
            top[text] = max(other.logprob, top.get(text, FLOOR))
        top[name] = max(entry.logprob, top.get(name, FLOOR))
        shape.top_logprobs.append(top)
    return shape


def chat_logprobs(entries: Iterable[TokenEntry], as_token_ids: bool = False) -> list[ChatToken]:
    """The chat shape: the list that goes to `logprobs.content`. Entries without a logprob are left out."""
    return [
        ChatToken(
            token=_name(entry.token_id) if as_token_ids else entry.text,
            logprob=entry.logprob,
            bytes=list(entry.data),
            top_logprobs=[
                ChatTop(_name(other.token_id) if as_token_ids else other.text, other.logprob, list(other.data))
                for other in entry.top or ()
            ],
        )
        for entry in entries
        if entry.logprob is not None
    ]


def prompt_logprobs(
    vocabulary: Vocabulary, prompt_ids: Sequence[int], values: Sequence[Logprob]
) -> list[dict[str, RankedToken] | None]:
    """vLLM's `prompt_logprobs`: per prompt token the likeliest and the token itself, by id; None for the first."""
    shape: list[dict[str, RankedToken] | None] = [None]
    for token_id, value in zip(prompt_ids[1:], values, strict=True):
        ranked = enumerate(zip(value.top_ids, value.top_logprobs, strict=True), 1)
        tokens = {str(other): _ranked(vocabulary, other, logprob, rank) for rank, (other, logprob) in ranked}
        tokens[str(token_id)] = _ranked(vocabulary, token_id, value.logprob, value.rank)
        shape.append(tokens)
    return shape


def _ranked(vocabulary: Vocabulary, token_id: int, logprob: float, rank: int) -> RankedToken:
    token = alternative(vocabulary, token_id, logprob)
    return RankedToken(token.logprob, rank, token.text)


def _name(token_id: int) -> str:
    return f"token_id:{token_id}"
