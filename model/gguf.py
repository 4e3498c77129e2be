"""A GGUF file, read without trusting a word of it: metadata, tensors, float32 rows. No torch here.

    │ magic, version │ counts │ metadata: key, type, value … │ tensor infos: name, dims, type, offset … │ pad │ data … │

Every size and count is checked against the bytes that are really there before anything is allocated, so that reading
costs no more memory than a small multiple of the file's own header. Format: ggml's docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.errors import ModelError
from model.gguf_quants import FORMATS, BlockFormat, Floats

MAX_ENTRIES = 1 << 16
"""Metadata keys, and tensors, in one file."""
MAX_NAME = 256
MAX_STRING = 1 << 24
MAX_STRINGS = 1 << 22
"""Strings in all arrays together: each becomes a Python object that is bigger than its bytes in the file."""
MAX_DIM = 1 << 40
MAX_ALIGNMENT = 1 << 16
CHUNK_ELEMENTS = 1 << 17
"""How much is dequantised at a time: 512 KiB of float32. With 4 MiB its passes leave the second cache and it takes
twice as long; with 128 KiB two threads pass the interpreter's lock so often that it takes a third longer."""

_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9

Value = bool | int | float | str | list[str] | NDArray[Any]
"""A metadata value: arrays of numbers are numpy arrays, arrays of strings are lists."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies. `shape` is torch's order: the last dimension is contiguous."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    start: int
    """First byte in the file."""

    @property
    def row_elements(self) -> int:
        return self.shape[-1]

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.row_elements // self.format.elements * self.format.bytes

    @property
    def end(self) -> int:
        """One past its last byte in the file."""
        return self.start + self.num_rows * self.row_bytes


class _Cursor:
    """Reads forward through the file; never past its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0
        self.strings = 0

    def take(self, count: int) -> int:
        """Skip `count` bytes; returns where they begin."""
        start = self.at
        if count > len(self.data) - start:
            raise ModelError(f"the file ends at byte {len(self.data)}, inside its header")
        self.at = start + count
        return start

    def u32(self) -> int:
        return int(struct.unpack_from("<I", self.data, self.take(4))[0])

    def u64(self) -> int:
        return int(struct.unpack_from("<Q", self.data, self.take(8))[0])

    def count(self, what: str, limit: int) -> int:
        number = self.u64()
        if number > limit:
            raise ModelError(f"{number} {what}; the limit is {limit}")
        return number

    def string(self, what: str, limit: int = MAX_STRING) -> str:
        length = self.count(f"bytes in {what}", limit)
        start = self.take(length)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError:
            raise ModelError(f"{what} is not UTF-8") from None

    def value(self, key: str) -> Value:
        kind = self.u32()
        if kind == _STRING:
            return self.string(f"the value of {key}")
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise ModelError(f"{key} has the unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        scalar = np.frombuffer(self.data, dtype, 1, self.take(dtype.itemsize))[0].item()
        assert isinstance(scalar, bool | int | float)
        return scalar

    def array(self, key: str) -> Value:
        kind, length = self.u32(), self.u64()
        if kind == _STRING:
            self.strings += length
            if self.strings > MAX_STRINGS:
                raise ModelError(f"{key} claims {length} strings")
            if length * 8 > len(self.data) - self.at:
                raise ModelError(f"the file ends at byte {len(self.data)}, inside {key}: {length} strings do not fit")
            return self.strings_of(key, length)
        if kind not in _SCALARS:
            raise ModelError(f"{key} is an array of the unsupported type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.data, dtype, length, self.take(length * dtype.itemsize))

    def strings_of(self, key: str, count: int) -> list[str]:
        """`string` in a loop of its own: vocabularies and merges are half a million strings."""
        data, at, end = self.data, self.at, len(self.data)
        unpack = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        for _ in range(count):
            start = at + 8
            length = unpack(data, at)[0] if start <= end else end
            at = start + length
            if at > end:
                raise ModelError(f"the file ends at byte {end}, inside {key}")
            try:
                strings.append(data[start:at].decode())
            except UnicodeDecodeError:
                raise ModelError(f"an item of {key} is not UTF-8") from None
        self.at = at
        return strings


class GGUFFile:
    """An open file. The numbers stay in the mapped file until `rows` asks for them.

    Raises ModelError, naming the file, for anything that is not a sound GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Value] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size == 0:
                    raise ModelError("the file is empty")
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read(_Cursor(self._data))
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror or error}") from None
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None

    def _read(self, cursor: _Cursor) -> None:
        if self._data[cursor.take(4) : 4] != b"GGUF":
            raise ModelError("not a GGUF file")
        version = cursor.u32()
        if version not in (2, 3):
            raise ModelError(f"GGUF version {version} (little-endian 2 and 3 can be read)")
        num_tensors = cursor.count("tensors", MAX_ENTRIES)
        num_keys = cursor.count("metadata keys", MAX_ENTRIES)
        for _ in range(num_keys):
            key = cursor.string("a metadata key", MAX_NAME)
            if key in self.metadata:
                raise ModelError(f"{key} is there twice")
            self.metadata[key] = cursor.value(key)
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment % 8:
            raise ModelError(f"general.alignment is {alignment!r}; it must be a multiple of 8 up to {MAX_ALIGNMENT}")
        infos = [self._tensor_info(cursor, alignment) for _ in range(num_tensors)]
        data_start = -(-cursor.at // alignment) * alignment
        for name, shape, format_, offset in infos:
            tensor = GGUFTensor(name, shape, format_, data_start + offset)
            if tensor.end > len(self._data):
                raise ModelError(f"the tensor {name} ends behind the end of the file; is the download complete?")
            if name in self.tensors:
                raise ModelError(f"the tensor {name} is there twice")
            self.tensors[name] = tensor
        for before, after in pairwise(sorted(self.tensors.values(), key=lambda tensor: tensor.start)):
            if before.end > after.start:
                raise ModelError(f"the tensors {before.name} and {after.name} overlap")

    @staticmethod
    def _tensor_info(cursor: _Cursor, alignment: int) -> tuple[str, tuple[int, ...], BlockFormat, int]:
        name = cursor.string("a tensor's name", MAX_NAME)
        num_dims = cursor.u32()
        if not 1 <= num_dims <= 4:
            raise ModelError(f"the tensor {name} has {num_dims} dimensions")
        shape = tuple(cursor.u64() for _ in range(num_dims))[::-1]
        kind, offset = cursor.u32(), cursor.u64()
        if not all(1 <= dim <= MAX_DIM for dim in shape):
            raise ModelError(f"the tensor {name} has the shape {list(shape)}")
        format_ = FORMATS.get(kind)
        if format_ is None:
            known = ", ".join(known.name for known in FORMATS.values())
            raise ModelError(f"the tensor {name} has the type number {kind}; these can be read: {known}")
        if shape[-1] % format_.elements:
            raise ModelError(f"rows of the {format_.name} tensor {name} are no multiple of {format_.elements} elements")
        if offset % alignment:
            raise ModelError(f"the tensor {name} is not aligned to {alignment} bytes")
        return name, shape, format_, offset

    def rows(self, name: str, start: int, stop: int) -> Floats:
        """Rows [start, stop) of a tensor seen as a matrix, as a new float32 array [stop - start, row_elements]."""
        tensor = self.tensors[name]
        if not 0 <= start <= stop <= tensor.num_rows:
            raise IndexError(f"rows {start} to {stop} of the {tensor.num_rows} of {name}")
        size = (stop - start) * tensor.row_bytes
        raw = np.frombuffer(self._data, np.uint8, size, tensor.start + start * tensor.row_bytes)
        values = tensor.format.dequantise(raw.reshape(-1, tensor.format.bytes))
        return values.reshape(stop - start, tensor.row_elements)

    def vector(self, name: str) -> Floats:
        """A small tensor whole, as float32 of its own shape."""
        tensor = self.tensors[name]
        return self.rows(name, 0, tensor.num_rows).reshape(tensor.shape)

    def rows_per_chunk(self, name: str) -> int:
        """How many rows to ask for at a time, so that peak memory stays small."""
        return max(1, CHUNK_ELEMENTS // self.tensors[name].row_elements)
