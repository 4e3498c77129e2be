"""A tiny Llama as a GGUF file, tokenizer included, with enough whole words to make prompts of."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

LETTERS = string.ascii_lowercase[:18]
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
Array = NDArray[np.float32]
Arrays = dict[str, Array]


def vocabulary() -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges, token types: bytes, pairs of letters, and each pair behind a space."""
    bytes_ = [chr(code) if 33 <= code <= 126 else chr(256 + code) for code in range(256)]
    pairs = [a + b for a in LETTERS for b in LETTERS]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_, *pairs, *("Ġ" + pair for pair in pairs)]
    merges = [f"{pair[0]} {pair[1]}" for pair in pairs] + [f"Ġ {pair}" for pair in pairs]
    return tokens, merges, [3, 3, 3] + [1] * (len(tokens) - 3)


def tensors() -> Arrays:
    """Under safetensors' names, seeded, none of them symmetric in any way."""
    generator = np.random.default_rng(0)
    layer = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (len(vocabulary()[0]), HIDDEN), "norm": (HIDDEN,)}
    shapes |= {f"layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in layer.items()}
    return {
        f"model.{name}.weight": generator.normal(0, 0.05, shape).astype(np.float32) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def write(path: Path, change: Callable[[str, Array], Array] = lambda name, tensor: tensor) -> Path:
    """The file as llama.cpp's converter would write it, in float32. `change`: of each tensor, by name."""
    tokens, merges, kinds = vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    numbers: dict[str, Any] = {
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "block_count": LAYERS,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "context_length": 2048,
    }
    for key, value in numbers.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 50_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, tensor in tensors().items():
        tensor = change(name, tensor)
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.rsplit(".", 2)[1])
        if heads is not None:  # the converter's order of rows, for rotation of neighbours
            tensor = tensor.reshape(heads, 2, HEAD_DIM // 2, HIDDEN).swapaxes(1, 2).reshape(tensor.shape)
        new = names.get_name(name, try_suffixes=(".weight",))
        assert new is not None
        writer.add_tensor(new, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
