"""`octavo plan MODEL`: how many tokens and users a KV budget holds, without loading the model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvpool.budget import BudgetError, given_budget, parse_bytes
from kvpool.formats import BLOCK_SIZES
from model.config_reader import read_config
from model.errors import ModelError
from model.plan import plan_capacity
from model.source import resolve
from server.cli import Flags

DEFAULT_MEMORY = "4GiB"


class PlanError(Exception):
    """One line that says what cannot be planned."""


def plan_parser() -> Flags:
    parser = Flags("octavo plan", description="Print what a budget of keys and values holds, for every format of them.")
    parser.add_argument("model", nargs="?", metavar="MODEL", help="hub id, folder, or GGUF file; without it the demo")
    parser.add_argument(
        "--kv-cache-memory", metavar="BYTES", default=DEFAULT_MEMORY, help="e.g. 512MiB (default: %(default)s)"
    )
    parser.add_argument("--block-size", type=int, choices=BLOCK_SIZES, default=BLOCK_SIZES[0], help="tokens in a block")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[], metavar="N", help="tokens of a user; by default 1024, 4096, all"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw the tokens that fit, as SVG")
    return parser


def print_plan(arguments: Sequence[str]) -> None:
    """Raises PlanError."""
    flags = plan_parser().parse_args(arguments)
    try:
        budget = given_budget(_memory(flags.kv_cache_memory))
        source = resolve(flags.model, weights=False)
        plan = plan_capacity(read_config(source), budget, flags.block_size, flags.tokens)
        sys.stdout.write("\n".join([f"{source.name}: {plan.title}", "", *plan.table(), ""]))
        if flags.picture is not None:
            flags.picture.write_text(plan.picture(source.name), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"--picture {flags.picture}: {error.strerror}") from None
    except ValueError as error:
        raise PlanError(f"--tokens: {error}") from None
    except (ModelError, BudgetError) as error:
        raise PlanError(str(error)) from None


def _memory(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise PlanError(f"--kv-cache-memory: {error}") from None
