"""Tokenizers inside GGUF files: every named pre-tokenizer, SentencePiece against its own algorithm, files that lie."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2 import tokenization_qwen2

from model.errors import ModelError
from model.pretokenizers import PRE_TOKENIZERS
from model.source import ModelSource
from model.token_bytes import byte_level_alphabet
from model.tokenizer import Tokenizer, load_tokenizer

Write = Callable[..., Path]
Make = Callable[..., Tokenizer]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, write_gguf: Write) -> Make:
    """A tokenizer from `tokenizer.ggml.*` values; other keys are given whole."""

    def build(**values: Any) -> Tokenizer:
        metadata = {name if "." in name else f"tokenizer.ggml.{name}": value for name, value in values.items()}
        path = write_gguf(tmp_path_factory.mktemp("gguf") / "x.gguf", "llama", metadata, {})
        return load_tokenizer(ModelSource("gguf", path, "x"))

    return build


BYTES = list(byte_level_alphabet())
BPE: dict[str, Any] = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": ["<|bos|>", "<|eot_id|>", "  user", *BYTES, "he", "ll", "hell", "Ġhe", "hello", "12"],
    "token_type": [3, 3, 4] + [1] * (len(BYTES) + 6),
    "merges": ["h e", "l l", "he ll", "Ġ he", "1 2"],
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def pieces(tokenizer: Tokenizer, text: str, **how: Any) -> list[str]:
    return [tokenizer.token_text(id_) for id_ in tokenizer.encode(text, **({"add_special_tokens": False} | how))]


def test_byte_level(make: Make) -> None:
    tokenizer = make(**BPE)
    assert pieces(tokenizer, "hell he12") == ["hell", " he", "12"]
    assert pieces(tokenizer, "a  user<|bos|>") == ["a", "  user", "<|bos|>"]
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.bos_id == 0
    assert tokenizer.eos_ids == {1}
    assert tokenizer.vocab_size == len(BPE["tokens"])


def test_the_named_rule_is_used(make: Make) -> None:
    assert pieces(make(**BPE | {"pre": "smollm"}), "he12") == ["he", "1", "2"]
    assert pieces(make(**BPE | {"pre": "qwen2"}), "he12") == ["he", "1", "2"]
    assert pieces(make(**BPE | {"pre": "llama-bpe"}), "he12") == ["he", "12"]
    # hello has no merge that makes it: only where merges are ignored is it one token.
    assert pieces(make(**BPE), "hello") == ["hell", "o"]
    assert pieces(make(**BPE | {"pre": "llama-bpe"}), "hello") == ["hello"]


def test_bos_and_eos_flags(make: Make) -> None:
    def added(**values: Any) -> list[str]:
        return pieces(make(**BPE | values), "a", add_special_tokens=True)

    assert added() == ["a"]
    assert added(add_bos_token=True) == ["<|bos|>", "a"]
    assert added(add_bos_token=True, add_eos_token=True) == ["<|bos|>", "a", "<|eot_id|>"]
    assert added(pre="llama-bpe") == ["<|bos|>", "a"]
    assert added(pre="llama-bpe", add_bos_token=False) == ["a"]


def test_ends_of_turns(make: Make) -> None:
    assert make(**BPE | {"eos_token_id": 3}).eos_ids == {3}
    assert make(**BPE | {"eos_token_id": 3, "eot_token_id": 4, "eom_token_id": 5}).eos_ids == {3, 4, 5}
    template = {"tokenizer.chat_template": "{{ message }}<|eot_id|>"}
    assert make(**BPE | {"eos_token_id": 3} | template).eos_ids == {1, 3}
    assert make(**BPE | {"eos_token_id": 10**6}).eos_ids == frozenset()


def test_chat_templates_and_sampling(make: Make) -> None:
    tokenizer = make(
        **BPE,
        **{
            "tokenizer.chat_template": "plain",
            "tokenizer.chat_templates": ["tool_use"],
            "tokenizer.chat_template.tool_use": "tools",
            "general.sampling.temp": 0.5,
            "general.sampling.top_k": 20,
        },
    )
    assert tokenizer.chat_templates == {"default": "plain", "tool_use": "tools"}
    assert (tokenizer.generation_defaults.temperature, tokenizer.generation_defaults.top_k) == (0.5, 20)


def test_of_two_equal_tokens_the_first_one_counts(make: Make) -> None:
    tokenizer = make(**BPE | {"tokens": [*BPE["tokens"], "he"], "token_type": [*BPE["token_type"], 1]})
    assert tokenizer.token_bytes(len(BPE["tokens"])) == b""
    assert pieces(tokenizer, "he") == ["he"]


def test_patterns_are_those_of_the_original_tokenizers() -> None:
    llama3 = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    assert PRE_TOKENIZERS["llama-bpe"].pattern == llama3
    assert PRE_TOKENIZERS["qwen2"].pattern == tokenization_qwen2.PRETOKENIZE_REGEX


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
@given(text=st.text(max_size=30) | st.text("aB'sTllé1\uff12 \n\r\t./家", max_size=30))
def test_every_rule_loses_nothing(name: str, text: str, make: Make) -> None:
    if name not in MADE:
        MADE[name] = make(**BPE | {"pre": name})
    tokenizer = MADE[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = tokenizers.normalizers.NFC().normalize_str(text) if PRE_TOKENIZERS[name].nfc else text
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == expected == tokenizer.decode(ids, skip_special=False)


MADE: dict[str, Tokenizer] = {}
WORDS = ["▁", "h", "e", "l", "o", "w", "r", "d", "é", "1", "he", "ll", "hell", "hello", "▁hello", "▁w", "or", "ld"]
WORDS += ["▁wor", "▁world", "lo", "el", "▁▁", "▁▁▁▁", "o▁", "11"]
SPM: dict[str, Any] = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, "<user>", "   "],
    "token_type": [2, 3, 3] + [6] * 256 + [1] * len(WORDS) + [4, 4],
    "scores": [0.0] * 259 + [-float(n) for n in range(len(WORDS))] + [0.0, 0.0],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
}
SPM_IDS = {token: id_ for id_, token in enumerate(SPM["tokens"])}


def sentencepiece(text: str, prefix: bool) -> list[int]:
    """SentencePiece's BPE: join the neighbours whose joint piece scores best, leftmost first, until none is left."""
    if not text:
        return []
    symbols = list((" " + text if prefix else text).replace(" ", "▁"))
    rank = {word: n for n, word in enumerate(WORDS)}
    while True:
        pairs = [(rank[a + b], at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in rank]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids: list[int] = []
    for symbol in symbols:
        known = symbol in rank
        ids += [SPM_IDS[symbol]] if known else [SPM_IDS[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return ids


@pytest.mark.parametrize("prefix", [True, False])
@given(text=st.text("helowrd é1 家\n", max_size=30) | st.text(max_size=10))
def test_sentencepiece_ids_and_bytes(prefix: bool, text: str, make: Make) -> None:
    name = f"spm {prefix}"
    if name not in MADE:
        MADE[name] = make(**SPM | {"add_space_prefix": prefix})
    tokenizer = MADE[name]
    assert tokenizer.strips_leading_space == prefix
    if "   " in text or "▁" in text:  # a user-defined token cuts the text; ▁ itself is read as a space
        text = text.replace("   ", "x").replace("▁", "x")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == sentencepiece(text, prefix)
    data = b"".join(map(tokenizer.token_bytes, ids))
    assert data.decode() == (" " + text if prefix and text else text)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert tokenizer.encode(text, add_special_tokens=True) == [1, *ids]


def test_sentencepiece_special_and_user_defined_tokens(make: Make) -> None:
    tokenizer = make(**SPM | {"add_space_prefix": False})
    assert pieces(tokenizer, "<user>hello   <s>") == ["<user>", "hello", "   ", "<s>"]
    plain = tokenizer.encode("<s>", add_special_tokens=False, allow_special=False)
    assert 1 not in plain
    assert b"".join(map(tokenizer.token_bytes, plain)) == b"<s>"
    assert tokenizer.special_ids == {0, 1, 2}


LIES: list[tuple[dict[str, Any], str]] = [
    (BPE | {"pre": "nonsense"}, "nonsense"),
    (BPE | {"model": "t5"}, "t5"),
    (BPE | {"model": 7}, "model"),
    (BPE | {"tokens": [1, 2]}, "tokens"),
    (BPE | {"tokens": "abc"}, "tokens"),
    (BPE | {"merges": ["h e x"]}, "merges"),
    (BPE | {"merges": ["he"]}, "merges"),
    (BPE | {"merges": ["zz zz"]}, "no tokenizer"),
    (BPE | {"token_type": [1]}, "token_type"),
    (BPE | {"token_type": ["a"] * len(BPE["tokens"])}, "token_type"),
    (BPE | {"add_bos_token": "yes"}, "add_bos_token"),
    (BPE | {"tokenizer.chat_template": "x" * (2 << 20)}, "chat_template"),
    (SPM | {"scores": [0.0]}, "scores"),
    (BPE | {"model": [0] * 19}, "model"),
    ({key: value for key, value in SPM.items() if key != "scores"}, "scores"),
    ({key: value for key, value in BPE.items() if key != "tokens"}, "tokens"),
    ({key: value for key, value in BPE.items() if key != "merges"}, "merges"),
]


@pytest.mark.parametrize(("values", "words"), LIES)
def test_lies_are_refused(values: dict[str, Any], words: str, make: Make) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        make(**values)
    assert "\n" not in str(caught.value)


ANY_VALUE = st.one_of(
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.floats(width=32),
    st.text(max_size=6),
    st.lists(st.integers(0, 9), min_size=1, max_size=300),
    st.lists(st.text(max_size=3), min_size=1, max_size=8),
)


@settings(deadline=None)
@given(
    kind=st.sampled_from([BPE, SPM]),
    wild=st.dictionaries(
        st.sampled_from(
            [*BPE, "scores", "eot_token_id", "add_bos_token", "add_space_prefix", "tokenizer.chat_templates"]
        ),
        ANY_VALUE,
        max_size=3,
    ),
)
def test_any_metadata_gives_a_tokenizer_or_a_model_error(
    kind: dict[str, Any], wild: dict[str, Any], make: Make
) -> None:
    try:
        tokenizer = make(**kind | wild)
    except ModelError as error:
        message = str(error)
    else:
        assert isinstance(tokenizer.encode("a b", add_special_tokens=True), list)
        return
    assert "\n" not in message
