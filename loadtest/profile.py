"""Where the microseconds of a step go: `octavo bench --engine --profile`.

Methods of one engine are wrapped, and each moment of a step counts for the innermost one under way:

    engine.step   other ┌ plan ┐┌ plan ┌ inputs ┐┌ embedding ┌ layers ┐ ┐┌ head ┐ ┐┌ output ┌ sampling ┐ ┐ other
                        └──────┘└──────┴────────┴┴───────────┴────────┴─┴┴──────┴─┘└────────┴──────────┴─┘

So an engine that is not profiled has no mark in it, and pays nothing. Within the layers, one call of C++, the kernels'
threads note their own phases; the table shows the mean of the threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np

PHASES = {
    "plan": "plan",
    "blocks": "blocks of the pool",
    "inputs": "inputs",
    "embedding": "embedding",
    "layers": "layers",
    "head": "head",
    "sampling": "sampling",
    "output": "output",
    "other": "other",
}
OURS = ("plan", "blocks", "inputs", "sampling", "output")
"""What is not the model's arithmetic."""
POOL = ("hashes", "match", "adopt", "fork", "blocks_needed", "extend", "take_copies", "commit", "slide", "release")

Laps = Sequence[Mapping[str, int]]
"""Nanoseconds of each phase, step by step."""


class Stopwatch:
    """Time by phase since it was last taken. Of one thread."""

    def __init__(self, clock: Callable[[], int] = perf_counter_ns) -> None:
        self.parts: Callable[[], dict[str, int]] = dict
        """What the layers' time consists of, asked whenever the time is taken."""
        self._clock = clock
        self._spent: dict[str, int] = {}
        self._phase: str | None = None
        self._since = 0

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        """Time in `owner.name(...)` is the phase's, but for what other wrapped calls take within it."""
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            outer = self._enter(phase)
            try:
                return call(*args, **kwargs)
            finally:
                self._enter(outer)

        setattr(owner, name, timed)

    def take(self) -> dict[str, int]:
        """Nanoseconds by phase; begins anew."""
        spent, self._spent = self._spent, {}
        return spent | {f"layers: {part}": time for part, time in self.parts().items()}

    def _enter(self, phase: str | None) -> str | None:
        """Returns the phase that it ends; None: nobody's."""
        now = self._clock()
        ended, since = self._phase, self._since
        if ended is not None:
            self._spent[ended] = self._spent.get(ended, 0) + now - since
        self._phase, self._since = phase, now
        return ended


def watch(engine: Any) -> Stopwatch:
    """Wrap the parts of an Engine and its Runner. Where layers are not one call, the whole forward pass is theirs."""
    stopwatch = Stopwatch()
    runner = engine._executor
    model = runner.model
    fused = hasattr(getattr(model, "fused", None), "spent")
    if fused:
        stopwatch.parts = model.fused.spent
    for owner, name, phase in (
        (engine, "step", "other"),
        (engine, "_plan", "plan"),
        (engine, "_launch", "plan"),
        (engine, "_collect", "output"),
        (runner, "execute", "other"),
        (runner._builder, "build", "inputs"),
        (model, "forward", "embedding" if fused else "layers"),
        *([(model, "fused", "layers")] if fused else []),
        (model, "logits", "head"),
        (model, "likeliest", "head"),
        (runner, "_sample", "sampling"),
        *((engine._state.pool, name, "blocks") for name in POOL),
        (runner.storage, "copy", "blocks"),
    ):
        stopwatch.wrap(owner, name, phase)
    return stopwatch


def profile_table(kinds: Mapping[str, Laps]) -> str:
    """Of each kind of step, where its time went."""
    lines = []
    for kind, laps in kinds.items():
        if laps:
            lines += [f"{f' {kind}: {len(laps)} steps ':-^58}", f"{'':<26}{'mean µs':>11}{'share %':>10}{'p99 µs':>11}"]
            times = {name: _microseconds(laps, phases) for name, phases in _rows(laps).items()}
            whole = times["step"].mean()
            for name, values in times.items():
                share = 100 * values.mean() / whole
                lines.append(f"{name:<26}{values.mean():>11.1f}{share:>10.1f}{np.percentile(values, 99):>11.1f}")
    return "\n".join([*lines, "=" * 58])


def profile_fields(kinds: Mapping[str, Laps]) -> dict[str, object]:
    """The same for the JSON file: mean and 99th percentile in microseconds, by kind and phase."""
    return {
        kind: {
            name: {"mean_us": float(values.mean()), "p99_us": float(np.percentile(values, 99))}
            for name, phases in _rows(laps).items()
            for values in [_microseconds(laps, phases)]
        }
        for kind, laps in kinds.items()
        if laps
    }


def _rows(laps: Laps) -> dict[str, Sequence[str]]:
    """Lines of the table, and the phases that each adds up."""
    parts = {part: (part,) for part in laps[-1] if part.startswith("layers: ")}
    rows: dict[str, Sequence[str]] = {}
    for phase, label in PHASES.items():
        rows |= {label: (phase,)} | (parts if phase == "layers" else {})
    return {
        **rows,
        "step": tuple(PHASES),
        "all but the model": OURS,
    }


def _microseconds(laps: Laps, phases: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([sum(lap.get(phase, 0) for phase in phases) for lap in laps]) / 1000
