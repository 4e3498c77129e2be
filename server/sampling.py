"""From a validated request to the engine's SamplingParams: defaults, vocabulary checks."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import TypeVar

from model.params import SamplingParams
from model.tokenizer import GenerationDefaults, Tokenizer
from server.errors import InvalidRequest
from server.protocol.sampling import GenerationRequest

T = TypeVar("T")
RANDOM_SEED = -1
SEED_MASK = 2**63 - 1


class Sampling:
    """How this server samples where a request does not say."""

    def __init__(self, tokenizer: Tokenizer, defaults: GenerationDefaults, vocab_size: int, seed: int | None) -> None:
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._vocab_size = vocab_size
        self._random = random.Random(seed) if seed is not None else random.SystemRandom()

    def params(
        self, request: GenerationRequest, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """What to tell the engine. Raises InvalidRequest for ids outside the vocabulary."""
        defaults = self._defaults
        self._check_ids("logit_bias", request.logit_bias)
        self._check_ids("stop_token_ids", request.stop_token_ids)
        self._check_ids("allowed_token_ids", request.allowed_token_ids or ())
        stops = dict.fromkeys(request.stop_token_ids)
        if not request.ignore_eos:
            stops |= dict.fromkeys(sorted(self._tokenizer.eos_ids))
        allowed = request.allowed_token_ids
        return SamplingParams(
            max_tokens=max_tokens,
            seed=self._seed(request.seed),
            temperature=_either(request.temperature, defaults.temperature),
            top_k=max(0, _either(request.top_k, defaults.top_k)),
            top_p=_either(request.top_p, defaults.top_p),
            min_p=_either(request.min_p, defaults.min_p),
            repetition_penalty=_either(request.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=request.logit_bias,
            min_tokens=request.min_tokens,
            stop_token_ids=tuple(stops),
            allowed_token_ids=None if allowed is None else tuple(dict.fromkeys(allowed)),
            bad_words=self._bad_words(request.bad_words),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _check_ids(self, param: str, ids: Iterable[int]) -> None:
        highest = max(ids, default=0)
        if highest >= self._vocab_size:
            raise InvalidRequest(
                f"{param}: token id {highest} is outside the vocabulary of {self._vocab_size}", param=param
            )

    def _bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is tokenised at the start of a text and after a space."""
        spellings = [spelling for word in words for spelling in (word, " " + word.lstrip(" "))]
        encoded = (tuple(self._tokenizer.encode(s, add_special_tokens=False, allow_special=False)) for s in spellings)
        return tuple(dict.fromkeys(ids for ids in encoded if ids))

    def _seed(self, seed: int | None) -> int:
        return self._random.getrandbits(63) if seed is None or seed == RANDOM_SEED else seed & SEED_MASK


def _either(value: T | None, default: T) -> T:
    return default if value is None else value
