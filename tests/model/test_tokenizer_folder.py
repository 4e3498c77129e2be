"""What a folder's files say around tokenizer.json, against transformers where it has an opinion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from model.errors import ModelError
from model.source import ModelSource
from model.tokenizer import GenerationDefaults, Tokenizer, load_tokenizer
from tests.fuzzing import within

CORPUS = ["hello world, hello tokens", "numbers 1 22 333", "spaces   and\n\nnewlines", "héllo wörld 家"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte-level tokenizer that adds BOS by itself, and knows <s> </s> <pad> as special and <think> as added."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>", "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(CORPUS, trainer)
    bpe.add_tokens(["<think>"])
    bpe.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    bpe.enable_truncation(3)
    bpe.enable_padding(length=50)
    bpe.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", bos_token="<s>", eos_token={"content": "</s>", "special": True})
    return tmp_path


def write(folder: Path, name: str, **values: Any) -> None:
    (folder / name).write_text(json.dumps(values))


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(ModelSource("folder", folder, "x"))


def test_ids_roles_and_no_truncation(folder: Path) -> None:
    tokenizer = load(folder)
    assert tokenizer.bos_id == 0
    assert tokenizer.eos_ids == {1}
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    text = "hello world 家 and more tokens than three"
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert ids[0] == 0
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]
    assert tokenizer.generation_defaults == GenerationDefaults()
    assert tokenizer.chat_template is None


def test_the_bos_literal_does_not_replace_bos(folder: Path) -> None:
    assert load(folder).encode("<s>x", add_special_tokens=True)[:2] == [0, 0]


def test_added_tokens_are_text_but_special_ones_are_not(folder: Path) -> None:
    tokenizer = load(folder)
    ids = tokenizer.encode("<think></s>", add_special_tokens=False, allow_special=False)
    assert ids[0] == tokenizer.vocab_size - 1
    assert 1 not in ids
    assert tokenizer.decode(ids) == "<think></s>"


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": False, "add_eos_token": True}])
def test_ids_equal_transformers(folder: Path, flags: dict[str, bool]) -> None:
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    definition = json.loads((folder / "tokenizer.json").read_text())
    write(folder, "tokenizer.json", **definition | {"truncation": None, "padding": None})
    write(folder, "tokenizer_config.json", tokenizer_class="TokenizersBackend", **roles, **flags)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = load(folder)
    for text in ["", *CORPUS, "<s>x</s>", "<think> 家"]:
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids == theirs(text)["input_ids"]
        assert tokenizer.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_eos_ids_come_from_everywhere(folder: Path) -> None:
    write(folder, "generation_config.json", eos_token_id=[5, 6])
    write(folder, "config.json", eos_token_id=7, bos_token_id=9, text_config={"eos_token_id": [8, None, -1, "x"]})
    assert load(folder).eos_ids == {1, 5, 6, 7, 8}
    write(folder, "tokenizer_config.json", bos_token=None)
    tokenizer = load(folder)
    assert tokenizer.eos_ids == {5, 6, 7, 8}
    assert tokenizer.bos_id is None
    write(folder, "tokenizer_config.json")
    assert load(folder).bos_id == 9
    write(folder, "special_tokens_map.json", bos_token="<s>", eos_token="</s>")
    assert load(folder).bos_id == 0
    assert load(folder).eos_ids == {1, 5, 6, 7, 8}


def test_a_role_makes_a_plain_word_special(folder: Path) -> None:
    write(folder, "tokenizer_config.json", eos_token="hello", bos_token="not a token")
    tokenizer = load(folder)
    (eos,) = tokenizer.eos_ids
    assert tokenizer.token_text(eos) == "hello"
    assert tokenizer.is_special(eos)
    assert tokenizer.bos_id is None


def test_generation_defaults(folder: Path) -> None:
    write(
        folder,
        "generation_config.json",
        temperature=0.6,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        do_sample=True,
    )
    assert load(folder).generation_defaults == GenerationDefaults(0.6, 0.9, 40, 0.05, 1.1)


@pytest.mark.parametrize(
    ("key", "value"), [("temperature", "hot"), ("top_p", 2), ("top_k", 1.5), ("min_p", float("nan"))]
)
def test_senseless_generation_defaults_are_named(folder: Path, key: str, value: Any) -> None:
    write(folder, "generation_config.json", **{key: value})
    with pytest.raises(ModelError, match=key):
        load(folder)


def test_chat_templates(folder: Path) -> None:
    write(folder, "tokenizer_config.json", chat_template="one")
    assert load(folder).chat_templates == {"default": "one"}
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write(folder, "tokenizer_config.json", chat_template=named)
    assert load(folder).chat_template == "plain"
    assert load(folder).chat_templates["tool_use"] == "tools"
    (folder / "chat_template.jinja").write_text("from a file é")
    assert load(folder).chat_template == "from a file é"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match="chat_template"):
        load(folder)
    (folder / "chat_template.jinja").write_text("x" * (2 << 20))
    with pytest.raises(ModelError, match="longer than"):
        load(folder)


@pytest.mark.parametrize("template", [7, [7], [{"name": "x"}], {"template": "x"}])
def test_senseless_chat_templates(folder: Path, template: Any) -> None:
    write(folder, "tokenizer_config.json", chat_template=template)
    with pytest.raises(ModelError, match="chat_template"):
        load(folder)


def test_without_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load(tmp_path)


def test_an_absurd_id_costs_nothing(folder: Path) -> None:
    """What has a slot for every id must not be made for four billion."""
    definition = json.loads((folder / "tokenizer.json").read_text())
    definition["model"]["vocab"]["hello"] = 2**32 - 1
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    with within(5, 64 << 20), pytest.raises(ModelError, match="the id 4294967295; the limit is 8388607"):
        load(folder)


def test_code_of_a_folder_is_not_even_looked_for(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """transformers would take this class from the folder's own file, if somebody trusted it."""
    ran = tmp_path_factory.mktemp("out") / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    write(folder, "tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil", None]})
    assert load(folder).encode("hello", add_special_tokens=False)
    assert not ran.exists()
