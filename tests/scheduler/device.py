"""A fake asynchronous runner: what a GPU is to the engine, around a fake runner that computes at once.

    execute ── queue ── run, some time later ── result       a step runs when it, or one behind it, is read, or before
                                                             nobody knows when; what it drew is seen by reading alone

A step takes its seconds behind the one before, and whoever reads it waits for its end. It keeps what it drew, and the
next one takes its first tokens from there. The device refuses a step that touches a block to which a step in flight
writes for somebody else, and one that writes to a block that a step in flight reads: whoever ended in flight must keep
its blocks until it has landed, and nothing may be found by its prefix before it was computed. A step that runs behind
one that has failed computes nonsense, as a device would.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from model.batch import Batch, Pending, StepResult

if TYPE_CHECKING:
    from kvpool.pool import KVPool
    from tests.scheduler.conftest import FakeRunner


class BlockInFlight(BaseException):
    """A block was given to somebody while a step in flight used it. Not an Exception: no row's fault."""


class Launched:
    """A step of the device; see `model.batch.Pending`."""

    def __init__(self, device: Device, number: int, batch: Batch, windows: Sequence[int]) -> None:
        size = device.size
        self.device, self.number = device, number
        self.launched = self.end = device.clock()
        self.rows = [
            replace(row, tokens=row.tokens.copy(), blocks=row.blocks.copy(), more=[b.copy() for b in row.more])
            for row in batch.rows
        ]
        self.owners = [row.tokens for row in batch.rows]
        self.copies = batch.copies
        self.after = batch.after
        self.behind = device.flying[-1] if device.flying and batch.rows else None
        self.writes: dict[int, list[int]] = {}
        """Whose list of tokens is it for whom a block is written."""
        self.reads: list[tuple[int, list[int]]] = []
        for row, owner in zip(self.rows, self.owners, strict=True):
            end = row.start + row.count + len(row.draft)
            for window, blocks in zip(windows, row.groups, strict=True):
                self.writes |= dict.fromkeys(blocks[row.start // size : -(-end // size)], owner)
                self.reads += [(b, owner) for b in blocks[max(0, row.start + 1 - window) // size : -(-end // size)]]
        self.value = StepResult([], [], [])
        self.error: Exception | None = None
        self.lost = False
        """It failed, or ran behind one that did."""

    def result(self) -> StepResult:
        self.device.read(self)
        if self.error is not None:
            raise self.error
        return self.value

    def run(self, runner: FakeRunner) -> None:
        after, behind, self.after, self.behind = self.after, self.behind, None, None
        for row in self.rows:
            if row.source >= 0:
                assert isinstance(after, Launched)
                assert after is behind, "the step before is another one"
                drawn = after.value.tokens[row.source] if not after.lost else []
                row.tokens.append(max(0, (drawn or [0])[0]))
                row.source = -1
        if behind is not None and behind.lost:
            self.lost = True
            for row in self.rows:
                for position in range(row.start, row.start + row.count + len(row.draft)):
                    for blocks in row.groups:
                        runner.memory[blocks[position // runner.size] * runner.size + position % runner.size] = None
            count = len(self.rows)
            self.value = StepResult([[0] if row.samples else [] for row in self.rows], [[]] * count, [None] * count)
            return
        try:
            self.value = runner.execute(Batch(self.rows, self.copies)).result()
        except Exception as error:
            self.error, self.lost = error, True


class Device:
    """Implements model.batch.Executor and scheduler.tiering.BlockMemory."""

    def __init__(self, runner: FakeRunner, clock: Callable[[], float]) -> None:
        """`clock` must tell what the runner advances."""
        self.runner, self.clock = runner, clock
        self.wait, runner.advance = runner.advance, self._spend
        self.end = 0.0
        """Of the last step that ran."""
        self.size = runner.size
        self.rng = random.Random(0)
        self.queue: deque[Launched] = deque()
        """Not run yet."""
        self.flying: list[Launched] = []
        """Not read yet."""
        self.log: list[tuple[str, int]] = []
        """Steps that were launched and read, in order."""
        self.launched = 0

    def execute(self, batch: Batch) -> Pending:
        if batch.rows:
            self.launched += 1
            self.log.append(("launch", self.launched))
        step = Launched(self, self.launched, batch, self.runner.windows)
        self._refuse_what_flies(step)
        self.queue.append(step)
        if batch.rows:
            self.flying.append(step)
        while self.queue and self.rng.random() < 0.3:
            self._run()
        return step

    def read(self, step: Launched) -> None:
        while step in self.queue:
            self._run()
        if step in self.flying:
            self.wait(max(0.0, step.end - self.clock()))
            self.flying.remove(step)
            self.log.append(("read", step.number))

    def gather(self, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        self._run_all()
        return self.runner.gather(blocks)

    def scatter(self, blocks: Sequence[int], content: npt.NDArray[np.uint8]) -> None:
        self._run_all()
        self.runner.scatter(blocks, content)

    def check(self, pool: KVPool) -> None:
        """Whatever is in flight, nobody has given up the blocks that it writes to."""
        for step in self.flying:
            for block in step.writes:
                if not pool._refs[block]:
                    raise BlockInFlight(f"block {block} is free, and step {step.number} writes to it")

    def _run(self) -> None:
        step = self.queue.popleft()
        self.end = max(self.end, step.launched)
        step.run(self.runner)
        step.end = self.end

    def _spend(self, seconds: float) -> None:
        self.end += seconds

    def _run_all(self) -> None:
        while self.queue:
            self._run()

    def _refuse_what_flies(self, step: Launched) -> None:
        for other in self.flying:
            for block, owner in step.reads:
                if other.writes.get(block, owner) is not owner:
                    raise BlockInFlight(f"step {other.number} writes to block {block}, which another row reads")
            for block, owner in other.reads:
                if step.writes.get(block, owner) is not owner:
                    raise BlockInFlight(f"step {other.number} reads block {block}, which another row writes")
            for source, target in step.copies:
                if source in other.writes or target in {block for block, _ in other.reads}:
                    raise BlockInFlight(f"step {other.number} uses block {source} or {target} of a copy")
