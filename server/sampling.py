"""From a validated request to the engine's SamplingParams: defaults, vocabulary checks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from model.params import SamplingParams
from model.tokenizer import GenerationDefaults, Tokenizer
from server.errors import InvalidRequest
from server.protocol.sampling import GenerationRequest

T = TypeVar("T")
RANDOM_SEED = -1
SEED_MASK = 2**63 - 1
MAX_MASK_IDS = 2**20
"""Ids in the masks of a request's prompts: each prompt goes to the engine with its own copy."""
MAX_GRAMMARS_CHARS = 2**22
"""The same of its grammar."""


class Sampling:
    """How this server samples where a request does not say."""

    def __init__(self, tokenizer: Tokenizer, defaults: GenerationDefaults, vocab_size: int, seed: int | None) -> None:
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._vocab_size = vocab_size
        self._random = random.Random(seed) if seed is not None else random.SystemRandom()

    def params(
        self,
        request: GenerationRequest,
        *,
        logprobs: int | None,
        prompt_logprobs: int | None,
        prompts: int = 1,
        grammar: str | None = None,
    ) -> Callable[[int], SamplingParams]:
        """What to tell the engine, as a cheap function of a prompt's `max_tokens`; it draws the seed that is missing.

        This itself tokenises the bad words and walks long lists: once a request, in a thread. `prompts`: how many
        there are. `grammar`: as `Structures.grammar` gave it. Raises InvalidRequest for ids outside the vocabulary,
        and for too many ids.
        """
        defaults = self._defaults
        self._check_ids("logit_bias", request.logit_bias)
        self._check_ids("stop_token_ids", request.stop_token_ids)
        self._check_ids("allowed_token_ids", request.allowed_token_ids or ())
        self._check_ids("logprob_token_ids", request.logprob_token_ids)
        stops = dict.fromkeys(request.stop_token_ids)
        if not request.ignore_eos:
            stops |= dict.fromkeys(sorted(self._tokenizer.eos_ids))
        allowed = None if request.allowed_token_ids is None else tuple(dict.fromkeys(request.allowed_token_ids))
        bad_words = self._bad_words(request.bad_words)
        ids = len(allowed or ()) + sum(map(len, bad_words))
        if ids * prompts > MAX_MASK_IDS:
            raise InvalidRequest(
                f"prompt: {prompts} prompts, each with {ids} ids in allowed_token_ids and bad_words, are more than "
                f"{MAX_MASK_IDS} ids",
                param="prompt",
            )
        if len(grammar or "") * prompts > MAX_GRAMMARS_CHARS:
            raise InvalidRequest(
                f"prompt: {prompts} prompts, each with a grammar of {len(grammar or '')} characters, are more than "
                f"{MAX_GRAMMARS_CHARS} characters",
                param="prompt",
            )
        common = SamplingParams(
            max_tokens=0,
            seed=0,
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
            allowed_token_ids=allowed,
            bad_words=bad_words,
            grammar=grammar,
            # The best of several are found by their logprobs.
            logprobs=0 if logprobs is None and request.sequences > request.n else logprobs,
            logprob_token_ids=tuple(request.logprob_token_ids),
            prompt_logprobs=prompt_logprobs,
        )
        return lambda max_tokens: msgspec.structs.replace(common, max_tokens=max_tokens, seed=self._seed(request.seed))

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
