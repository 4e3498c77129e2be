from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.tokenizer import Tokenizer
from server.detokenizer import Detokenizer, decode

TEXTS = [
    "ďábel 😀👨‍👩‍👧‍👦 家 e\u0301",
    "a\ufffdb",
    "ab\ufffd",
    "Daenerys is the Khaleesi. It is",
    " leading x",
    "a    b",
    "\n\n    def f():\n\treturn",
    "",
    " ",
    "  two",
    "naïve café 東京",
]


class Bytes:
    """Token i is the byte i; 256 is special."""

    strips_leading_space = False
    eos_ids = frozenset({256})

    def token_bytes(self, token_id: int) -> bytes:
        return b"<end>" if token_id == 256 else bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id == 256


BYTES = Bytes()
PIECES = st.one_of(st.binary(max_size=6), st.text(max_size=4).map(str.encode))


@given(st.lists(PIECES, max_size=8).map(b"".join))
def test_bytes_one_by_one_are_the_whole_decoded_at_once(data: bytes) -> None:
    detokenizer = Detokenizer(BYTES)
    text = ""
    for end, byte in enumerate(data, 1):
        text += detokenizer.push(byte)
        whole = data[:end].decode("utf-8", "replace")
        # Only the bytes of an incomplete end may be missing. They are one U+FFFD, or two where they begin a surrogate:
        # Python's decoder then waits for a third byte, and replaces each of the two where none comes.
        missing = whole.removeprefix(text)
        assert text + missing == whole
        assert missing == "" or (detokenizer.incomplete and missing in ("\ufffd", "\ufffd\ufffd"))
    tail = detokenizer.finish()
    assert tail in ("", "\ufffd")
    assert text + tail == data.decode("utf-8", "replace")


def test_a_real_replacement_character_passes_with_its_last_byte() -> None:
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.push(byte) for byte in b"a\xef\xbf\xbdb"] == ["a", "", "", "\ufffd", "b"]
    assert not detokenizer.incomplete
    assert detokenizer.finish() == ""


def test_bytes_that_can_never_be_text_are_replaced_at_once() -> None:
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push(0xFF) == "\ufffd"
    assert detokenizer.push(0xF0) == ""
    assert detokenizer.push(ord("a")) == "\ufffda"


def test_a_character_cut_off_by_the_end_is_one_replacement() -> None:
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.push(byte) for byte in "😀".encode()[:3]] == ["", "", ""]
    assert detokenizer.incomplete
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_are_skipped_or_shown_and_never_cut_a_character() -> None:
    first, rest = "é".encode()
    assert decode(BYTES, [first, 256, rest]) == "é"
    assert decode(BYTES, [97, 256, 98]) == "ab"
    assert decode(BYTES, [97, 256, 98], skip_special_tokens=False) == "a<end>b"


def test_a_copy_goes_on_by_itself() -> None:
    one = Detokenizer(BYTES)
    first, rest = "é".encode()
    one.push(first)
    two = one.copy()
    assert one.push(rest) == "é"
    assert two.incomplete
    assert two.push(ord("x")) == "\ufffdx"


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_text_comes_back(smol: Tokenizer, text: str) -> None:
    ids = smol.encode(text, add_special_tokens=False)
    assert decode(smol, ids) == text == smol.decode(ids)


@given(text=st.text(max_size=40))
@settings(max_examples=60)
def test_any_text_decodes_as_the_tokenizer_decodes_it(smol: Tokenizer, text: str) -> None:
    ids = smol.encode(text, add_special_tokens=False, allow_special=False)
    assert decode(smol, ids) == smol.decode(ids)


@given(ids=st.lists(st.integers(0, 49151), max_size=12))
@settings(max_examples=60)
def test_any_tokens_decode_as_the_tokenizer_decodes_them(smol: Tokenizer, ids: list[int]) -> None:
    assert decode(smol, ids) == smol.decode(ids)
    assert decode(smol, ids, skip_special_tokens=False) == smol.decode(ids, skip_special=False)


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_text_comes_back(llama: Tokenizer, metaspace: Tokenizer, text: str) -> None:
    for tokenizer in (llama, metaspace):
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert decode(tokenizer, ids) == tokenizer.decode(ids)
        if tokenizer is llama:
            assert decode(tokenizer, ids) == text


def test_the_leading_space_goes_only_where_a_text_begins(llama: Tokenizer) -> None:
    ids = llama.encode("Hello there", add_special_tokens=False)
    whole = Detokenizer(llama)
    continued = Detokenizer(llama, new_text=False)
    assert "".join(map(whole.push, ids)) == "Hello there"
    assert "".join(map(continued.push, ids)) == " Hello there"
    assert decode(llama, [1, *ids], skip_special_tokens=False) == llama.decode([1, *ids], skip_special=False)


def test_byte_tokens_of_sentencepiece_make_characters(llama: Tokenizer) -> None:
    ids = [llama.encode("x", add_special_tokens=False)[-1], *(4 + byte for byte in "家".encode())]
    detokenizer = Detokenizer(llama)
    assert [detokenizer.push(token) for token in ids] == ["x", "", "", "家"]
