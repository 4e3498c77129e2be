"""octavo bench kv: what each format of keys and values holds, costs a model's judgement, and takes. One table.

    holds    bytes of a token, and the tokens that --budget buys
    costs    on a text, as `octavo bench perplexity` has it; and on greedy answers of the first format to 20 prompts
    takes    --streams prompts of --context tokens, one after the other, then decoded together, by the engine's runner

The first format is the one that the others are compared with. All are in memory at once, and take turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Never

import msgspec
from tqdm import tqdm

from kvpool.budget import MIB, BudgetError, format_bytes, given_budget, plan_pool
from kvpool.formats import FORMATS, KVLayout
from loadtest.comparison import this_machine
from loadtest.options import Flags, Help, byte_count, positive
from loadtest.perplexity import BAD_START, INTERRUPTED, read_windows
from loadtest.workloads import BadWorkload
from model.errors import ModelError
from model.source import resolve
from model.tokenizer import load_tokenizer

CHUNK = 512
"""Tokens of a step."""


class FormatRow(msgspec.Struct, frozen=True):
    """What was found of one format."""

    format: str
    bytes_per_token: int
    tokens: int
    """Of the budget."""
    perplexity: float
    ratio: float
    """Of the perplexity to the first format's."""
    uncertainty: float
    """Half the ratio's 95 % interval."""
    divergence: float
    """Mean KL from the first format over the text, in nats."""
    same_greedy: float
    """Share of places of the greedy answers with the same likeliest token."""
    same_answers: int
    prefill: float
    """Tokens a second of one prompt."""
    decode: float
    """Tokens a second of all streams together."""


class FormatTable(msgspec.Struct, frozen=True):
    machine: dict[str, str]
    model: str
    device: str
    weights: str
    text: str
    predicted: int
    """Tokens of the text."""
    answers: int
    new_tokens: int
    """Of each."""
    streams: int
    context: int
    budget: int
    formats: list[FormatRow]


def make_parser() -> argparse.ArgumentParser:
    parser = Flags(
        "octavo bench kv",
        description="What each format of keys and values holds, costs a model's judgement, and takes.",
        formatter_class=Help,
    )
    add = parser.add_argument
    add("--model", help="hub id, folder or GGUF file; without it the demo model")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"], help="where it runs")
    add(
        "--kv-cache-dtype",
        nargs="+",
        default=["bfloat16", "int8", "k8v4", "tq4"],
        choices=[*FORMATS],
        metavar="FORMAT",
        help=f"of {', '.join(FORMATS)}; the others are compared with the first",
    )
    add("--budget", type=byte_count, default=256 * MIB, metavar="BYTES", help="of keys and values, for the tokens held")
    add("--text", type=Path, metavar="FILE", help="UTF-8; without it Python's own language reference")
    add("--window", type=positive(int), default=1024, help="tokens of a context of the text; at least --context")
    add("--num-tokens", type=positive(int), default=20_480, help="of the text, rounded down to whole windows")
    add("--new-tokens", type=positive(int), default=64, help="of a greedy answer")
    add("--streams", type=positive(int), default=32, help="that decode together")
    add("--context", type=positive(int), default=1000, help="tokens of each of them")
    add("--steps", type=positive(int), default=20, help="in which they decode; the median counts")
    add("--out", type=Path, default=Path("results/kv.json"), metavar="FILE", help="the figures as JSON")
    add("--disable-tqdm", action="store_true", help="no progress bars, even on a terminal")
    return parser


def main(argv: Sequence[str]) -> int:
    """The exit status: 0; 2 where the run could not start, with one line why."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.window < max(2, args.context):
        parser.error(f"--window {args.window} must be at least 2, and --context {args.context}")
    if args.window <= args.new_tokens:
        parser.error(f"--window {args.window} must be more than --new-tokens {args.new_tokens}")
    if args.num_tokens < args.window:
        parser.error(f"--num-tokens {args.num_tokens} is less than one --window of {args.window}")
    try:
        with _writing(args.out):  # before minutes of work
            args.out.parent.mkdir(parents=True, exist_ok=True)
        table = measure(args)
        with _writing(args.out):
            args.out.write_bytes(msgspec.json.format(msgspec.json.encode(table)))
        print("\n".join([*markdown(table), "", f"saved to {args.out}"]))
        return 0
    except (ModelError, BudgetError, BadWorkload) as error:
        print(f"octavo bench kv: {error}", file=sys.stderr)
        return BAD_START
    except KeyboardInterrupt:
        return INTERRUPTED


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadWorkload(f"cannot write {path}: {error.strerror}") from None


def measure(args: argparse.Namespace) -> FormatTable:
    """Raises ModelError, BudgetError or BadWorkload."""
    from loadtest.greedy import PROMPTS, Agreement, continued, followed  # Bring in torch.
    from loadtest.likelihood import BLOCK_SIZE, Setting, compare, load
    from loadtest.relay import take_turns

    def bar(what: str, total: int) -> tqdm[Never]:
        return tqdm(total=total, desc=what, disable=args.disable_tqdm or not sys.stderr.isatty())

    source = resolve(args.model)
    tokenizer = load_tokenizer(source)
    text, parts = read_windows(tokenizer, args.text, args.window, args.num_tokens)
    readers = load(
        args.model,
        args.device,
        [Setting(kv_cache_dtype=name) for name in args.kv_cache_dtype],
        args.window,
        CHUNK,
        lambda stage, detail: print(f"{stage}: {detail}", file=sys.stderr),
        args.streams,
    )
    runners = [reader.loaded for reader in readers]
    with bar("text", len(parts)) as progress:
        for part in parts:
            compare(readers, part)
            progress.update()
    agreements = [Agreement() for _ in readers]
    with bar("answers", len(PROMPTS)) as progress:
        for prompt in PROMPTS:
            ids = tokenizer.encode(prompt, add_special_tokens=True)[: args.window - args.new_tokens]
            answer = continued(runners[0].runner, ids, args.new_tokens)
            for reader, agreement in zip(readers, agreements, strict=True):
                agreement.add(followed(reader, answer, len(ids)))
            progress.update()
    with bar("speed", args.streams + 1 + args.steps) as progress:
        times = take_turns(runners, args.streams, args.context, args.steps, progress.update)

    rows = []
    for reader, agreement, time in zip(readers, agreements, times, strict=True):
        config, form = reader.loaded.model_config, FORMATS[reader.loaded.kv_cache_dtype]
        layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, form, BLOCK_SIZE)
        score, (prefill, decode) = reader.score, time.rates(args.streams, args.context)
        rows.append(
            FormatRow(
                form.name,
                layout.bytes_per_token,
                plan_pool(layout, given_budget(args.budget), args.window).num_tokens,
                score.perplexity,
                score.ratio,
                score.uncertainty,
                score.divergence / score.tokens,
                agreement.same / agreement.places,
                agreement.texts,
                prefill,
                decode,
            )
        )
    return FormatTable(
        this_machine(),
        source.name,
        runners[0].device,
        runners[0].dtype,
        text,
        readers[0].score.tokens,
        len(PROMPTS),
        args.new_tokens,
        args.streams,
        args.context,
        args.budget,
        rows,
    )


def markdown(table: FormatTable) -> list[str]:
    """The table, and what was measured on what."""
    first = table.formats[0]
    heads = [
        "format",
        "bytes a token",
        f"tokens in {format_bytes(table.budget)}",
        "perplexity",
        f"to {first.format}'s",
        "KL, nats",
        "same greedy token",
        "same answers",
        "prefill, tokens/s",
        "decode, tokens/s",
    ]
    lines = [
        f"{table.model}, weights {table.weights}, on {table.device} ({', '.join(table.machine.values())}). "
        f"{table.text}, {table.predicted:,} tokens predicted; {table.answers} answers of {table.new_tokens} tokens; "
        f"{table.streams} streams of {table.context:,} tokens.",
        "",
        "| " + " | ".join(heads) + " |",
        "|---|" + "---:|" * (len(heads) - 1),
    ]
    for row in table.formats:
        cells = [
            row.format,
            f"{row.bytes_per_token:,}",
            f"{row.tokens:,} ({row.tokens / first.tokens:.2f} x)",
            f"{row.perplexity:.4f}",
            "1" if row is first else f"{row.ratio:.4f} ± {row.uncertainty:.4f}",
            f"{row.divergence:.4f}",
            f"{row.same_greedy:.1%}",
            f"{row.same_answers} of {table.answers}",
            f"{row.prefill:.0f}",
            f"{row.decode:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines
