"""Whatever the files of a tokenizer hold, they give one that encodes and decodes, or a ModelError of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from model.errors import ModelError
from model.source import ModelSource
from model.tokenizer import load_tokenizer
from tests.fuzzing import altered, fuzz, within

MEMORY = 64 << 20
FLAGS = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTE_LEVEL: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [
        {
            "id": 4,
            "content": "<s>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
    "pre_tokenizer": {**FLAGS, "type": "ByteLevel"},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [4], "tokens": ["<s>"]}},
    },
    "decoder": {"type": "Sequence", "decoders": [{**FLAGS, "type": "ByteLevel"}, {"type": "Fuse"}]},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "Ġ": 3}, "merges": [["a", "b"]], "unk_token": None},
}
SIDES: dict[str, dict[str, Any]] = {
    "tokenizer_config.json": {"bos_token": "<s>", "eos_token": {"content": "b"}, "chat_template": "{{ x }}"},
    "generation_config.json": {"eos_token_id": [1], "temperature": 0.5, "top_p": 0.9, "top_k": 5},
    "special_tokens_map.json": {"unk_token": "a"},
    "config.json": {"eos_token_id": 1, "bos_token_id": 4, "text_config": {"eos_token_id": 2}},
}


def read(folder: Path, texts: list[str]) -> bool:
    """Whether there was a tokenizer; then it works on texts, whatever comes out."""
    try:
        tokenizer = load_tokenizer(ModelSource("folder", folder, "x"))
    except ModelError as error:
        message = str(error)
    else:
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=True)
            tokenizer.decode(ids)
            assert all(isinstance(tokenizer.token_bytes(id), bytes) for id in ids)
        return True
    assert message.isprintable()
    return False


def write(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def test_good_files_are_read(tmp_path: Path) -> None:
    write(tmp_path, {"tokenizer.json": BYTE_LEVEL, **SIDES})
    assert read(tmp_path, ["ab ab", ""])


NAMES = ("type", "vocab", "merges", "Sequence", "Split", "Replace", "Regex", "pattern", "content", "dropout", "id")


@fuzz(120)
@given(definition=altered(BYTE_LEVEL, NAMES), text=st.text(max_size=10))
def test_any_definition(definition: object, text: str, tmp_path: Path) -> None:
    write(tmp_path, {"tokenizer.json": definition})
    with within(5, MEMORY):
        read(tmp_path, ["ab <s>", text])


@fuzz(60)
@given(name=st.sampled_from(sorted(SIDES)), data=st.data())
def test_any_side_file(name: str, data: st.DataObject, tmp_path: Path) -> None:
    fields = (*SIDES[name], "min_p", "repetition_penalty", "pad_token")
    write(tmp_path, {"tokenizer.json": BYTE_LEVEL, **SIDES, name: data.draw(altered(SIDES[name], fields))})
    with within(5, MEMORY):
        read(tmp_path, ["ab"])
