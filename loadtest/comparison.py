"""The result of a comparison: what is saved, and the tables made of it. Pure functions over plain records."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec

from loadtest.workloads import BadWorkload


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of one server, measured once, or the medians over rounds."""

    output_tok_s: float
    ttft_median_ms: float
    ttft_p99_ms: float
    itl_median_ms: float
    itl_p99_ms: float
    start_s: float
    """From the start of the process until it served requests."""
    peak_rss_mib: float
    """Of the process tree, while the cell ran."""
    requests: int
    input_tokens: float
    """Mean, as the server counts them."""
    output_tokens: float
    duration_s: float


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One try at one cell."""

    server: str
    cell: str
    round: int
    figures: Figures | None = None
    error: str | None = None
    """Why there are none; one line."""
    log: str | None = None


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One server of the comparison."""

    name: str
    kind: str
    command: list[str]
    version: str | None = None
    missing: str | None = None
    """Why it could not be compared; one line."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One server in one cell, over all rounds."""

    server: str
    cell: str
    rounds: int
    median: Figures
    output_tok_s_rounds: list[float]
    ratio: float
    """Of output tokens a second, to the best peer; to the best server where no peer was measured."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file."""

    version: Literal[1] = 1
    started: str
    machine: dict[str, str]
    model: str
    settings: dict[str, int]
    """Seed, requests per client and the like: a run is only continued with the same."""
    servers: list[Entry]
    cells: list[str]
    runs: list[Run] = []
    summary: list[Row] = []


def summarise(servers: Sequence[Entry], cells: Sequence[str], runs: Sequence[Run]) -> list[Row]:
    """Medians over rounds, in the order of cells and servers."""
    kinds = {entry.name: entry.kind for entry in servers}
    rows: list[Row] = []
    for cell in cells:
        measured: dict[str, list[Figures]] = {}
        for name in kinds:
            found = [run.figures for run in runs if (run.server, run.cell) == (name, cell) and run.figures is not None]
            if found:
                measured[name] = found
        rates = {name: median(one.output_tok_s for one in figures) for name, figures in measured.items()}
        peers = [rate for name, rate in rates.items() if kinds[name] != "octavo"]
        best = max(peers or rates.values(), default=1.0)
        rows += [
            Row(
                server=name,
                cell=cell,
                rounds=len(figures),
                median=_medians(figures),
                output_tok_s_rounds=[one.output_tok_s for one in figures],
                ratio=rates[name] / best if best else 0.0,
            )
            for name, figures in measured.items()
        ]
    return rows


def _medians(figures: Sequence[Figures]) -> Figures:
    """Field by field; of memory the most."""
    columns = {name: [getattr(one, name) for one in figures] for name in Figures.__struct_fields__}
    middle = {name: type(values[0])(median(values)) for name, values in columns.items()}
    return Figures(**middle | {"peak_rss_mib": max(columns["peak_rss_mib"])})


def markdown(result: Comparison) -> str:
    """The tables as a document: throughput at a glance, every figure, and what is missing."""
    facts = ", ".join(result.machine.values())
    lines = ["# Servers compared", "", f"{result.model}, {result.started}. {facts}.", ""]
    by_place = {(row.server, row.cell): row for row in result.summary}
    names = [entry.name for entry in result.servers if any(row.server == entry.name for row in result.summary)]
    best = {cell: max((row.ratio for row in result.summary if row.cell == cell), default=0) for cell in result.cells}
    lines += [
        "## Output tokens a second",
        "",
        "In tokens in / tokens out @ requests at once; in brackets the ratio to the best peer of the cell.",
        "",
        *_head(["", *result.cells]),
    ]
    for name in names:
        cells = []
        for cell in result.cells:
            row = by_place.get((name, cell))
            text = "—" if row is None else f"{row.median.output_tok_s:.1f} ({row.ratio:.2f})"
            cells.append(f"**{text}**" if row is not None and row.ratio == best[cell] else text)
        lines.append(_line([name, *cells]))
    lines += ["", "## Every figure", "", "Medians over rounds; of memory the most. Latencies are median / p99.", ""]
    lines += _head(
        [
            "cell",
            "server",
            "tok/s",
            "lowest to highest",
            "ratio",
            "TTFT, ms",
            "ITL, ms",
            "start, s",
            "memory, MiB",
            "rounds",
        ]
    )
    lines += [_line(_cells(row)) for row in result.summary]
    lines += _remarks(result)
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    one = row.median
    low, high = min(row.output_tok_s_rounds), max(row.output_tok_s_rounds)
    return [
        *(row.cell, row.server, f"{one.output_tok_s:.1f}", f"{low:.1f} to {high:.1f}", f"{row.ratio:.2f}"),
        f"{one.ttft_median_ms:.0f} / {one.ttft_p99_ms:.0f}",
        f"{one.itl_median_ms:.1f} / {one.itl_p99_ms:.1f}",
        *(f"{one.start_s:.1f}", f"{one.peak_rss_mib:.0f}", str(row.rounds)),
    ]


def _remarks(result: Comparison) -> list[str]:
    """What is not in the tables, or is there under a caveat; then how each server was started."""
    said = [f"* {entry.name} was not compared: {entry.missing}." for entry in result.servers if entry.missing]
    failures: dict[tuple[str, str | None, str | None], list[Run]] = {}
    for run in result.runs:
        if run.error is not None:
            failures.setdefault((run.server, run.error, run.log), []).append(run)
    for (server, error, log), runs in failures.items():
        said.append(f"* {server}, round {runs[0].round}, {', '.join(run.cell for run in runs)}: {error}; log: {log}.")
    for row in result.summary:
        wanted = sum(map(int, row.cell.split("/")[0].split("+"))), int(row.cell.split("/")[1].split("@")[0])
        got = row.median.input_tokens, row.median.output_tokens
        if got != wanted:
            said.append(f"* {row.server}, {row.cell}: {got[0]:g} tokens in, {got[1]:g} out on average, by its count.")
    lines = ["", "## Not in the tables", "", *said] if said else []
    lines += ["", "## Servers", ""]
    for entry in result.servers:
        if entry.missing is None:
            lines.append(f"* {entry.name} ({entry.version or 'version unknown'}): `{' '.join(entry.command)}`")
    return lines


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _head(names: Sequence[str]) -> list[str]:
    return [_line(names), "|" + "---|" * len(names)]


def save(result: Comparison, folder: Path) -> None:
    """results.json and results.md, each replaced in one move. Raises OSError."""
    for name, data in (
        ("results.json", msgspec.json.format(msgspec.json.encode(result))),
        ("results.md", markdown(result).encode()),
    ):
        unfinished = folder / f".{name}"
        unfinished.write_bytes(data)
        unfinished.replace(folder / name)


def load(path: Path) -> Comparison:
    """A saved comparison. Raises BadWorkload where the file is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Comparison)
    except OSError as error:
        raise BadWorkload(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise BadWorkload(f"{path} is no comparison of this version: {error}") from None


def this_machine() -> dict[str, str]:
    """What figures depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    special = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile") if name in flags]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": f"{os.cpu_count()} cores",
        "instructions": " ".join(special) or "no vector flags known",
        "memory": f"{memory:.0f} GiB",
    }
