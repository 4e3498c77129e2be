"""Constrained sequences in the engine: whatever happens to them, they follow their grammar, and nobody waits for it."""

from __future__ import annotations

import threading
import zlib
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from llguidance import LLMatcher

from model.batch import BAD_GRAMMAR, Row
from model.grammar import Grammars, Mask, Masks, Vocabulary
from model.params import Logprob
from scheduler.limits import Limits
from scheduler.messages import FinishReason

if TYPE_CHECKING:
    from tests.scheduler.conftest import World

END = 39
LETTERS = [bytes([97 + i]) for i in range(26)]
VOCABULARY = Vocabulary([*LETTERS, b"ab", b"bc", b"abc", *[b""] * 10, b"<end>"], [END], [END])
"""40 tokens, as the fake runner has."""


def text(tokens: list[int]) -> str:
    return b"".join(VOCABULARY.tokens[token] for token in tokens).decode()


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


def choose(row: Row, place: int, masks: dict[int, Mask]) -> int:
    """A pure function of the tokens so far, the seed and the stream, among those allowed."""
    tokens = [*row.tokens, *row.draft[:place]]
    allowed = np.flatnonzero(np.unpackbits(masks[place], bitorder="little"))
    if not len(allowed):
        return -1
    return int(allowed[zlib.crc32(f"{row.params.seed} {row.index} {tokens}".encode()) % len(allowed)])


GRAMMARS = Grammars(lambda: (VOCABULARY, None))


def constrained(it: World, grammars: Grammars | None = GRAMMARS) -> World:
    """The same world, whose runner draws by the rows' masks."""
    it.engine = it.make_engine(grammars)
    plain, masks = it.runner._result, Masks()

    def result(row: Row) -> tuple[list[int], list[Logprob], list[Logprob] | None]:
        if row.matcher is None or not row.samples:
            return plain(row)
        found = masks.fill([row])
        if row.matcher.error is not None:
            return [BAD_GRAMMAR], [], None
        drawn: list[int] = []
        for place in range(len(row.draft) + 1):
            drawn.append(choose(row, place, found))
            if drawn[: place + 1] != row.draft[: place + 1]:
                break
        return drawn, [], None

    it.runner._result = result  # type: ignore[method-assign]
    return it


def say(it: World, pattern: str, prompt: list[int], *, ends: tuple[int, ...] = (END,), **fields: Any) -> int:
    id = it.add(prompt, stops=ends, **fields)
    params = msgspec.structs.replace(it.submits[id].params, grammar=regex(pattern))
    it.submits[id] = it.inbox[-1] = msgspec.structs.replace(it.submits[id], params=params)
    return id


def said(it: World, request: int, index: int = 0) -> tuple[str, FinishReason]:
    stream = it.streams[request, index]
    return text([token for token in stream.tokens if token != END]), stream.finish


def test_texts_match_and_end(world: type[World]) -> None:
    it = constrained(world())
    sure = say(it, "(abc|abcabc)", [1, 2, 3], max_tokens=20)
    forced = say(it, "abcabc", [1, 2, 3], max_tokens=20, ends=(), min_tokens=15)
    cut = say(it, "[ab]{30}", [1, 2, 3], max_tokens=5)
    just = say(it, "[d-f]{5}", [1, 2, 3], max_tokens=5)
    empty = say(it, "", [4], max_tokens=5)
    plain = it.add([1, 2, 3], max_tokens=9)
    it.run()
    assert said(it, sure)[0] in ("abc", "abcabc")
    assert said(it, forced) == ("abcabc", FinishReason.STOP)
    assert said(it, cut)[1] is FinishReason.LENGTH
    assert said(it, just)[1] is FinishReason.STOP, "it is whole, though it has all the tokens that it may have"
    assert said(it, empty) == ("", FinishReason.STOP)
    assert it.streams[plain, 0] == it.expected(plain, 0)


def texts(it: World, ids: list[int], n: int) -> list[tuple[str, FinishReason]]:
    return [said(it, id, index) for id in ids for index in range(n)]


PATTERNS = ["(abc){3,9}", "[a-c]{20}z", "(ab|bc|x){5,15}", "a*b*c*(de)+f"]


@pytest.mark.parametrize("drafts", [0, 8])
def test_preempted_forked_and_drafted_texts_are_those_of_quiet_times(
    world: type[World], hopeful: None, drafts: int
) -> None:
    def run(blocks: int, most: int) -> tuple[list[tuple[str, FinishReason]], World]:
        limits = Limits(
            max_num_seqs=16,
            max_num_batched_tokens=64,
            max_model_len=10_000,
            num_speculative_tokens=most,
            watermark=0.0,
        )
        it = constrained(world(blocks, limits=limits))
        ids = [
            say(it, pattern, [1, 2, 3, seed], max_tokens=40, n=3, seed=seed) for seed, pattern in enumerate(PATTERNS)
        ]
        it.run()
        return texts(it, ids, 3), it

    quiet, _ = run(500, 0)
    crowded, it = run(24, drafts)
    assert crowded == quiet
    assert it.last is not None
    assert it.last.stats.preemptions > 0
    assert not drafts or it.last.stats.accepted_tokens > 0


def test_resumed_texts_go_on(world: type[World]) -> None:
    it = constrained(world())
    whole = say(it, PATTERNS[0], [1, 2, 3], max_tokens=40)
    it.run()
    had = it.streams[whole, 0].tokens
    for count in range(len(had) + 1):
        known = [token for token in had[:count] if token != END]
        again = say(it, PATTERNS[0], [1, 2, 3], max_tokens=40, generated=[known])
        it.run()
        assert said(it, again) == said(it, whole)


def test_what_cannot_be_followed_ends_alone(world: type[World]) -> None:
    it = constrained(world())
    wrong = say(it, "(", [1, 2, 3], n=2)
    foreign = say(it, "[a-c]*", [1, 2, 3], generated=[[20]])
    heavy = say(it, "(a?){2000}a{2000}", [1, 2, 3], max_tokens=60)
    plain = it.add([1, 2, 3], max_tokens=30)
    it.run()
    for id in (wrong, foreign, heavy):
        assert it.streams[id, 0].finish is FinishReason.ERROR
        assert "grammar" in it.streams[id, 0].error
        assert "\n" not in it.streams[id, 0].error
    assert it.streams[wrong, 1].finish is FinishReason.ERROR
    assert it.streams[plain, 0] == it.expected(plain, 0)


def test_an_engine_without_a_tokenizer_refuses(world: type[World]) -> None:
    it = constrained(world(), None)
    id = say(it, "a", [1])
    it.run()
    assert it.streams[id, 0].finish is FinishReason.ERROR


class Slow(Grammars):
    """Compiles when it is told to."""

    def __init__(self) -> None:
        super().__init__(lambda: (VOCABULARY, None))
        self.go = threading.Event()

    def compile(self, text: str) -> Future[LLMatcher]:
        outer: Future[LLMatcher] = Future()

        def work() -> None:
            assert self.go.wait(10)
            outer.set_result(super(Slow, self).compile(text).result())

        threading.Thread(target=work, daemon=True).start()
        return outer


def test_nobody_waits_for_a_compilation(world: type[World]) -> None:
    slow = Slow()
    it = constrained(world(), slow)
    late = say(it, "abc", [1, 2, 3], max_tokens=9)
    gone = say(it, "abc", [1, 2, 3], max_tokens=9)
    half = say(it, "abc", [1, 2, 3], max_tokens=9, n=2)
    plain = it.add([1, 2, 3], max_tokens=20)
    while it.streams[plain, 0].finish is FinishReason.RUNNING:
        it.step()
    assert it.streams[late, 0].tokens == []
    assert it.engine.has_work
    it.abort(gone)
    it.abort(half, 1)
    it.step()
    assert it.streams[gone, 0].finish is FinishReason.ABORT
    assert it.streams[half, 1].finish is FinishReason.RUNNING
    slow.go.set()
    it.run()
    assert said(it, late) == said(it, half) == ("abc", FinishReason.STOP)
    assert it.streams[half, 1].finish is FinishReason.ABORT
