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
