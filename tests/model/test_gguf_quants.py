"""Every block format, bit for bit, against the reference implementation in the `gguf` package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from model.gguf_quants import FORMATS


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_sizes(kind: int) -> None:
    theirs = gguf.GGMLQuantizationType(kind)
    block = FORMATS[kind]
    assert theirs.name == block.name
    assert gguf.GGML_QUANT_SIZES[theirs] == (block.elements, block.bytes)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random scales overflow and are NaN, in theirs and in ours
@pytest.mark.parametrize("kind", sorted(FORMATS))
@given(data=st.data())
def test_random_blocks(kind: int, data: st.DataObject) -> None:
    block = FORMATS[kind]
    shape = (data.draw(st.integers(1, 5)), block.bytes)
    raw = data.draw(arrays.arrays(np.uint8, shape))
    values = block.dequantise(raw)
    assert values.dtype == np.float32
    theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind)).reshape(len(raw), -1)
    np.testing.assert_array_equal(values.reshape(len(raw), -1), theirs)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "F32"])
def test_quantised_by_the_reference(kind: str) -> None:
    values = np.random.default_rng(0).standard_normal((7, 64), np.float32)
    qtype = gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(values, qtype).view(np.uint8)
    block = FORMATS[qtype]
    back = block.dequantise(raw.reshape(-1, block.bytes)).reshape(7, 64)
    error = {"Q4": 0.3, "Q5": 0.15, "Q8": 0.02, "BF": 0.02, "F1": 0.002, "F3": 0.0}[kind[:2]]
    assert np.abs(back - values).max() <= error
