"""What a model's files say about its tokenizer, and what folders and GGUF files share in saying it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from model.config_fields import Fields

MAX_TEMPLATE = 1 << 20
"""Characters of a chat template."""
MAX_VOCAB = 1 << 23


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """How the model's makers say it should be sampled, where a request does not say."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a model's files say about its tokenizer, before anything is built from it."""

    definition: dict[str, Any]
    """The content of a tokenizer.json."""
    special_tokens: Mapping[str, str]
    """Texts by role: bos_token, eos_token, unk_token, pad_token …, as chat templates name them."""
    eos_ids: frozenset[int]
    """From the configuration; the tokenizer's own eos_token comes on top."""
    bos_id: int | None
    """Where there is no bos_token."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """By name; the usual one is `default`, one for tools `tool_use`."""
    generation_defaults: GenerationDefaults = GenerationDefaults()


def read_generation(fields: Fields) -> GenerationDefaults:
    """Sampling defaults out of generation_config.json. `do_sample` is not read: requests say what they want."""
    return GenerationDefaults(
        temperature=fields.number("temperature", 0.0, 100.0, 1.0),
        top_p=fields.number("top_p", 0.0, 1.0, 1.0),
        top_k=fields.integer("top_k", -1, MAX_VOCAB, 0),
        min_p=fields.number("min_p", 0.0, 1.0, 0.0),
        repetition_penalty=fields.number("repetition_penalty", 1e-3, 100.0, 1.0),
    )


def post_processor(
    definition: Mapping[str, Any], special_tokens: Mapping[str, str], add_bos: bool, add_eos: bool
) -> dict[str, Any] | None:
    """The part of a tokenizer.json that puts BOS before a text and EOS behind it; None where nothing is added."""
    ids = _token_ids(definition)
    bos = [special_tokens["bos_token"]] if add_bos and special_tokens.get("bos_token") in ids else []
    eos = [special_tokens["eos_token"]] if add_eos and special_tokens.get("eos_token") in ids else []
    if not bos and not eos:
        return None

    def template(*sequences: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        for type_id, sequence in enumerate(sequences):
            items += [{"SpecialToken": {"id": token, "type_id": type_id}} for token in bos]
            items.append({"Sequence": {"id": sequence, "type_id": type_id}})
            items += [{"SpecialToken": {"id": token, "type_id": type_id}} for token in eos]
        return items

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in bos + eos},
    }


def _token_ids(definition: Mapping[str, Any]) -> dict[str, int]:
    """Ids of the added tokens, which all special tokens are."""
    added = definition.get("added_tokens")
    return {
        token["content"]: token["id"]
        for token in (added if isinstance(added, list) else [])
        if isinstance(token, dict) and isinstance(token.get("content"), str) and type(token.get("id")) is int
    }
