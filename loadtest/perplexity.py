"""octavo bench perplexity: what number types cost a model's judgement, on a text and without a server.

The text is by default the language reference that Python brings along (`pydoc_data.topics`): half a megabyte of English
prose with examples, free (PSF licence), in every installation and read without a download. It differs between Python's
versions, so figures compare where the printed digest of the tokens is the same.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from tqdm import tqdm

from kvpool.budget import BudgetError
from loadtest.options import Flags, Help, positive
from loadtest.report import aligned
from loadtest.workloads import BadWorkload
from model.errors import ModelError
from model.precision import QUANTIZATIONS
from model.source import resolve
from model.tokenizer import Tokenizer, load_tokenizer

BAD_START, INTERRUPTED = 2, 130
DTYPES = ("auto", "float32", "bfloat16", "float16")
HEADER = ("setting", "tokens", "perplexity", "ratio", "±", "mean KL", "same greedy", "seconds")


def make_parser() -> argparse.ArgumentParser:
    parser = Flags(
        "octavo bench perplexity",
        description="Perplexity of a text under every combination of the number types, and each one's distance from "
        "the first combination. All are in memory at once.",
        epilog="ratio: of the perplexity to the first; ±: half its 95 % interval; KL in nats; seconds: in the model.",
        formatter_class=Help,
    )
    add = parser.add_argument
    add("--model", help="hub id, folder or GGUF file; without it the demo model")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"], help="where it runs")
    add("--dtype", nargs="+", default=["auto"], choices=DTYPES, help="of the weights; several")
    add("--quantization", nargs="+", default=["none"], choices=["none", *QUANTIZATIONS], help="of the weights; several")
    add("--kv-cache-dtype", nargs="+", default=["auto"], help="of keys and values; several")
    add("--text", type=Path, metavar="FILE", help="UTF-8; without it Python's own language reference")
    add("--window", type=positive(int), default=1024, help="tokens of a context; all but its first are predicted")
    add("--num-tokens", type=positive(int), default=20_480, help="of the text, rounded down to whole windows")
    add("--max-num-batched-tokens", type=positive(int), default=512, help="tokens computed at a time")
    add("--disable-tqdm", action="store_true", help="no progress bar, even on a terminal")
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse what cannot be measured; exits with status 2."""
    if args.window < 2:
        parser.error("--window must be at least 2: a token is predicted from those before it")
    if args.num_tokens < args.window:
        parser.error(f"--num-tokens {args.num_tokens} is less than one --window of {args.window}")


def main(argv: Sequence[str]) -> int:
    """The exit status: 0; 2 where the run could not start, with one line why."""
    parser = make_parser()
    args = parser.parse_args(argv)
    check(parser, args)
    try:
        print(_measure(args))
        return 0
    except (ModelError, BudgetError, BadWorkload) as error:
        print(f"octavo bench perplexity: {error}", file=sys.stderr)
        return BAD_START
    except KeyboardInterrupt:
        return INTERRUPTED


def _measure(args: argparse.Namespace) -> str:
    from loadtest.likelihood import Score, Setting, compare, load  # Brings in torch.

    about, parts = read_windows(load_tokenizer(resolve(args.model)), args.text, args.window, args.num_tokens)
    settings = [
        Setting(dtype, None if quantization == "none" else quantization, kv)
        for dtype, quantization, kv in itertools.product(args.dtype, args.quantization, args.kv_cache_dtype)
    ]
    readers = load(
        args.model,
        args.device,
        settings,
        args.window,
        args.max_num_batched_tokens,
        lambda stage, detail: print(f"{stage}: {detail}", file=sys.stderr),
    )
    for part in tqdm(parts, unit="window", disable=args.disable_tqdm or not sys.stderr.isatty()):
        compare(readers, part)
    scores: list[Score] = [reader.score for reader in readers]
    rows = [
        (
            score.name,
            f"{score.tokens:,}",
            f"{score.perplexity:.4f}",
            f"{score.ratio:.5f}",
            f"{score.uncertainty:.5f}",
            f"{score.divergence / score.tokens:.2e}",
            f"{score.agreed / score.tokens:.2%}",
            f"{score.seconds:.1f}",
        )
        for score in scores
    ]
    return "\n".join([about, *aligned([HEADER, *rows])])


def read_windows(tokenizer: Tokenizer, path: Path | None, window: int, num_tokens: int) -> tuple[str, list[list[int]]]:
    """What the text at `path` is called, and the first windows of it. Raises BadWorkload where it has not one."""
    from loadtest.likelihood import windows  # Brings in torch.

    name, text = _text(path)
    ids = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
    prefix = [id for id in tokenizer.encode("", add_special_tokens=True)[:1] if id == tokenizer.bos_id]
    parts = windows(ids, prefix, window, num_tokens // window)
    if not parts:
        raise BadWorkload(f"{name} has {len(ids):,} tokens, a --window has {window:,}")
    digest = blake2b(b"".join(array("I", part).tobytes() for part in parts), digest_size=4).hexdigest()
    return f"{name}: {len(parts)} windows of {window:,} tokens, digest {digest}", parts


def _text(path: Path | None) -> tuple[str, str]:
    """What it is called, and it. Raises BadWorkload where the file cannot be read as UTF-8."""
    if path is None:
        from pydoc_data.topics import topics

        return f"Python {sys.version_info[0]}.{sys.version_info[1]}'s language reference", "\n\n".join(
            topics[name] for name in sorted(topics)
        )
    try:
        return str(path), path.read_text("utf-8")
    except OSError as error:
        raise BadWorkload(f"--text {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadWorkload(f"--text {path}: not UTF-8 at byte {error.start:,}") from None
