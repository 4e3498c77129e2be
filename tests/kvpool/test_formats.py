"""Bytes per token, with the worked numbers of the project's first texts, whose MB and GB are 2**20 and 2**30."""

from __future__ import annotations

import pytest

from kvpool.formats import FORMATS, KVLayout

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


@pytest.mark.parametrize(("form", "expected"), [("int8", 58_240), ("k8v4", 43_904), ("tq4", 29_568)])
def test_codes_and_their_scales(form: str, expected: int) -> None:
    assert KVLayout(28, 8, 128, FORMATS[form]).bytes_per_token == expected


@pytest.mark.parametrize(("form", "times"), [("int8", 1.9), ("k8v4", 2.5), ("tq4", 3.7)])
def test_codes_hold_more_tokens_than_16_bits(form: str, times: float) -> None:
    """What `--help` says, of the demo model, whose heads are small: 256 MiB hold so many times the tokens."""

    def tokens(form: str) -> int:
        return 256 * MB // KVLayout(30, 3, 64, FORMATS[form]).block_bytes * 16

    assert tokens(form) >= times * tokens("bfloat16")


@pytest.mark.parametrize("name", list(FORMATS))
def test_blocks_and_tiles(name: str) -> None:
    form = FORMATS[name]
    layout = KVLayout(30, 3, 64, form, block_size=32)
    assert layout.block_bytes == 32 * layout.bytes_per_token
    tiles = layout.tile_bytes(form.key_bits) + layout.tile_bytes(form.value_bits)
    assert layout.block_bytes == 30 * 3 * tiles
    assert 64 % form.head_multiple == 0
    assert [layout.blocks_for(n) for n in (0, 1, 32, 33)] == [0, 1, 1, 2]
