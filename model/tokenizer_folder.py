"""A folder's tokenizer files: tokenizer.json and, around it, roles of tokens, chat templates, generation defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.config_fields import Fields, read_json
from model.errors import ModelError
from model.tokenizer_parts import MAX_TEMPLATE, MAX_VOCAB, TokenizerParts, read_generation

MAX_TOKENIZER = 1 << 28
MAX_SIDE_FILE = 1 << 24
"""tokenizer_config.json repeats all added tokens, and holds templates."""
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def folder_parts(folder: Path) -> TokenizerParts:
    """Raises ModelError for unreadable or senseless files; only tokenizer.json must be there.

    Whether BOS is added, tokenizer.json alone says (its post_processor): where there is one, transformers ignores
    tokenizer_config.json's add_bos_token too.
    """
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder} has no tokenizer.json; convert its tokenizer with transformers' save_pretrained")
    definition = read_json(folder / "tokenizer.json", MAX_TOKENIZER)
    config = _side_file(folder / "tokenizer_config.json")
    generation = _side_file(folder / "generation_config.json")
    model = _side_file(folder / "config.json")
    text_model = model.child("text_config")
    special_tokens = _roles(_side_file(folder / "special_tokens_map.json").values) | _roles(config.values)
    for role in ROLES:  # an explicit null says that there is none
        if role in config.values and config.values[role] is None:
            special_tokens.pop(role, None)
    eos_ids: frozenset[int] = frozenset()
    for fields in (generation, model, text_model):
        eos_ids |= frozenset(fields.token_ids("eos_token_id", MAX_VOCAB))
    bos = () if "bos_token" in config.values else model.token_ids("bos_token_id", MAX_VOCAB)
    return TokenizerParts(
        definition=definition,
        special_tokens=special_tokens,
        eos_ids=eos_ids,
        bos_id=bos[0] if bos else None,
        chat_templates=_chat_templates(folder, config),
        generation_defaults=read_generation(generation),
    )


def _side_file(path: Path) -> Fields:
    return Fields(read_json(path, MAX_SIDE_FILE) if path.is_file() else {}, str(path))


def _roles(values: Mapping[str, Any]) -> dict[str, str]:
    """Tokens are strings, or objects that say how they were added."""
    roles: dict[str, str] = {}
    for role in ROLES:
        token = values.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            roles[role] = token
    return roles


def _chat_templates(folder: Path, config: Fields) -> dict[str, str]:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            with file.open("rb") as stream:
                return {"default": _bounded(stream.read(MAX_TEMPLATE + 1).decode(), str(file))}
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from None
    template = config.values.get("chat_template")
    if template is None:
        return {}
    if isinstance(template, str):
        return {"default": _bounded(template, config.where)}
    templates: dict[str, str] = {}
    for item in template if isinstance(template, list) else [None]:
        if not isinstance(item, dict) or not isinstance(item.get("template"), str):
            raise config.bad("chat_template", "a string, or a list of objects with name and template")
        templates[str(item.get("name", "default"))] = _bounded(item["template"], config.where)
    return templates


def _bounded(template: str, where: str) -> str:
    if len(template) > MAX_TEMPLATE:
        raise ModelError(f"{where}: the chat template is longer than {MAX_TEMPLATE} characters")
    return template
