"""Bytes per token, with the worked numbers of the project's first texts, whose MB and GB are 2**20 and 2**30."""

from __future__ import annotations

import pytest

from kvpool.formats import FORMATS, KVFormat, KVLayout

MB, GB = 1 << 20, 1 << 30
LLAMA_2_7B = KVLayout(32, 32, 128, FORMATS["float16"])
LLAMA_31_8B = KVLayout(32, 8, 128, FORMATS["float16"])
LLAMA_31_8B_WITHOUT_GQA = KVLayout(32, 32, 128, FORMATS["float16"])


def test_llama_2_7b() -> None:
    assert LLAMA_2_7B.bytes_per_token == 524_288
    assert LLAMA_2_7B.bytes_per_token * 4096 == 2 * GB


def test_llama_31_8b() -> None:
    assert LLAMA_31_8B.format.vector_bytes(128) == 512
    assert LLAMA_31_8B.bytes_per_token == 131_072
    assert LLAMA_31_8B.bytes_per_token * 4096 == 512 * MB
    assert LLAMA_31_8B_WITHOUT_GQA.bytes_per_token * 4096 == 2048 * MB
    assert LLAMA_31_8B.bytes_per_token * 128_000 / GB == pytest.approx(16, rel=0.03)
    assert 32 * LLAMA_31_8B.bytes_per_token * 4096 == 16 * GB
    assert 10 * LLAMA_31_8B.bytes_per_token * 4096 == 5 * GB


@pytest.mark.parametrize(
    ("layers", "heads", "dim", "expected"),
    [(28, 8, 128, 114_688), (36, 8, 128, 147_456), (32, 8, 128, 131_072), (30, 3, 64, 23_040)],
    ids=["Qwen3-0.6B", "Qwen3-8B", "Llama-3.1-8B", "SmolLM2-135M"],
)
def test_bfloat16_and_float32_of_known_models(layers: int, heads: int, dim: int, expected: int) -> None:
    assert KVLayout(layers, heads, dim, FORMATS["bfloat16"]).bytes_per_token == expected
    assert KVLayout(layers, heads, dim, FORMATS["float32"]).bytes_per_token == 2 * expected


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (KVFormat("int8", 8, 8, 2), 58_240),
        (KVFormat("k8v4", 8, 4, 2), 43_904),
        (KVFormat("tq4", 4, 4, 2), 29_568),
    ],
)
def test_the_terms_also_describe_quantised_formats(form: KVFormat, expected: int) -> None:
    assert KVLayout(28, 8, 128, form).bytes_per_token == expected


def test_blocks_and_shapes() -> None:
    layout = KVLayout(30, 3, 64, FORMATS["bfloat16"], block_size=32)
    assert layout.block_bytes == 32 * 23_040
    assert layout.shape(7) == (7, 3, 32, 64)
    assert [layout.blocks_for(n) for n in (0, 1, 32, 33)] == [0, 1, 1, 2]
