"""What other programs find in the exported files is the model that went in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from loadtest.export import export_gguf, main
from model.config_reader import read_config
from model.gguf import GGUFFile
from model.source import resolve
from model.tokenizer import load_tokenizer
from model.weights import open_weights
from tests.loadtest import tiny

TEXTS = ("ab cd ef", "a 12345 b  67\n\n3", "<|im_start|>ab<|im_end|>", "Grüße 👋")


def test_transformers_loads_the_folder(tiny_weights: Path) -> None:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tiny_weights)
    assert loaded.dtype == torch.bfloat16
    state = loaded.state_dict()
    assert {name for name in state if name != "lm_head.weight"} == set(tiny.tensors())
    for name, tensor in tiny.tensors().items():
        assert torch.equal(state[name], torch.from_numpy(tensor).to(torch.bfloat16)), name
    config = loaded.config
    assert config.tie_word_embeddings
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 50_000.0}
    assert (config.bos_token_id, config.eos_token_id, loaded.generation_config.eos_token_id) == (1, 2, 2)


def test_transformers_tokenises_alike(tiny_gguf: Path, tiny_weights: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(tiny_weights)
    ours = load_tokenizer(resolve(str(tiny_gguf)))
    for text in TEXTS:
        assert theirs(text).input_ids == ours.encode(text, add_special_tokens=True), text
    assert (theirs.bos_token, theirs.eos_token) == ("<|im_start|>", "<|im_end|>")
    said = theirs.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert said == "<|im_start|>ab<|im_end|>"


def test_octavo_reads_the_same_from_both(tiny_gguf: Path, tiny_weights: Path) -> None:
    file, folder = resolve(str(tiny_gguf)), resolve(str(tiny_weights))
    assert read_config(folder) == replace(read_config(file), dtype="bfloat16")
    stores = [open_weights(source, read_config(source)) for source in (file, folder)]
    assert stores[0].names() == stores[1].names()
    for name in stores[0].names():
        assert torch.equal(stores[0].get(name, torch.bfloat16), stores[1].get(name)), name


@pytest.mark.parametrize(
    ("kind", "embedding", "error"),
    [("bf16", "BF16", 2**-8), ("f16", "F16", 2**-10), ("q8_0", "Q8_0", 1e-2), ("q4_0", "Q8_0", 0.15)],
)
def test_gguf_kinds(kind: str, embedding: str, error: float, tiny_gguf: Path, tmp_path: Path) -> None:
    """error: the most that a number may be off, as a share of the largest of its tensor."""
    path = export_gguf(tiny_gguf, tmp_path / "new.gguf", kind)
    old, new = GGUFFile(tiny_gguf), GGUFFile(path)
    assert new.tensors["blk.0.ffn_up.weight"].format.name == kind.upper()
    assert new.tensors["token_embd.weight"].format.name == embedding
    for name, tensor in old.tensors.items():
        before, after = old.vector(name), new.vector(name)
        if len(tensor.shape) == 1:
            assert np.array_equal(before, after), name
        assert np.abs(before - after).max() <= error * np.abs(before).max(), name
    sources = resolve(str(tiny_gguf)), resolve(str(path))
    first, second = (load_tokenizer(source).encode(TEXTS[1], add_special_tokens=True) for source in sources)
    assert first == second
    assert read_config(sources[1]) == replace(read_config(sources[0]), dtype=read_config(sources[1]).dtype)
    assert [file.name for file in tmp_path.iterdir()] == ["new.gguf"], "nothing unfinished is left"


def test_the_command(tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([str(out), "--model", str(tiny_gguf), "--gguf", "q8_0"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(out), str(out / "q8_0.gguf")]
    assert main([str(tmp_path / "again"), "--model", str(out)]) == 2
    assert "is a safetensors folder already" in capsys.readouterr().err
    assert main([str(tiny_gguf), "--model", str(tiny_gguf)]) == 2
    assert "cannot write" in capsys.readouterr().err
