"""Logprobs of tokens: records aligned to the returned text, and OpenAI's two shapes of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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


def completion_logprobs(entries: Iterable[TokenEntry], as_token_ids: bool = False) -> CompletionLogprobs:
    """The completions shape; `as_token_ids` writes "token_id:N" for every token string."""
    raise NotImplementedError


def chat_logprobs(entries: Iterable[TokenEntry], as_token_ids: bool = False) -> list[ChatToken]:
    """The chat shape: the list that goes to `logprobs.content`."""
    raise NotImplementedError
