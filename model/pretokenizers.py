"""How text is cut into words before byte-level BPE, by the name that a GGUF file gives (`tokenizer.ggml.pre`).

The file holds no more than the name; the rules behind it are those of llama.cpp (src/llama-vocab.cpp) and of the
tokenizer.json files that the names were made for. A wrong rule gives wrong ids, so an unknown name is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from model.errors import ModelError

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One named rule."""

    pattern: str | None = None
    """None: GPT-2's own, which is built into the library."""
    digits: bool = False
    """Every digit is cut off first."""
    ignore_merges: bool = False
    """A word that is in the vocabulary is one token, whatever the merges say."""
    add_bos: bool = False
    """What to do where the file does not say."""
    nfc: bool = False

    def steps(self) -> dict[str, Any]:
        """As tokenizer.json has it."""
        steps: list[dict[str, Any]] = []
        if self.digits:
            steps.append({"type": "Digits", "individual_digits": True})
        if self.pattern is not None:
            steps.append({"type": "Split", "pattern": {"Regex": self.pattern}, "behavior": "Isolated", "invert": False})
        use_regex = self.pattern is None
        steps.append(
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex},
        )
        return {"type": "Sequence", "pretokenizers": steps}


_GPT_2 = PreTokenizer()
_DIGITS = PreTokenizer(digits=True)
_CL100K = PreTokenizer(_LLAMA_3)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _GPT_2,
    "gpt-2": _GPT_2,
    "phi-2": _GPT_2,
    "olmo": _GPT_2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": PreTokenizer(_LLAMA_3, ignore_merges=True, add_bos=True),
    "llama3": PreTokenizer(_LLAMA_3, ignore_merges=True, add_bos=True),
    "llama-v3": PreTokenizer(_LLAMA_3, ignore_merges=True, add_bos=True),
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "qwen2": PreTokenizer(_QWEN_2, nfc=True),
    "deepseek-r1-qwen": PreTokenizer(_QWEN_2),
    "gpt-4o": PreTokenizer(_O200K),
    "tekken": PreTokenizer(_TEKKEN, ignore_merges=True, add_bos=True),
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The rule of that name. Raises ModelError for one that is not known."""
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelError(f"tokenizer.ggml.pre: the pre-tokenizer {name[:40]!r} is not known; these are: {known}")
    return PRE_TOKENIZERS[name]
