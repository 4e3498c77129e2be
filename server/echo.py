"""Echo: a prompt as the beginning of its own answer.

    a thread      make_echo: text, and entries without logprobs; every sequence begins with them
    event loop    the engine's logprobs come, and are kept as they are
    a thread      scored: entries with logprobs, as the reader takes them

A prompt may have a hundred thousand tokens with twenty alternatives each, so nothing here is for the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from model.params import Logprob
from server.detokenizer import Detokenizer, Vocabulary
from server.logprobs import TokenEntry, token_entry


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as text."""

    text: str
    entries: Sequence[TokenEntry]
    """One per token, its logprob still missing; none where no logprobs are asked for."""
    detokenizer: Detokenizer
    """Has run through the prompt; a copy of it goes on in every sequence."""


def make_echo(vocabulary: Vocabulary, prompt_ids: Sequence[int], skip_special_tokens: bool, scored: bool) -> Echo:
    """`scored`: logprobs are asked for."""
    detokenizer = Detokenizer(vocabulary, skip_special_tokens)
    pieces: list[str] = []
    entries: list[TokenEntry] = []
    offset = 0
    for token in prompt_ids:
        piece = detokenizer.push(token)
        pieces.append(piece)
        if scored:
            shown = not skip_special_tokens or not vocabulary.is_special(token)
            entries.append(token_entry(vocabulary, token, piece, offset, None, shown))
            offset += len(piece)
    return Echo("".join(pieces), entries, detokenizer)


def scored(
    vocabulary: Vocabulary, entries: Sequence[TokenEntry], values: Sequence[Logprob | None], k: int | None
) -> list[TokenEntry]:
    """The first entries with their logprobs (there may be more `values`), and at most `k` alternatives each."""
    full = []
    for entry, value in zip(entries, values, strict=False):
        if value is not None:  # prompt_logprobs may have asked for more alternatives than logprobs
            value = Logprob(value.logprob, value.rank, value.top_ids[:k], value.top_logprobs[:k])
        full.append(token_entry(vocabulary, entry.token_id, entry.text, entry.offset, value, shown=bool(entry.data)))
    return full
