"""The tokenizer inside a GGUF file, as the tokenizer.json that it was made from.

Two kinds are stored: byte-level BPE (`gpt2`: tokens, merges, and the name of a pre-tokenizer) and SentencePiece
(`llama`: tokens with scores, `▁` for spaces, `<0xXX>` for bytes that no token covers).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from model.config_fields import Fields
from model.errors import ModelError
from model.gguf import GGUFFile, Value
from model.pretokenizers import pre_tokenizer
from model.tokenizer_parts import MAX_TEMPLATE, TokenizerParts, read_generation

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_ROLE_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_TURN_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>"})
"""Tokens that end an answer where the file's own chat template writes them: many files name only the end of a text."""
MAX_PIECE = 64
"""Longer SentencePiece tokens get no merges; real ones have up to about 50 characters."""


def gguf_parts(path: Path) -> TokenizerParts:
    """Raises ModelError, naming the file and the metadata key."""
    file = GGUFFile(path)
    try:
        return _parts(file.metadata)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _parts(meta: dict[str, Value]) -> TokenizerParts:
    fields = Fields({key.removeprefix("tokenizer.ggml."): value for key, value in meta.items()}, "tokenizer.ggml")
    tokens = _strings(fields, "tokens")
    kinds = _token_types(fields, len(tokens))
    kind = fields.text("model", "")
    if kind == "gpt2":
        definition, add_bos = _byte_level(fields, tokens)
    elif kind == "llama":
        definition, add_bos = _sentencepiece(fields, tokens, kinds), True
    else:
        raise ModelError(f"tokenizer.ggml.model is {kind[:40]!r}; gpt2 and llama can be read")
    definition["added_tokens"] = _added_tokens(tokens, kinds)
    ids = {role: found[0] for role, key in _ROLE_IDS.items() if (found := fields.token_ids(key, len(tokens)))}
    special_tokens = {role: tokens[id_] for role, id_ in ids.items()}
    around = [
        ("bos_token", fields.boolean("add_bos_token", add_bos)),
        ("eos_token", fields.boolean("add_eos_token", False)),
    ]
    bos, eos = ([(tokens[ids[role]], ids[role])] if wanted and role in ids else [] for role, wanted in around)
    definition["post_processor"] = _post_processor(bos, eos)
    templates = _chat_templates(meta)
    eos_ids = {
        id_ for key in ("eos_token_id", "eot_token_id", "eom_token_id") for id_ in fields.token_ids(key, len(tokens))
    }
    eos_ids |= {
        token["id"]
        for token in definition["added_tokens"]
        if token["content"] in _TURN_ENDS and token["content"] in templates.get("default", "")
    }
    sampling: dict[str, Any] = {key.removeprefix("general.sampling."): value for key, value in meta.items()}
    sampling |= {"temperature": sampling.get("temp"), "repetition_penalty": sampling.get("penalty_repeat")}
    return TokenizerParts(
        definition=definition,
        special_tokens=special_tokens,
        eos_ids=frozenset(eos_ids),
        bos_id=None,
        chat_templates=templates,
        generation_defaults=read_generation(Fields(sampling, "general.sampling")),
    )


def _strings(fields: Fields, key: str) -> list[str]:
    value = fields.values.get(key)
    if not isinstance(value, list) or not value:
        raise ModelError(f"tokenizer.ggml.{key} is missing or no list of strings")
    return value


def _numbers(fields: Fields, key: str, length: int) -> list[Any] | None:
    value = fields.values.get(key)
    if value is None:
        return None
    if not isinstance(value, np.ndarray) or len(value) != length:
        raise ModelError(f"tokenizer.ggml.{key} is no list of {length} numbers, one per token")
    numbers: list[Any] = value.tolist()
    return numbers


def _token_types(fields: Fields, length: int) -> list[Any]:
    return _numbers(fields, "token_type", length) or [1] * length


def _vocab(tokens: list[str]) -> dict[str, int]:
    """Ids by text. Of tokens with the same text only the first can ever be produced; the others have no text."""
    vocab: dict[str, int] = {}
    for id_, token in enumerate(tokens):
        vocab.setdefault(token, id_)
    return vocab


def _added_tokens(tokens: list[str], kinds: list[Any]) -> list[dict[str, Any]]:
    """Control tokens are special; user-defined ones are found in a text before anything else is, but are text."""
    vocab = _vocab(tokens)
    return [
        {
            "id": id_,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for id_, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token and vocab[token] == id_
    ]


def _byte_level(fields: Fields, tokens: list[str]) -> tuple[dict[str, Any], bool]:
    rule = pre_tokenizer(fields.text("pre", "default"))
    merges = [merge.split(" ") for merge in _strings(fields, "merges")]
    wrong = next((merge for merge in merges if len(merge) != 2), None)
    if wrong is not None:
        raise ModelError(f"tokenizer.ggml.merges: {' '.join(wrong)[:40]!r} is no pair of tokens")
    definition = {
        "version": "1.0",
        "normalizer": {"type": "NFC"} if rule.nfc else None,
        "pre_tokenizer": rule.steps(),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rule.ignore_merges,
            "vocab": _vocab(tokens),
            "merges": merges,
        },
    }
    return definition, rule.add_bos


def _sentencepiece(fields: Fields, tokens: list[str], kinds: list[Any]) -> dict[str, Any]:
    scores = _numbers(fields, "scores", len(tokens))
    if scores is None:
        raise ModelError("tokenizer.ggml.scores is missing")
    vocab = _vocab(tokens)
    replace: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizers = [replace]
    if fields.boolean("add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": "▁"})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    return {
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": _merges(vocab, scores, kinds),
        },
    }


def _merges(vocab: dict[str, int], scores: list[Any], kinds: list[Any]) -> list[tuple[str, str]]:
    """SentencePiece's BPE joins the neighbours whose joint piece has the best score; as ranked pairs that is every way
    to cut a piece in two pieces, by the piece's score (as transformers' convert_slow_tokenizer does it)."""
    mergeable = {piece: id_ for piece, id_ in vocab.items() if kinds[id_] not in (_UNKNOWN, _CONTROL, _USER_DEFINED)}
    ranked: list[tuple[float, int, int, int, int, str, str]] = []
    for piece, id_ in mergeable.items():
        for cut in range(1, len(piece) if len(piece) <= MAX_PIECE else 0):
            left, right = piece[:cut], piece[cut:]
            if left in mergeable and right in mergeable:
                order = (-scores[id_], -len(left), -len(right), mergeable[left], mergeable[right])
                ranked.append((*order, left, right))
    ranked.sort(key=lambda item: item[:5])
    return [(left, right) for *_, left, right in ranked]


def _post_processor(bos: list[tuple[str, int]], eos: list[tuple[str, int]]) -> dict[str, Any] | None:
    """The part of a tokenizer.json that puts BOS before a text and EOS behind it: at most one (text, id) each."""
    if not bos and not eos:
        return None

    def template(*sequences: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        for type_id, sequence in enumerate(sequences):
            items += [{"SpecialToken": {"id": text, "type_id": type_id}} for text, _ in bos]
            items.append({"Sequence": {"id": sequence, "type_id": type_id}})
            items += [{"SpecialToken": {"id": text, "type_id": type_id}} for text, _ in eos]
        return items

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": {text: {"id": text, "ids": [id_], "tokens": [text]} for text, id_ in bos + eos},
    }


def _chat_templates(meta: dict[str, Value]) -> dict[str, str]:
    names = {"default": "tokenizer.chat_template"}
    listed = meta.get("tokenizer.chat_templates")
    if isinstance(listed, list):
        names |= {name: f"tokenizer.chat_template.{name}" for name in listed[:16]}
    templates: dict[str, str] = {}
    for name, key in names.items():
        template = meta.get(key)
        if isinstance(template, str):
            if len(template) > MAX_TEMPLATE:
                raise ModelError(f"{key} is longer than {MAX_TEMPLATE} characters")
            templates[name] = template
    return templates
