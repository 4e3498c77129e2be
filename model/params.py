"""Sampling parameters and logprobs: the records that cross every room boundary. No torch here."""

from __future__ import annotations

import msgspec

from model.embedding import Pooling


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request samples. Validated at the door (`server.protocol`); from there on it is trusted.

    Order of application: penalties, bias, masks (grammar, banned, allowed, min_tokens), temperature, top-k, top-p,
    min-p, then one uniform per (seed, index, position) by inverse CDF. Temperature 0 is argmax.
    """

    max_tokens: int
    """Hard limit of generated tokens per sequence, ≥ 0. 0 computes the prompt only (for echo with logprobs)."""
    seed: int
    """Always set; the front end draws one where the client gave none."""
    temperature: float = 1.0
    """≥ 0; values below 1e-4 are argmax."""
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output: positive logits are divided by it, negative ones multiplied."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that was generated."""
    frequency_penalty: float = 0.0
    """Subtracted once per use from the logit of every token that was generated."""
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    """`stop_token_ids` are masked until so many tokens are generated."""
    stop_token_ids: tuple[int, ...] = ()
    """End-of-sequence ids included, unless the client asked to ignore them."""
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be completed."""
    grammar: str | None = None
    """What the output must match from its first token on, in llguidance's serialised form (`model.grammar`)."""
    logprobs: int | None = None
    """None: none; k ≥ 0: the sampled token's logprob and the k likeliest. Of the raw distribution."""
    logprob_token_ids: tuple[int, ...] = ()
    """With `logprobs`: tokens whose logprobs come in any case, beside the k likeliest."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first. Such a request reads no prefix cache."""
    pooling: Pooling | None = None
    """Set: nothing is generated (`max_tokens` is 0); the prompt's hidden states become one vector. A mean needs all of
    them, so such a request reads no prefix cache either."""

    @property
    def reads_tokens(self) -> bool:
        """Whether what may be drawn depends on which tokens were drawn before, beside what the model says of them."""
        return bool(
            self.grammar is not None
            or self.bad_words
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
        )

    @property
    def plain(self) -> bool:
        """Whether a draw takes nothing but the model's logits, and brings nothing but a token."""
        edits = self.reads_tokens or self.logit_bias or self.min_tokens or self.allowed_token_ids is not None
        return not edits and self.logprobs is None


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """Logprob of one token under the raw distribution, and of the likeliest alternatives (natural log, floor -9999)."""

    logprob: float
    rank: int
    """1 for the likeliest token."""
    top_ids: list[int]
    top_logprobs: list[float]
