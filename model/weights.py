"""A model's weights by name, read only when asked for: mapped safetensors files, or a GGUF file that is dequantised."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from model.config import ModelConfig
from model.config_fields import read_json
from model.errors import ModelError
from model.gguf import GGUFFile
from model.gguf_config import gguf_architecture
from model.gguf_names import PERMUTED, row_order, safetensors_name
from model.source import ModelSource
from model.tensor_shapes import Shape, check_shapes

MAX_INDEX = 1 << 26
MAX_HEADER = 1 << 24
"""Bytes of a safetensors file's header, which becomes objects several times its size; real ones have up to 4 MB."""
MULTIMODAL_PREFIXES = ("model.language_model.", "language_model.model.")
"""Where Gemma 3's image models keep the text decoder: as transformers saves it now, and as it did."""
OTHER_MODALITIES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")

Part = tuple[slice, ...]
"""Of the first dimensions, without steps; all of the others."""


class WeightStore(Protocol):
    """Tensors under the names of a safetensors checkpoint (`model.layers.0.self_attn.q_proj.weight`)."""

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> Shape: ...

    def get(self, name: str, dtype: torch.dtype | None = None, part: Part = ()) -> torch.Tensor:
        """The tensor on the CPU, or a part of it; `dtype` None leaves it as it is stored, or float32 where it is
        quantised. Of a GGUF file only the rows, of a mapped one only the pages that the part touches are read.

        The result may be a view of the mapped file: copy it before changing it. ModelError names a missing tensor.
        """
        ...


def open_weights(source: ModelSource, config: ModelConfig) -> WeightStore:
    """The store of a source. For a native model every name and shape is checked here, before anything is loaded.

    Raises ModelError, one line, naming the file or the tensor.
    """
    store = GGUFStore(source.path, config) if source.kind == "gguf" else SafetensorsStore(source.path, config)
    if config.native:
        check_shapes({name: store.shape(name) for name in sorted(store.names())}, config, str(source.path))
    return store


class SafetensorsStore:
    """The *.safetensors files of a folder. They stay mapped; a tensor's pages are read when it is used."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._where: dict[str, tuple[str, str]] = {}
        """Name → file name, name in the file."""
        for file_name, stored in self._listing():
            name = _decoder_name(stored, config)
            if name is not None:
                self._where[name] = (file_name, stored)

    def _listing(self) -> list[tuple[str, str]]:
        index = self._folder / "model.safetensors.index.json"
        if not index.is_file():
            names = sorted(file for file in os.listdir(self._folder) if file.endswith(".safetensors"))
            if "model.safetensors" in names:
                names = ["model.safetensors"]
            return [(name, key) for name in names for key in self._open(name).keys()]  # noqa: SIM118  # no mapping
        weight_map = read_json(index, MAX_INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index}: weight_map is missing")
        listing: list[tuple[str, str]] = []
        for key, name in weight_map.items():
            if not isinstance(name, str) or os.path.basename(name) != name or not name.endswith(".safetensors"):
                raise ModelError(f"{index}: {key} lies in {str(name)[:80]!r}, no safetensors file in the folder")
            if key not in self._open(name).keys():  # noqa: SIM118
                raise ModelError(f"{self._folder / name}: the tensor {key} is missing")
            listing.append((name, key))
        return listing

    def _open(self, file_name: str) -> Any:
        if file_name not in self._files:
            path = self._folder / file_name
            with _unreadable(path):
                _check_header(path)
                self._files[file_name] = safe_open(path, framework="pt", device="cpu")
        return self._files[file_name]

    def names(self) -> set[str]:
        return set(self._where)

    def shape(self, name: str) -> Shape:
        file, stored = self._locate(name)
        with _unreadable(self._folder, name):
            return tuple(file.get_slice(stored).get_shape())

    def get(self, name: str, dtype: torch.dtype | None = None, part: Part = ()) -> torch.Tensor:
        file, stored = self._locate(name)
        with _unreadable(self._folder, name):
            tensor: torch.Tensor = file.get_tensor(stored)
        if not tensor.is_floating_point():
            raise ModelError(f"{self._folder}: the tensor {name} is of the type {tensor.dtype}, which is no float")
        tensor = tensor[part]
        return tensor if dtype is None else tensor.to(dtype)

    def _locate(self, name: str) -> tuple[Any, str]:
        if name not in self._where:
            raise ModelError(f"{self._folder}: the tensor {name} is missing")
        file_name, stored = self._where[name]
        return self._open(file_name), stored


def _check_header(path: Path) -> None:
    """The library checks the rest: names, types, shapes, and that the data lies in order, without gaps or overlaps."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER:
        raise ModelError(f"{path} claims a header of {length} bytes; the limit is {MAX_HEADER}")


@contextmanager
def _unreadable(path: Path, tensor: str = "") -> Iterator[None]:
    """Whatever the library raises means that the file is none."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        what = f"{path}: the tensor {tensor[:256]}" if tensor else f"{path}"
        raise ModelError(f"{what} cannot be read: {error}") from None


def _decoder_name(stored: str, config: ModelConfig) -> str | None:
    """A checkpoint's name as the text decoder knows it; None for tensors that the decoder does not use."""
    if not config.native:
        return stored
    if stored.startswith(OTHER_MODALITIES) or stored.endswith(".rotary_emb.inv_freq"):
        return None
    for prefix in MULTIMODAL_PREFIXES:
        if stored.startswith(prefix):
            return "model." + stored.removeprefix(prefix)
    name = stored.removeprefix("language_model.")
    return None if name == "lm_head.weight" and config.tie_word_embeddings else name


class GGUFStore:
    """A GGUF file's tensors, dequantised as they are asked for, some rows at a time."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._file = GGUFFile(path)
        self._config = config
        self._architecture = gguf_architecture(self._file)
        self._stored: dict[str, str] = {}
        for stored in self._file.tensors:
            name = safetensors_name(stored, self._architecture)
            if name is not None:
                self._stored[name] = stored

    def names(self) -> set[str]:
        return set(self._stored)

    def shape(self, name: str) -> Shape:
        return self._file.tensors[self._locate(name)].shape

    def get(self, name: str, dtype: torch.dtype | None = None, part: Part = ()) -> torch.Tensor:
        stored = self._locate(name)
        tensor = self._file.tensors[stored]
        if dtype is None:
            dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(tensor.format.name, torch.float32)
        pieces = (*part, *(slice(None) for _ in tensor.shape[len(part) :]))
        wanted = [range(size)[piece] for size, piece in zip(tensor.shape, pieces, strict=True)]
        rows = wanted[0] if len(wanted) == 2 else range(tensor.num_rows)
        columns = slice(wanted[-1].start, wanted[-1].stop)
        matrix = torch.empty(len(rows), len(wanted[-1]), dtype=dtype)
        step = self._file.rows_per_chunk(stored)
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            chunk = torch.from_numpy(self._file.rows(stored, start, stop))
            matrix[start - rows.start : stop - rows.start] = chunk[:, columns]
        return self._unpermuted(name, matrix.reshape([len(piece) for piece in wanted]))

    def _unpermuted(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Of whole heads, perhaps not all."""
        if self._architecture not in PERMUTED or name.rsplit(".", 2)[1] not in ("q_proj", "k_proj"):
            return tensor
        dim = self._config.head_dim
        return tensor[torch.from_numpy(row_order(len(tensor) // dim, dim))]

    def _locate(self, name: str) -> str:
        if name not in self._stored:
            raise ModelError(f"{self._file.path}: the tensor {name} is missing")
        return self._stored[name]
