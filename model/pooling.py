"""One vector of a whole text: how a model wants its hidden states pooled, and the pooling. No torch here.

    config.json, 1_Pooling/config.json, GGUF metadata ──▶ EmbeddingConfig          what the model is made for
    Pooling (of a request)    states of a chunk ──▶ pooled ──▶ … ──▶ finished ──▶ float32 bytes

A mean is a sum in float64, added up position by position, so that it doesn't depend on how the prompt was cut.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from model.config_fields import Fields, read_json, read_list
from model.embedding import EmbeddingConfig, Kind, Pooling
from model.gguf import GGUFFile
from model.source import ModelSource

Vector = npt.NDArray[np.float64]

KINDS: dict[str, Kind] = {"mean": "mean", "lasttoken": "last", "last": "last"}
"""sentence-transformers' names, and ours."""
GGUF_KINDS: dict[int, Kind] = {1: "mean", 3: "last"}
HARMLESS_MODULES = frozenset({"Transformer", "Pooling", "Normalize"})
"""Of a sentence-transformers model; what others do to the vector, such as Dense, is not done here."""
MAX_SIZES = 64


def read_embedding(source: ModelSource, hidden_size: int) -> EmbeddingConfig:
    """What the model's files say. Raises ModelError where they are no JSON, or hold values of other types."""
    if source.kind == "gguf":
        metadata = GGUFFile(source.path).metadata
        number = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
        if number in (0, None):
            return EmbeddingConfig(hidden_size=hidden_size)
        kind = GGUF_KINDS.get(number) if isinstance(number, int) else None
        return _made(hidden_size, kind, f"type {str(number)[:40]} of llama.cpp", None)
    sizes = _sizes(Fields(read_json(source.path / "config.json"), "config.json"), hidden_size)
    odd = _odd_module(source.path / "modules.json")
    if odd is not None:
        return EmbeddingConfig(hidden_size=hidden_size, sizes=sizes, refusal=f"its module {odd!r} is not supported")
    path = source.path / "1_Pooling" / "config.json"
    if not path.is_file():
        return EmbeddingConfig(hidden_size=hidden_size, sizes=sizes)
    mode = _mode(Fields(read_json(path), str(path)))
    return _made(hidden_size, KINDS.get(mode), mode, sizes)


def pooled(states: npt.NDArray[np.float32], so_far: Vector | None, pooling: Pooling) -> Vector:
    """states [tokens, hidden] of the next part of a prompt; what they and those before them come to, [hidden]."""
    if pooling.kind == "last":
        last: Vector = states[-1].astype(np.float64)
        return last
    # Along the slow axis numpy adds row by row, in order: whatever the chunks, it is one chain of additions.
    rows = states.astype(np.float64)
    total: Vector = np.add.reduce(rows if so_far is None else np.concatenate([so_far[None], rows]), axis=0)
    return total


def finished(total: Vector, count: int, pooling: Pooling) -> bytes | None:
    """The vector as little-endian float32; None where it is not finite. `count`: tokens of the prompt."""
    vector = (total / count if pooling.kind == "mean" else total)[: pooling.size]
    length = float(np.sqrt(np.square(vector).sum()))
    if pooling.normalize and 0 < length < np.inf:
        vector = vector / length
    with np.errstate(over="ignore"):
        narrow = vector.astype("<f4")
    return narrow.tobytes() if np.isfinite(length) and np.isfinite(narrow).all() else None


def _made(hidden_size: int, kind: Kind | None, name: str, sizes: tuple[int, ...] | None) -> EmbeddingConfig:
    if kind is None:
        refusal = f"its pooling ({name[:40]}) is neither mean nor last"
        return EmbeddingConfig(hidden_size=hidden_size, refusal=refusal, sizes=sizes)
    return EmbeddingConfig(hidden_size=hidden_size, kind=kind, sizes=sizes)


def _mode(config: Fields) -> str:
    """The one pooling mode that is on; several, whose vectors would be joined, by all their names."""
    if config.has("pooling_mode"):
        return config.text("pooling_mode", "")
    prefix = "pooling_mode_"
    names = [name.removeprefix(prefix).removesuffix("_tokens") for name in config.values if name.startswith(prefix)]
    on = [name for name in names if _is_on(config, name)]
    return " and ".join(on) or "none"


def _is_on(config: Fields, name: str) -> bool:
    return any(config.boolean(f"pooling_mode_{name}{end}", False) for end in ("", "_tokens"))


def _odd_module(path: Path) -> str | None:
    """The first module of a sentence-transformers model that changes the vector in a way of its own."""
    for module in read_list(path) if path.is_file() else []:
        name = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else "?"
        if name not in HARMLESS_MODULES:
            return name[:40]
    return None


def _sizes(config: Fields, hidden_size: int) -> tuple[int, ...] | None:
    listed = config.values.get("matryoshka_dimensions")
    if listed is None:
        return () if config.boolean("is_matryoshka", False) else None
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_SIZES or {type(size) for size in listed} != {int}:
        raise config.bad("matryoshka_dimensions", f"a list of up to {MAX_SIZES} integers")
    return tuple(size for size in listed if 1 <= size <= hidden_size)
