"""octavo bench export: one model's weights in the forms that other servers read, so that all compute the same numbers.

    GGUF, any quantisation ──▶ float32 ──▶ bfloat16 safetensors folder        vLLM, transformers, OpenVINO's exporter
                                      └──▶ GGUF in bf16, f16, q8_0 or q4_0    llama-server, OpenVINO

transformers' own reading of GGUF loses SmolLM2's digit pre-tokenizer, so the folder's tokenizer is Octavo's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.extras import MissingExtra, extra
from loadtest.options import Flags
from model.errors import ModelError
from model.gguf import GGUFFile
from model.gguf_config import gguf_fields
from model.gguf_tokenizer import gguf_parts
from model.source import ModelSource, resolve

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
    "Olmo2ForCausalLM": "olmo2",
}
"""Gemma is not among them: its GGUF files hold norm weights in another form than its safetensors."""
GGUF_KINDS = ("bf16", "f16", "q8_0", "q4_0")


def main(argv: Sequence[str]) -> int:
    """The exit status: 0; 2 with one line where the model cannot be exported."""
    parser = Flags(
        "octavo bench export",
        description="Write a GGUF model as a bfloat16 safetensors folder and as other GGUF files.",
    )
    parser.add_argument("folder", type=Path, help="where the files go; it is made")
    parser.add_argument("--model", help="the GGUF file; without it the demo model")
    parser.add_argument(
        "--gguf", action="append", default=[], choices=GGUF_KINDS, help="also a GGUF file of this kind; repeatable"
    )
    args = parser.parse_args(argv)
    try:
        source = gguf_source(args.model)
        export_folder(source, args.folder)
        print(args.folder)
        for kind in args.gguf:
            print(export_gguf(source.path, args.folder / f"{kind}.gguf", kind))
    except (ModelError, MissingExtra) as error:
        print(f"octavo bench export: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"octavo bench export: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def gguf_source(model: str | None) -> ModelSource:
    """The GGUF file of a model. Raises ModelError where it has none."""
    source = resolve(model)
    if source.kind != "gguf":
        raise ModelError(f"{source.path} is a safetensors folder already; only GGUF files are exported")
    return source


def export_folder(source: ModelSource, folder: Path) -> None:
    """A folder that transformers loads: bfloat16 weights, configuration, tokenizer, chat template.

    Raises ModelError for a model whose GGUF form cannot be turned back.
    """
    import torch
    from safetensors.torch import save_file

    from model.config_reader import read_config
    from model.weights import open_weights

    fields = gguf_fields(GGUFFile(source.path))
    architecture = fields["architectures"][0]
    if architecture not in MODEL_TYPES:
        raise ModelError(f"{source.path}: {architecture} cannot be exported; {', '.join(MODEL_TYPES)} can")
    parts = gguf_parts(source.path)
    store = open_weights(source, read_config(source))
    folder.mkdir(parents=True, exist_ok=True)
    eos = sorted(parts.eos_ids) if len(parts.eos_ids) > 1 else next(iter(parts.eos_ids), None)
    ids = {"bos_token_id": fields.get("bos_token_id"), "eos_token_id": eos}
    rope = {"rope_type": "default", "rope_theta": fields.get("rope_theta", 10_000.0)} | fields["rope_parameters"]
    more = {"model_type": MODEL_TYPES[architecture], "dtype": "bfloat16", "rope_parameters": rope}
    _write(folder / "config.json", fields | ids | more)
    _write(folder / "generation_config.json", {name: id_ for name, id_ in ids.items() if id_ is not None})
    _write(folder / "tokenizer.json", {"truncation": None, "padding": None, "normalizer": None} | parts.definition)
    tokenizer = dict(parts.special_tokens) | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields.get("max_position_embeddings"),
        "clean_up_tokenization_spaces": False,
    }
    if "default" in parts.chat_templates:
        tokenizer["chat_template"] = parts.chat_templates["default"]
    _write(folder / "tokenizer_config.json", tokenizer)
    weights = {name: store.get(name, torch.bfloat16).contiguous() for name in sorted(store.names())}
    # Last, and in one move: where this file is, the export is whole.
    unfinished = folder / "unfinished"
    save_file(weights, unfinished, {"format": "pt"})
    unfinished.rename(folder / "model.safetensors")


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False, indent=None if path.name == "tokenizer.json" else 2))


def export_gguf(path: Path, target: Path, kind: str) -> Path:
    """The same model as another GGUF file: matrices as `kind`, vectors in float32, metadata as they are.

    Embeddings, which are the LM head too in small models, are no smaller than q8_0: q4_0 is for the layers.
    """
    gguf = extra("gguf")
    source, reader = GGUFFile(path), gguf.GGUFReader(path)
    unfinished = target.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, arch=source.metadata["general.architecture"])
    written_anyway = ("general.architecture", "general.file_type", "general.quantization_version")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in written_anyway:
            kinds = field.types
            inner = kinds[-1] if kinds[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kinds[0], sub_type=inner)
    types, files = gguf.GGMLQuantizationType, gguf.LlamaFileType
    writer.add_file_type(files[f"MOSTLY_{kind.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, tensor in source.tensors.items():
        wanted = kind if len(tensor.shape) > 1 else "f32"
        if wanted == "q4_0" and name in ("token_embd.weight", "output.weight"):
            wanted = "q8_0"
        chosen = types[wanted.upper()]
        step = source.rows_per_chunk(name)
        chunks = [
            gguf.quants.quantize(source.rows(name, start, min(start + step, tensor.num_rows)), chosen)
            for start in range(0, tensor.num_rows, step)
        ]
        data = np.concatenate(chunks)
        writer.add_tensor(name, data if len(tensor.shape) > 1 else data.reshape(tensor.shape), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(target)
    return target
