"""The picture of a comparison: per cell one bar a server, as a share of the best peer's throughput."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

from loadtest.comparison import Comparison
from loadtest.extras import extra

OCTAVO_COLOURS = ("#0b3d91", "#3f7fd9", "#8fb8f0", "#c4dcfa")
PEER_COLOURS = ("#e69f00", "#009e73", "#cc79a7", "#8c564b", "#7f7f7f", "#d55e00", "#f0e442")
GROUP = 0.84
"""Share of a cell's width that its bars take."""


def plot(result: Comparison, path: Path) -> None:
    """Write the picture; the suffix says how (.png, .svg, .pdf). Raises MissingExtra."""
    extra("matplotlib").use("Agg")
    pyplot = extra("matplotlib.pyplot")
    rows = {(row.server, row.cell): row for row in result.summary}
    cells = [cell for cell in result.cells if any(row.cell == cell for row in result.summary)]
    servers = [entry for entry in result.servers if any(row.server == entry.name for row in result.summary)]
    servers.sort(key=lambda entry: entry.kind != "octavo")
    width = GROUP / len(servers)
    figure, axes = pyplot.subplots(
        figsize=(max(7.0, 0.22 * len(servers) * len(cells) + 2.5), 5.0), layout="constrained"
    )
    colours = {True: cycle(OCTAVO_COLOURS), False: cycle(PEER_COLOURS)}
    for number, entry in enumerate(servers):
        drawn = [(place, row) for place, cell in enumerate(cells) if (row := rows.get((entry.name, cell))) is not None]
        bars = axes.bar(
            [place - GROUP / 2 + (number + 0.5) * width for place, _ in drawn],
            [row.ratio for _, row in drawn],
            width * 0.92,
            label=entry.name,
            color=next(colours[entry.kind == "octavo"]),
        )
        rates = [f"{row.median.output_tok_s:.0f}" for _, row in drawn]
        axes.bar_label(bars, rates, padding=2, fontsize=7, rotation=90)
    axes.axhline(1.0, color="#444444", linewidth=0.8, linestyle="--", zorder=0)
    axes.set_xticks(range(len(cells)), [cell.replace("@", "\n") + " at once" for cell in cells])
    axes.margins(x=0.01)
    axes.set_ylabel("output tokens a second ÷ best peer's")
    axes.set_ylim(0, 1.15 * max(row.ratio for row in result.summary))
    axes.set_title(
        f"{result.model}: throughput against the best peer, figures on the bars in tokens a second\n"
        f"tokens in / tokens out; {', '.join(result.machine.values())}",
        fontsize=9,
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, ncols=min(4, len(servers)), loc="upper left", bbox_to_anchor=(0, -0.14))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
