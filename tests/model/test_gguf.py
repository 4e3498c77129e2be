"""The GGUF reader against files of the `gguf` package, and against files that lie."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.errors import ModelError
from model.gguf import GGUFFile
from model.source import ModelSource

Write = Callable[..., Path]
METADATA: dict[str, Any] = {
    "a.bool": True,
    "a.int": 7,
    "a.float": 0.5,
    "a.text": "tëxt",
    "a.texts": ["x", "", "日本"],
    "a.floats": [0.5, 1.5],
    "a.ints": [1, -2],
}


@pytest.fixture
def small(tmp_path: Path, write_gguf: Write) -> Path:
    rng = np.random.default_rng(0)
    packed = gguf.quants.quantize(rng.standard_normal((3, 64), np.float32), gguf.GGMLQuantizationType.Q4_0)
    tensors = {
        "f32": rng.standard_normal((2, 3, 8), np.float32),
        "vector": rng.standard_normal(5, np.float32).astype(np.float16),
        "packed": (packed, gguf.GGMLQuantizationType.Q4_0),
    }
    return write_gguf(tmp_path / "small.gguf", "llama", METADATA, tensors)


def test_metadata_and_tensors(small: Path) -> None:
    file = GGUFFile(small)
    theirs = gguf.GGUFReader(small)
    for key, value in METADATA.items():
        read = file.metadata[key]
        assert (read.tolist() if isinstance(read, np.ndarray) else read) == value
    assert file.metadata["general.architecture"] == "llama"
    assert file.tensors["f32"].shape == (2, 3, 8)
    for tensor in theirs.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(file.vector(tensor.name), expected)
    np.testing.assert_array_equal(file.rows("packed", 1, 3), file.vector("packed")[1:3])
    with pytest.raises(IndexError):
        file.rows("packed", 2, 4)


def test_rows_are_the_callers_own(small: Path) -> None:
    file = GGUFFile(small)
    before = file.vector("f32").copy()
    file.vector("f32")[:] = 0
    np.testing.assert_array_equal(file.vector("f32"), before)


def test_version_2(small: Path) -> None:
    data = bytearray(small.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    small.write_bytes(data)
    assert set(GGUFFile(small).tensors) == {"f32", "vector", "packed"}


def test_demo(demo: ModelSource) -> None:
    """Tensors of a real file, one by one: the reference reader would take most of a minute over its vocabulary."""
    file = GGUFFile(demo.path)
    assert len(file.tensors) == 272
    assert len(file.metadata) == 33
    assert file.metadata["llama.rope.freq_base"] == 100_000.0
    for name in ("blk.0.ffn_down.weight", "blk.29.attn_k.weight", "output_norm.weight"):
        tensor = file.tensors[name]
        raw = demo.path.read_bytes()[tensor.start :][: tensor.num_rows * tensor.row_bytes]
        packed = np.frombuffer(raw, np.uint8).reshape(tensor.num_rows, tensor.row_bytes)
        expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[tensor.format.name])
        np.testing.assert_array_equal(file.vector(name), expected.reshape(tensor.shape))
        assert np.isfinite(expected).all()


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        GGUFFile(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def head(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def info(name: str = "t", dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HUGE = 2**64 - 1
LIES: list[tuple[bytes, str]] = [
    (b"", "empty"),
    (b"GG", "ends"),
    (b"PK\x03\x04" + bytes(40), "not a GGUF"),
    (head(version=1), "version 1"),
    (b"GGUF" + struct.pack(">I", 3) + bytes(16), "version"),
    (head(tensors=HUGE), "tensors"),
    (head(keys=HUGE), "metadata keys"),
    (head(keys=1), "ends"),
    (head(keys=1) + struct.pack("<Q", HUGE), "bytes in a metadata key"),
    (head(keys=1) + struct.pack("<Q", 200) + b"x", "ends"),
    (head(keys=1) + struct.pack("<Q", 1) + b"\xff" + struct.pack("<IB", 0, 1), "UTF-8"),
    (head(keys=1) + text("k") + struct.pack("<I", 99), "unknown type 99"),
    (head(keys=1) + text("k") + struct.pack("<IQ", 8, 2**40), "the limit"),
    (head(keys=1) + text("k") + struct.pack("<IIQ", 9, 6, HUGE), "ends"),
    (head(keys=1) + text("k") + struct.pack("<IIQ", 9, 6, 2**62), "ends"),
    (head(keys=1) + text("k") + struct.pack("<IIQ", 9, 8, HUGE), "strings"),
    (head(keys=1) + text("k") + struct.pack("<IIQ", 9, 8, 2) + text("a") + struct.pack("<Q", HUGE), "ends"),
    (head(keys=1) + text("k") + struct.pack("<IIQ", 9, 8, 1) + text("abcdefgh")[:12], "ends"),
    (head(keys=1) + text("k") + struct.pack("<IIQ", 9, 9, 1) * 1000, "unsupported type 9"),
    (head(keys=2) + (text("k") + struct.pack("<IB", 0, 1)) * 2, "twice"),
    (head(keys=1) + text("general.alignment") + struct.pack("<II", 4, 0), "general.alignment"),
    (head(keys=1) + text("general.alignment") + struct.pack("<II", 4, 2**31), "general.alignment"),
    (head(keys=1) + text("general.alignment") + struct.pack("<IQ", 8, 1) + b"8", "general.alignment"),
    (head(tensors=1) + text("t") + struct.pack("<I", 0) + bytes(64), "dimensions"),
    (head(tensors=1) + text("t") + struct.pack("<I", 2**31) + bytes(64), "dimensions"),
    (head(tensors=1) + info(dims=(0,)) + bytes(64), "shape"),
    (head(tensors=1) + info(dims=(HUGE, HUGE)) + bytes(64), "shape"),
    (head(tensors=1) + info(dims=(2**40, 2**40, 2**40, 2**40)) + bytes(64), "end of the file"),
    (head(tensors=1) + info(dims=(2**31, 2**31, 4)) + bytes(64), "end of the file"),
    (head(tensors=1) + info(dims=(33,), kind=2) + bytes(64), "multiple"),
    (head(tensors=1) + info(kind=11) + bytes(64), "type number 11"),
    (head(tensors=1) + info(offset=HUGE - 31) + bytes(64), "end of the file"),
    (head(tensors=1) + info(offset=1) + bytes(64), "aligned"),
    (head(tensors=1) + info(dims=(400,)) + bytes(64), "end of the file"),
    (head(tensors=2) + info() * 2 + bytes(64), "twice"),
    (head(tensors=2) + info("a") + info("b") + bytes(96), "a and b overlap"),
    (head(tensors=2) + info("a", (16,)) + info("b", offset=32) + bytes(192), "a and b overlap"),
    (head(tensors=2) + info("a") + info("x\ny", offset=2**20) + bytes(64), "x\\ny ends"),
    (head(tensors=1) + info(name="n" * 300) + bytes(64), "bytes in a tensor's name"),
]


@pytest.mark.parametrize(("data", "words"), LIES)
def test_lies_are_refused(data: bytes, words: str, tmp_path: Path) -> None:
    assert words in refused(tmp_path / "lie.gguf", data)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        GGUFFile(tmp_path / "absent.gguf")


def test_every_truncation_is_noticed(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    tensors = GGUFFile(small).tensors.values()
    needed = max(tensor.start + tensor.num_rows * tensor.row_bytes for tensor in tensors)
    for length in [*range(0, 400, 3), *range(400, needed, 37), needed - 1]:
        refused(tmp_path / "cut.gguf", data[:length])


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutations_give_a_model_error_or_a_sound_file(data: st.DataObject, small: Path) -> None:
    original = small.read_bytes()
    content = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 9))
        width = data.draw(st.sampled_from([1, 4, 8]))
        value = data.draw(st.integers(0, 2 ** (8 * width) - 1) | st.sampled_from([0, 2 ** (8 * width) - 1]))
        content[at : at + width] = value.to_bytes(width, "little")
    path = small.with_name("mutated.gguf")
    path.write_bytes(content)
    tracemalloc.start()
    try:
        file = GGUFFile(path)
        for name, tensor in file.tensors.items():
            assert file.vector(name).shape == tensor.shape
    except ModelError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 1 << 20, "bytes, for a file of a few KiB"
