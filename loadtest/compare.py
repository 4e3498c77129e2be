"""octavo bench compare: Octavo and other servers, one after another, on the same weights and the same requests."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import msgspec

from loadtest import comparison
from loadtest.cells import Cell, Words, parse_cells
from loadtest.comparison import Comparison, Entry, Run
from loadtest.export import GGUF_KINDS, export_folder, export_gguf, gguf_source
from loadtest.extras import MissingExtra, extra
from loadtest.options import Flags, Help, natural, positive
from loadtest.peers import KINDS, TITLES, Conditions, NotFound, Peer, version_of
from loadtest.plots import plot
from loadtest.rounds import Plan, compare
from loadtest.workloads import BadWorkload
from model.config_reader import read_config
from model.errors import ModelError
from model.source import resolve
from model.tokenizer import load_tokenizer

NOTHING_MEASURED, BAD_START, INTERRUPTED = 1, 2, 130
CELLS = ["128/128@1,8,32", "512/128@1,8,32", "512+32/64@32"]
PROGRAMS = {
    "llama": ("--llama-server", "LLAMA_SERVER", "the llama-server program"),
    "vllm": ("--vllm-python", "VLLM_PYTHON", "Python of an environment with vllm"),
    "openvino": ("--openvino-python", "OPENVINO_PYTHON", "Python of an environment with openvino-genai"),
    "transformers": ("--transformers-python", "TRANSFORMERS_PYTHON", "Python of one with transformers[serving]"),
}
"""By kind: the flag that says where it is, its variable, and what it is."""
CONTEXT_STEP = 256


def make_parser() -> argparse.ArgumentParser:
    parser = Flags(
        "octavo bench compare",
        description="Measure Octavo and other servers in turn, on the same weights and requests. What is not found on "
        "this machine, or fails, is listed as such and stops nothing.",
        epilog="In FLAGS {weights} is the folder of weights; its bf16, f16, q8_0 and q4_0.gguf are made when they are "
        "asked for.",
        formatter_class=Help,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("results/compare"), help="folder of results.json, results.md, plot.png, logs")
    add("--resume", action="store_true", help="go on where the comparison in --out was broken off; try failures again")
    add("--model", help="a GGUF file; without it the demo model")
    add("--weights", type=Path, help="folder for its exported weights; without it OUT/weights")
    add("--no-plot", action="store_true", help="tables only")

    load = parser.add_argument_group("load").add_argument
    load("--cells", nargs="+", type=_cells, default=CELLS, metavar="IN/OUT@N,N", help="a shared part: 512+32/64@32")
    load("--repeat", type=positive(int), default=1, metavar="N", help="rounds; medians are shown")
    load("--requests-per-client", type=positive(int), default=3, metavar="N", help="per cell, after warm-up")
    load("--seed", type=natural, default=0, help="of the prompts")
    load("--start-timeout", type=positive(float), default=600.0, metavar="S", help="seconds until a server must answer")
    load("--request-timeout", type=positive(float), default=1800.0, metavar="S", help="seconds for one answer")

    servers = parser.add_argument_group("servers").add_argument
    servers("--servers", type=_kinds, default=list(KINDS), metavar="KIND,KIND", help=f"of {','.join(KINDS)}")
    for kind in KINDS:
        text = f"{TITLES[kind]} under this name, with these flags behind its usual ones; repeatable"
        servers(f"--{kind}", action="append", type=_variant, default=[], metavar='"LABEL: FLAGS"', help=text)
    for kind, (flag, variable, text) in PROGRAMS.items():
        servers(flag, dest=f"{kind}_program", metavar="PATH", default=os.environ.get(variable), help=text)
    servers("--openvino-model", type=Path, help="an IR folder or GGUF file; without it WEIGHTS/openvino or f16.gguf")
    return parser


def main(argv: Sequence[str]) -> int:
    """The exit status: 0; 1 where nothing was measured; 2 where the run could not start; 130 where it was ended."""
    args = make_parser().parse_args(argv)
    try:
        extra("psutil")
        if not args.no_plot:
            extra("matplotlib")
        return _compare(args)
    except (BadWorkload, ModelError, MissingExtra) as error:
        print(f"octavo bench compare: {error}", file=sys.stderr)
        return BAD_START
    except OSError as error:
        print(f"octavo bench compare: {error.filename}: {error.strerror}", file=sys.stderr)
        return BAD_START


def _compare(args: argparse.Namespace) -> int:
    cells = [cell for part in args.cells for cell in (parse_cells(part) if isinstance(part, str) else part)]
    path = args.out / "results.json"
    if path.exists() and not args.resume:
        raise BadWorkload(f"{path} is there already: --resume goes on with it, another --out begins a new one")
    peers, entries = _peers(args, cells)
    result = Comparison(
        started=datetime.now().astimezone().isoformat(" ", "minutes"),
        machine=comparison.this_machine(),
        model=resolve(args.model).name,
        settings={"seed": args.seed, "requests_per_client": args.requests_per_client},
        servers=entries,
        cells=[cell.name for cell in cells],
    )
    if path.exists():
        result = _continued(result, comparison.load(path))
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    weights = _export(args, peers)
    plan = Plan(
        cells=cells,
        words=Words(load_tokenizer(resolve(str(weights)))),
        rounds=args.repeat,
        requests_per_client=args.requests_per_client,
        seed=args.seed,
        start_limit=args.start_timeout,
        cell_limit=args.request_timeout,
        logs=args.out / "logs",
    )
    return _run(args, plan, peers, Book(result, args.out))


class Book:
    """The comparison so far, on disk after every cell."""

    def __init__(self, result: Comparison, folder: Path) -> None:
        self.result = result
        self._folder = folder
        self._save(result.runs)

    def record(self, run: Run) -> None:
        place = (run.server, run.cell, run.round)
        self._save([old for old in self.result.runs if (old.server, old.cell, old.round) != place] + [run])

    def _save(self, runs: list[Run]) -> None:
        summary = comparison.summarise(self.result.servers, self.result.cells, runs)
        self.result = msgspec.structs.replace(self.result, runs=runs, summary=summary)
        comparison.save(self.result, self._folder)


def _run(args: argparse.Namespace, plan: Plan, peers: Sequence[Peer], book: Book) -> int:
    interrupted = False
    try:
        asyncio.run(compare(plan, peers, book.result.runs, book.record))
    except (KeyboardInterrupt, asyncio.CancelledError):
        interrupted = True
    if book.result.summary and not args.no_plot:
        plot(book.result, args.out / "plot.png")
    print(comparison.markdown(book.result))
    print(f"saved in {args.out}" + ("; --resume goes on" if interrupted else ""), file=sys.stderr)
    return INTERRUPTED if interrupted else 0 if book.result.summary else NOTHING_MEASURED


def _peers(args: argparse.Namespace, cells: Sequence[Cell]) -> tuple[list[Peer], list[Entry]]:
    """Those that are here, and an entry for every one that was asked for."""
    longest = max(cell.length for cell in cells)
    conditions = Conditions(
        weights=_weights(args),
        concurrency=max(cell.concurrency for cell in cells),
        context=-(-longest // CONTEXT_STEP) * CONTEXT_STEP,
        threads=len(os.sched_getaffinity(0)),
        openvino_model=args.openvino_model,
        programs={kind: program for kind in PROGRAMS if (program := getattr(args, f"{kind}_program"))},
    )
    peers: list[Peer] = []
    entries: list[Entry] = []
    for kind in args.servers:
        for name, flags in getattr(args, kind) or [(TITLES[kind], [])]:
            try:
                peer = KINDS[kind](name, conditions)
                if shutil.which(peer.command[0]) is None:
                    raise NotFound(f"{peer.command[0]} is no program")
            except NotFound as error:
                entries.append(Entry(name=name, kind=kind, command=[], missing=str(error)))
                continue
            added = [flag.replace("{weights}", str(conditions.weights)) for flag in flags]
            peer = replace(peer, command=(*peer.command, *added))
            peers.append(peer)
            entries.append(Entry(name=name, kind=kind, command=list(peer.command), version=version_of(peer)))
    names = [entry.name for entry in entries]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadWorkload(f"two servers are called {twice!r}; give each a label of its own")
    return peers, entries


def _weights(args: argparse.Namespace) -> Path:
    folder: Path = args.weights or args.out / "weights"
    return folder.resolve()


def _export(args: argparse.Namespace, peers: Sequence[Peer]) -> Path:
    """The folder with the weights; what the servers need of it and is not there yet is made.

    Raises BadWorkload where it holds another model.
    """
    folder, source = _weights(args), gguf_source(args.model)
    wanted = {part for peer in peers for part in peer.command if part.startswith(str(folder))}
    if not (folder / "model.safetensors").exists():
        print(f"exporting to {folder}", file=sys.stderr)
        export_folder(source, folder)
    there, asked = read_config(resolve(str(folder))), read_config(source)
    if replace(there, dtype=asked.dtype) != asked:
        raise BadWorkload(f"{folder} holds another model than {source.path}: name another folder with --weights")
    for kind in GGUF_KINDS:
        path = folder / f"{kind}.gguf"
        if str(path) in wanted and not path.exists():
            export_gguf(source.path, path, kind)
    return folder


def _continued(new: Comparison, old: Comparison) -> Comparison:
    """The old runs under the new plan. Raises BadWorkload where they would not compare."""
    for what in ("model", "settings", "machine"):
        if getattr(new, what) != getattr(old, what):
            raise BadWorkload(f"--resume: {what} was {getattr(old, what)}, now it is {getattr(new, what)}")
    before = {entry.name: entry for entry in old.servers if entry.missing is None}
    for entry in new.servers:
        if entry.missing is None and entry.name in before and before[entry.name].command != entry.command:
            raise BadWorkload(f"--resume: {entry.name} was started with other flags; give these a label of their own")
    names = {entry.name for entry in new.servers}
    gone = [entry for entry in old.servers if entry.name not in names]
    cells = new.cells + [cell for cell in old.cells if cell not in new.cells]
    return msgspec.structs.replace(new, started=old.started, servers=new.servers + gone, cells=cells, runs=old.runs)


def _cells(text: str) -> list[Cell]:
    try:
        return parse_cells(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _kinds(text: str) -> list[str]:
    kinds = list(dict.fromkeys(kind.strip() for kind in text.split(",")))
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(KINDS)}")
    return kinds


def _variant(text: str) -> tuple[str, list[str]]:
    label, _, flags = text.partition(":")
    if not label.strip():
        raise argparse.ArgumentTypeError(f"{text!r} has no label in front of a colon")
    return label.strip(), shlex.split(flags)
