"""Matchers: what a row may draw, wherever its sequence has been, and that a bad grammar hurts nobody else."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from numpy.typing import NDArray

from model import grammar
from model.batch import BAD_LOGITS, NO_TOKEN, Row
from model.edits import constrain
from model.grammar import Grammars, Mask, Masks, Matcher, Vocabulary
from model.kernels.build import load
from model.kernels.loaded import Kernels
from model.params import SamplingParams
from model.sampler import Sampler
from model.source import ModelSource
from model.tokenizer import Tokenizer, load_tokenizer

END = 2
JSON = LLMatcher.grammar_from_json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": " "},
    }
)


@pytest.fixture(scope="module")
def tokenizer(demo: ModelSource) -> Tokenizer:
    return load_tokenizer(demo)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars.of(lambda: tokenizer, tokenizer.vocab_size)


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


def matcher(grammars: Grammars, text: str, stops: tuple[int, ...] = (END,), prompt_len: int = 0) -> Matcher:
    return grammars.matcher(grammars.compile(text).result(), prompt_len, stops)


def masks_of(matcher: Matcher, draft: list[int] | None = None) -> Mask:
    masks = np.zeros((1 + len(draft or []), matcher.width), np.uint8)
    assert matcher.fill(masks, draft or []), matcher.error
    return masks


def allowed(mask: Mask) -> list[int]:
    return [int(token) for token in np.flatnonzero(np.unpackbits(mask, bitorder="little"))]


def walk(matcher: Matcher, seed: int, most: int = 60) -> list[int]:
    """Tokens drawn at random, until only the end may follow."""
    rng = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < most:
        choices = [token for token in allowed(masks_of(matcher)[0]) if token != END]
        if not choices:
            break
        tokens.append(rng.choice(choices))
        if matcher.follow(tokens):
            break
    return tokens


def test_masks_allow_what_the_texts_go_on_with(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Where the next byte is not forced: exactly the tokens that begin what is left of one of the texts."""
    texts = [b"the house", b"the horse", b"there", b"a", b"another house"]
    begun = matcher(grammars, regex("|".join(text.decode() for text in texts)))
    tokens: list[int] = []
    said = b""
    for piece in ("the", " ho"):
        left = {text[len(said) :] for text in texts if text.startswith(said)}
        pieces = {i: tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids}
        right = [i for i, piece_ in pieces.items() if piece_ and any(text.startswith(piece_) for text in left)]
        found = allowed(masks_of(begun)[0])
        assert found == right + ([END] if b"" in left else [])
        (token,) = tokenizer.encode(piece, add_special_tokens=False)
        tokens.append(token)
        said += piece.encode()
        assert not begun.follow(tokens)


def test_special_tokens_match_no_text(grammars: Grammars, tokenizer: Tokenizer) -> None:
    any_text = allowed(masks_of(matcher(grammars, regex("(?s:.*)")))[0])
    assert set(any_text) & tokenizer.special_ids == {END}
    spelled = allowed(masks_of(matcher(grammars, regex(r"<\|im_start\|>(a|b)")))[0])
    assert not set(spelled) & tokenizer.special_ids
    named = LLMatcher.grammar_from_lark('start: <|im_start|> "a"')
    assert allowed(masks_of(matcher(grammars, named))[0]) == tokenizer.encode("<|im_start|>", add_special_tokens=False)


def test_a_model_without_an_end_has_one_behind_its_logits() -> None:
    letters = [bytes([65 + i]) for i in range(32)]
    vocabulary = Vocabulary([*letters, b"<end>"], [32], [32])
    begun = matcher(Grammars(lambda: (vocabulary, None)), regex("AB?"), stops=())
    assert allowed(masks_of(begun)[0]) == [0]
    begun.follow([0])
    assert allowed(masks_of(begun)[0]) == [1]
    open_ended = matcher(Grammars(lambda: (vocabulary, None)), regex("AB?"), stops=(32,))
    open_ended.follow([0])
    assert allowed(masks_of(open_ended)[0]) == [1, 32]


def test_an_end_that_the_request_ignores_is_not_drawn(grammars: Grammars) -> None:
    for stops, ends in (((END,), [END]), ((), [])):
        begun = matcher(grammars, regex("[0-9]*"), stops)
        found = allowed(masks_of(begun)[0])
        assert [token for token in found if token == END] == ends
        assert len(found) > 9


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), cut=st.integers(0, 60))
def test_catching_up_is_the_same_as_following(grammars: Grammars, seed: int, cut: int) -> None:
    """Whatever was replayed at once, and wherever the tokens of a draft were looked at before."""
    tokens = walk(matcher(grammars, JSON), seed)
    again = matcher(grammars, JSON, prompt_len=3)
    prompt = [1, 2, 3]
    cut = min(cut, len(tokens))
    again.follow(prompt + tokens[:cut])
    draft = again.valid([*tokens[cut : cut + 5], END])
    assert draft == tokens[cut : cut + 5]
    drafted = masks_of(again, draft).copy()
    slow = matcher(grammars, JSON)
    for place in range(len(draft) + 1):
        complete = slow.follow(tokens[: cut + place])
        if complete:
            break
        assert allowed(drafted[place]) == allowed(masks_of(slow)[0])
    assert again.follow(prompt + tokens) == slow.follow(tokens)
    assert again.consumed == len(tokens)


def test_drafts_end_where_the_grammar_does_not_allow_them(grammars: Grammars, tokenizer: Tokenizer) -> None:
    begun = matcher(grammars, regex("(one two three|one four)"))
    ids = tokenizer.encode("one two three", add_special_tokens=False)
    wrong = tokenizer.encode("one two four", add_special_tokens=False)
    assert begun.valid(ids) == ids
    assert begun.valid([*ids, END, 5]) == ids
    assert begun.valid(wrong) == wrong[:2]
    assert begun.valid([]) == []
    assert begun.error is None


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "BURST_SECONDS", 0.0)
    monkeypatch.setattr(grammar, "TOKEN_SECONDS", 0.0)


def test_a_matcher_that_takes_too_long_fails(grammars: Grammars, impatient: None) -> None:
    begun = matcher(grammars, JSON)
    assert not begun.fill(np.zeros((1, begun.width), np.uint8), [])
    assert begun.error is not None
    assert "too long" in begun.error
    assert begun.valid([5]) == []
    assert not begun.follow([5])


def test_a_matcher_beyond_the_limits_fails_alone(grammars: Grammars) -> None:
    hostile = matcher(grammars, regex("(a?){2000}a{2000}"))
    good = matcher(grammars, JSON)
    rows = [Row([1], 1, 0, 1, [], SamplingParams(max_tokens=9, seed=0), matcher=m) for m in (hostile, good, None)]
    masks = Masks()
    for _ in range(50):
        found = masks.fill(rows)
        if hostile.error is not None:
            break
        assert set(found) == {0, 1}
        rows[0].tokens = [*rows[0].tokens, allowed(found[0])[0]]
        hostile.follow([*rows[0].tokens[1:]])
    assert hostile.error is not None
    assert "\n" not in hostile.error
    assert set(masks.fill(rows)) == {1}
    assert good.error is None


def test_a_token_that_the_grammar_does_not_allow_is_noticed(grammars: Grammars) -> None:
    begun = matcher(grammars, regex("[0-9]+"))
    assert not begun.follow([5000])
    assert begun.error is not None


def test_what_is_no_grammar_says_so_in_one_line(grammars: Grammars) -> None:
    for text in (
        regex("("),
        LLMatcher.grammar_from_lark("x"),
        LLMatcher.grammar_from_json_schema({"type": "nope"}),
        "{",
    ):
        with pytest.raises(ValueError, match=r"\w") as caught:
            grammars.compile(text).result()
        assert "\n" not in str(caught.value)


def test_each_grammar_is_compiled_once(grammars: Grammars) -> None:
    assert grammars.compile(JSON) is grammars.compile(JSON)
    for number in range(grammar.CACHED + 10):
        grammars.compile(regex(f"a{number}")).result()
    assert len(grammars._known) == grammar.CACHED


# ---- masks in the sampler ----

VOCAB = 1000 + 3


def random_masks(rng: np.random.Generator, rows: int, share: float) -> tuple[Mask, NDArray[np.bool_]]:
    bits = rng.random((rows, VOCAB)) < share
    bits[:, rng.integers(VOCAB)] = True
    padded = np.zeros((rows, (VOCAB + 31) // 32 * 32), np.bool_)
    padded[:, :VOCAB] = bits
    return np.packbits(padded, axis=1, bitorder="little"), bits


@pytest.fixture(scope="module", params=["torch", "compiled"])
def kernels(request: pytest.FixtureRequest) -> Kernels | None:
    return Kernels(load()) if request.param == "compiled" else None


@pytest.mark.parametrize("share", [0.002, 0.5, 0.99, 1.0])
def test_constrain(kernels: Kernels | None, share: float) -> None:
    rng = np.random.default_rng(1)
    masks, bits = random_masks(rng, 5, share)
    scores = torch.from_numpy(rng.normal(size=(8, VOCAB)).astype(np.float32))
    expected = scores.numpy().copy()
    rows = [6, 0, 3, 7, 1]
    for number, row in enumerate(rows):
        expected[row][~bits[number]] = -np.inf
    constrain(scores, dict(zip(rows, masks, strict=True)), kernels)
    assert np.array_equal(scores.numpy(), expected)


def row(**fields: object) -> Row:
    return Row([0, 1], 1, 1, 1, [], msgspec.structs.replace(SamplingParams(max_tokens=9, seed=4), **fields))


def mask(*tokens: int) -> Mask:
    bits = np.zeros((VOCAB + 31) // 32 * 32, np.bool_)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little")


def test_masks_intersect_with_what_else_a_request_forbids(kernels: Kernels | None) -> None:
    logits = torch.zeros(7, VOCAB)
    logits[:, 500] = 50
    rows = [
        row(allowed_token_ids=(5, 6, 500)),
        row(bad_words=((6,),), temperature=0.0),
        row(logit_bias={500: 100.0}),
        row(stop_token_ids=(5, 6), min_tokens=4),
        row(repetition_penalty=1.5, logprobs=2),
        row(logprobs=2, temperature=0.0),
        row(temperature=0.0),
    ]
    masks = {i: mask(5, 6) for i in range(6)}
    before = logits.clone()
    tokens, logprobs = Sampler(kernels).sample(logits, rows, masks)
    assert all(token in (5, 6) for token in tokens[:3])
    assert tokens[1] == 5
    assert tokens[3] == NO_TOKEN
    assert tokens[4] in (5, 6)
    assert tokens[5:] == [5, 500]
    raw = logprobs[5]
    assert raw is not None
    assert raw.top_ids[0] == 500, "logprobs are of the model's own distribution"
    assert raw.logprob < -40
    assert torch.equal(logits[4:], before[4:])


def test_a_row_without_a_token_ends_and_a_broken_one_fails(kernels: Kernels | None) -> None:
    logits = torch.zeros(4, VOCAB)
    logits[1:3] = torch.nan
    rows = [row(), row(), row(logprobs=0), row()]
    tokens, _ = Sampler(kernels).sample(logits, rows, {0: mask(), 1: mask(3), 2: mask(3), 3: mask(3)})
    assert tokens == [NO_TOKEN, BAD_LOGITS, BAD_LOGITS, 3]


def test_what_a_constrained_row_draws_does_not_depend_on_its_neighbours(kernels: Kernels | None) -> None:
    rng = np.random.default_rng(3)
    masks, _ = random_masks(rng, 6, 0.3)
    logits = torch.from_numpy(rng.normal(size=(6, VOCAB)).astype(np.float32))
    rows = [row(seed=i, temperature=1.3, **({"logprobs": 0} if i == 2 else {})) for i in range(6)]
    sampler = Sampler(kernels)
    together, _ = sampler.sample(logits.clone(), rows, dict(enumerate(masks)))
    alone = [sampler.sample(logits[i : i + 1].clone(), [rows[i]], {0: masks[i]})[0][0] for i in range(6)]
    assert together == alone
