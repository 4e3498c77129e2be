"""Grammars: which tokens a constrained row may draw, told by llguidance.

    Vocabulary (tokens as bytes) ──▶ Grammars: one trie; each grammar compiled once, in a thread
                                        └─ matcher() ──▶ Matcher, one a sequence: follow(tokens), fill(masks), error

A matcher chases its sequence's tokens as `num_computed` does, so whatever happens to the sequence (preempted, resumed,
forked, computed anew) it stands where the tokens stand. What a mask costs is bounded by llguidance's limits a step, and
by an allowance of processor time a sequence: who exceeds either ends with an error, alone. No torch here.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import llguidance
import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from model.errors import ModelError

if TYPE_CHECKING:
    from model.batch import Row
    from model.tokenizer import Tokenizer

Mask = NDArray[np.uint8]
"""One bit a token, the lowest first; a set bit allows it."""

Encode = Callable[[str], list[int]]
"""Text to ids."""

LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=100_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""The library's own, but for the memory of a lexer's states (some 1.5 KB each)."""
BURST_SECONDS, TOKEN_SECONDS, CALL_SECONDS = 0.25, 0.0015, 0.05
"""Processor time that a sequence's matcher may take: at once, and for every token more. A usual one takes 0.1 ms. A
call counts no more than the last: what fell into it may have been Python's garbage collector."""
CACHED = 64
"""Compiled grammars that are kept."""
EXACT_CHARS = 256
"""Of a text that a grammar forces, so many characters are tokenised as the model's tokenizer would: only its first
token is needed now, and a long text would be tokenised again for each of its tokens."""


class Vocabulary(msgspec.Struct, frozen=True):
    """A tokenizer as a grammar sees it; plain data, so that it can be sent to another process."""

    tokens: list[bytes]
    """As many as the model has logits; b"" where there is no token. Never empty."""
    special: list[int]
    """Match no text, whatever their own looks like."""
    ends: list[int]
    """End-of-sequence ids, at least one. A model without any has one behind its logits, which is never drawn."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int) -> Vocabulary:
        """`size`: logits of the model."""
        tokens = [tokenizer.token_bytes(token) for token in range(size)]
        ends = sorted(token for token in tokenizer.eos_ids if token < size)
        special = tokenizer.special_ids | tokenizer.eos_ids
        if not ends:
            ends = [size]
            tokens.append(b"<end>")
        return cls(tokens, sorted({token for token in special if token < size} | set(ends)), ends)

    def trie(self, encode: Encode | None = None) -> LLTokenizer:
        """llguidance's tokenizer: a fifth of a second. `encode`: text to ids; without it a text is cut greedily."""
        source = _Source(self, encode)
        source.greedy = trie = LLTokenizer(source, eos_token=self.ends)  # type: ignore[arg-type]
        return trie


class _Source:
    """What LLTokenizer asks of a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary, encode: Encode | None) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special
        self.eos_token_id = vocabulary.ends[0]
        self.bos_token_id = None
        self.greedy: LLTokenizer | None = None
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        assert self.greedy is not None
        if self._encode is None:
            return self.greedy.greedy_tokenize(text)
        exact, rest = text[:EXACT_CHARS], text[EXACT_CHARS:]
        return self._encode(exact) + (self.greedy.greedy_tokenize(rest) if rest else [])


def compile_grammar(trie: LLTokenizer, text: str) -> LLMatcher:
    """A matcher at its beginning. Raises ValueError, one line, for what is no grammar or too large a one."""
    matcher = LLMatcher(trie, text, limits=LIMITS, log_level=0)
    if matcher.is_error():
        raise ValueError(reason(matcher))
    return matcher


def reason(matcher: LLMatcher) -> str:
    """Why a matcher failed, in one line."""
    lines = [line.strip() for line in matcher.get_error().splitlines()]
    return " ".join(line for line in lines if line and line != "<non-verbose/>")[:500]


@dataclass(frozen=True, slots=True)
class _Base:
    """What every grammar of a model needs."""

    trie: LLTokenizer
    ends: list[int]
    width: int
    """Bytes of a mask."""

    @classmethod
    def of(cls, load: Callable[[], tuple[Vocabulary, Encode | None]]) -> _Base:
        vocabulary, encode = load()
        return cls(vocabulary.trie(encode), vocabulary.ends, (len(vocabulary.tokens) + 31) // 32 * 4)


class Grammars:
    """The engine's. Used by its thread; compiles in one of its own, which gives way to the steps."""

    def __init__(self, load: Callable[[], tuple[Vocabulary, Encode | None]]) -> None:
        """`load` is called in that thread, at once: it and the trie take a second, and whoever starts need not wait for
        them. It may raise ModelError. For what it returns see `Vocabulary.trie`."""
        self._known: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._pool = ThreadPoolExecutor(1, "grammar", _give_way)
        self._base = self._pool.submit(_Base.of, load)

    @classmethod
    def of(cls, tokenizer: Callable[[], Tokenizer], vocab_size: int) -> Grammars:
        """`vocab_size`: logits of the model. `tokenizer` may raise ModelError."""

        def load() -> tuple[Vocabulary, Encode]:
            loaded = tokenizer()
            encode = partial(loaded.encode, add_special_tokens=False, allow_special=False)
            return Vocabulary.of(loaded, vocab_size), encode

        return cls(load)

    def compile(self, text: str) -> Future[LLMatcher]:
        """The grammar's compilation, begun now or earlier; its exception is a ValueError."""
        known = self._known.get(text)
        if known is None:
            known = self._known[text] = self._pool.submit(self._compile, text)
            if len(self._known) > CACHED:
                self._known.popitem(last=False)
        self._known.move_to_end(text)
        return known

    def matcher(self, compiled: LLMatcher, prompt_len: int, stops: tuple[int, ...]) -> Matcher:
        """A new sequence's. `stops`: the ids that end it."""
        base = self._base.result()
        closed = [token for token in base.ends if token not in stops]
        return Matcher(compiled.deep_copy(), prompt_len, base.ends, closed, base.width)

    def _compile(self, text: str) -> LLMatcher:
        try:
            return compile_grammar(self._base.result().trie, text)
        except ModelError as error:
            raise ValueError(f"this engine has no tokenizer to follow it with: {error}") from None


class Matcher:
    """One sequence's place in its grammar."""

    __slots__ = ("_closed", "_ends", "_matcher", "_prompt_len", "_spent", "consumed", "error", "width")

    def __init__(self, matcher: LLMatcher, prompt_len: int, ends: list[int], closed: list[int], width: int) -> None:
        """`closed`: ids among `ends` that the request does not end at, and must not draw. `width`: bytes of a mask."""
        self.width = width
        self._matcher = matcher
        self._prompt_len = prompt_len
        self._ends = ends
        self._closed = closed
        self._spent = 0.0
        self.consumed = 0
        """Generated tokens it has followed."""
        self.error: str | None = None
        """Why it can go on no further; its sequence must fail."""

    def follow(self, tokens: list[int]) -> bool:
        """Catch up with a sequence's tokens; what was followed before is not looked at again. Whether the grammar is
        complete, so that nothing can follow."""
        news = tokens[self._prompt_len + self.consumed :]
        if news and self.error is None:
            began = time.thread_time()
            followed = self._matcher.try_consume_tokens(news)
            self.consumed += followed
            self._charge(began)
            if followed < len(news):
                self._fail("does not allow a token that was drawn")
        return self.error is None and self._matcher.is_stopped()

    def valid(self, draft: list[int]) -> list[int]:
        """As much of a draft as the grammar allows; never an end of the sequence, for nothing could follow it."""
        if not draft or self.error is not None:
            return []
        began = time.thread_time()
        count = self._matcher.validate_tokens(draft)
        self._charge(began)
        return draft[: next((i for i, token in enumerate(draft[:count]) if token in self._ends), count)]

    def fill(self, masks: Mask, draft: list[int]) -> bool:
        """Write what may be drawn now, and behind each token of a `valid` draft. masks: [1 + len(draft), bytes].

        False where it failed: see `error`."""
        if self.error is not None:
            return False
        began = time.thread_time()
        matcher, width = self._matcher, masks.shape[1]
        for place, line in enumerate(masks):
            if place:
                matcher.consume_token(draft[place - 1])
            matcher.unsafe_compute_mask_ptr(line.ctypes.data, width)
        if draft:
            matcher.rollback(len(draft))
        for token in self._closed:
            masks[:, token >> 3] &= 0xFF ^ (1 << (token & 7))
        self._charge(began)
        if matcher.is_error():
            self._fail(f"failed: {reason(matcher)}")
        return self.error is None

    def _charge(self, began: float) -> None:
        self._spent += min(time.thread_time() - began, CALL_SECONDS)
        if self._spent > BURST_SECONDS + TOKEN_SECONDS * self.consumed:
            self._fail(f"takes too long to follow: {self._spent:.2f} s for {self.consumed} tokens")

    def _fail(self, why: str) -> None:
        self.error = self.error or f"structured output: the grammar {why}"


class Masks:
    """Of one step's constrained rows, in one buffer that only grows and is written anew each step."""

    def __init__(self) -> None:
        self._buffer: Mask = np.zeros((0, 0), np.uint8)

    def fill(self, rows: Sequence[Row]) -> dict[int, Mask]:
        """By position, where a row has one for its own end and one for each token of its draft. Nothing can be said
        of the positions of a row whose matcher fails."""
        constrained = [row for row in rows if row.matcher is not None]
        if not constrained:
            return {}
        lines = sum(1 + len(row.draft) for row in constrained)
        width = max(row.matcher.width for row in constrained if row.matcher is not None)
        if lines > self._buffer.shape[0] or width != self._buffer.shape[1]:
            self._buffer = np.zeros((2 * lines, width), np.uint8)
        found: dict[int, Mask] = {}
        position = line = 0
        for row in rows:
            count = 1 + len(row.draft)
            if row.matcher is not None:
                masks = self._buffer[line : line + count]
                if row.matcher.fill(masks, row.draft):
                    found.update(zip(range(position, position + count), masks, strict=True))
                line += count
            position += count
        return found


def _give_way() -> None:
    """Of this thread alone: a step must not wait for a compilation. Nobody but root may become nicer than it began."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(10, os.getpriority(os.PRIO_PROCESS, thread)))
