"""Graphs of decode steps with nothing captured: a model in Python that looks at nothing but what a graph would.

That is the packed fields and the plan, by the kernels' own rules; all that it is not given on the host is missing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kvpool.formats import FORMATS, KVLayout
from kvpool.groups import Windows
from kvpool.storage import KVStorage
from model.attention.base import Attention
from model.batch import Batch, Row
from model.config import ModelConfig
from model.executor import Runner
from model.gpu.plan import Plan, Reserved, plan
from model.graphs import Captured, Replay, attempt, buckets, captured
from model.inputs import InputBuilder, StepInputs
from tests.model.parity import GREEDY

CPU = torch.device("cpu")
SIZE, BLOCKS, COLUMNS, KEY = 16, 60, 5, ("fake", None)


class FakeAttention:
    """A sum over what a row sees in place of a softmax."""

    name = "fake"
    reads_unwritten = False

    def __call__(self, *_: Any, **__: Any) -> Tensor:
        raise AssertionError

    def reserve(self, key: object, rows: int, columns: int) -> Reserved:
        assert key == KEY
        return Reserved(rows, columns, None, 1, 1, 3, CPU)


ATTENTION = FakeAttention()


class FakeModel:
    """Writes (token + position) to the pool; the state of a token is what its row has there, in all groups."""

    def __init__(self) -> None:
        self.config = cast(ModelConfig, None)
        self.attention: Attention = ATTENTION
        self.rope_switch: int | None = None
        self.weight_bytes, self.reads_unwritten = 0, False

    def forward(self, inputs: StepInputs, storage: KVStorage) -> Tensor:
        return torch.stack([self._state(view, storage, group) for group, view in enumerate(inputs.groups)]).sum(0)

    def _state(self, inputs: StepInputs, storage: KVStorage, layer: int) -> Tensor:
        pool = storage.k[layer][:, 0, :, 0]
        pool[inputs.blocks, inputs.offsets] = (inputs.token_ids + inputs.positions).float()
        made: Plan = inputs.plan(KEY, lambda: plan(inputs, None, 1, 1, 3))
        hidden = torch.full((len(inputs.token_ids), 1), torch.nan)
        (work,) = made.works
        parts = torch.full((work.parts,), torch.nan)
        tables, width = made.tables.flatten(), int(made.width)
        for row, first, begin, end, part in work.items.tolist():
            token = int(made.row_starts[row]) + first
            if token < int(made.row_starts[row + 1]):
                keys = torch.arange(begin, end)
                seen = pool[tables[row * width + keys // SIZE].long(), keys % SIZE].sum()
                (hidden[:, 0] if part < 0 else parts)[token if part < 0 else part] = seen
        for row, first, part, count in work.merges.tolist():
            token = int(made.row_starts[row]) + first
            if token < int(made.row_starts[row + 1]):
                hidden[token, 0] = parts[part : part + count].sum()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0].long() % 50, 50).float()

    def likeliest(self, hidden: Tensor) -> None:
        return None


class FakeRecorder:
    """Remembers the call, and of which size the graphs were that ran."""

    def __init__(self) -> None:
        self.runs: list[int] = []

    def record(self, call: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        out = call()

        def replay() -> None:
            self.runs.append(len(out))
            out.copy_(call())

        return out, replay


def storage(windows: Windows = (None,)) -> KVStorage:
    """A layer for each group."""
    return KVStorage(KVLayout(len(windows), 1, 2, FORMATS["float32"], SIZE, windows), len(windows) * BLOCKS)


def row(rng: random.Random, number: int, count: int = 1, groups: int = 1) -> Row:
    """One of up to COLUMNS blocks in each group, of which its neighbours have none."""
    start = rng.randrange(COLUMNS * SIZE - count)
    tokens = [rng.randrange(50) for _ in range(start + count)]
    columns = range(-(-len(tokens) // SIZE))
    blocks, *more = ([1 + (number * groups + group) * COLUMNS + place for place in columns] for group in range(groups))
    return Row(tokens, len(tokens), start, count, blocks, GREEDY, more=more)


@pytest.mark.parametrize("windows", [(None,), (None, 1000, 1001)])
def test_every_step_is_as_without_graphs(monkeypatch: pytest.MonkeyPatch, windows: Windows) -> None:
    """What a step before it left in the same graph is gone; the pool is written where its rows are, and in block 0."""
    monkeypatch.setattr("model.gpu.plan.LEAST", 16)  # so that some contexts are split
    rng, recorder = random.Random(5), FakeRecorder()
    plain, pools = FakeModel(), (storage(windows), storage(windows))
    graphs = Captured(plain, ATTENTION, pools[0], buckets(11), COLUMNS, recorder)
    builders = [InputBuilder(11, SIZE, CPU, windows) for _ in pools]
    assert not recorder.runs
    for count in (3, 1, 11, 9, 10, 3, 4, 2, 8, 5, 1):
        rows = [row(rng, number, groups=len(windows)) for number in rng.sample(range(11), count)]
        inputs = builders[0].build(Batch(rows))
        fields = inputs.fields.clone()
        out = graphs.forward(inputs, pools[0])
        expected = plain.forward(builders[1].build(Batch(rows)), pools[1])
        assert torch.equal(out, expected)
        assert torch.equal(inputs.fields, fields)
        assert torch.equal(pools[0].k[0][1:], pools[1].k[0][1:])
    assert recorder.runs == [4, 1, 11, 11, 11, 4, 4, 2, 8, 8, 1]


def test_a_result_outlives_the_next_step() -> None:
    rng, plain, pool = random.Random(1), FakeModel(), storage()
    graphs = Captured(plain, ATTENTION, pool, buckets(2), COLUMNS, FakeRecorder())
    first, second = (InputBuilder(2, SIZE, CPU).build(Batch([row(rng, number)])) for number in (1, 2))
    out = graphs.forward(first, pool)
    kept = out.clone()
    graphs.forward(second, pool)
    assert torch.equal(out, kept)


def test_other_steps_are_computed_as_ever() -> None:
    """Chunks, drafts, more rows than the largest graph has, and another pool."""
    rng, recorder, plain, pool = random.Random(2), FakeRecorder(), FakeModel(), storage()
    graphs = Captured(plain, ATTENTION, pool, buckets(3), COLUMNS, recorder)
    draft = row(rng, 0)
    draft.draft = [3]
    draft.blocks.append(COLUMNS)
    for rows, where in (
        ([row(rng, 0, 2), row(rng, 1)], pool),
        ([draft], pool),
        ([row(rng, number) for number in range(4)], pool),
        ([row(rng, 0)], storage()),
    ):
        graphs.forward(InputBuilder(8, SIZE, CPU).build(Batch(rows)), where)
    assert not recorder.runs


def test_a_runner_has_no_need_to_know() -> None:
    rng, plain = random.Random(3), FakeModel()
    pools = storage(), storage()
    graphs = Captured(plain, ATTENTION, pools[0], buckets(4), COLUMNS, FakeRecorder())
    runners = Runner(graphs, pools[0], 64), Runner(plain, pools[1], 64)
    for count in (3, 4, 1):
        rows = [row(rng, number) for number in range(count)]
        a, b = (runner.execute(Batch(rows)).result() for runner in runners)
        assert a.tokens == b.tokens


def test_buckets() -> None:
    assert buckets(1) == [1]
    assert buckets(3) == [1, 2, 3]
    assert buckets(64) == [1, 2, 4, 8, 16, 32, 48, 64]
    assert buckets(5000)[-1] == 512


def test_a_cpu_has_no_graphs() -> None:
    plain = FakeModel()
    assert captured(plain, storage(), [4], COLUMNS, lambda *_: pytest.fail("nothing to say")) is plain


def test_a_capture_that_fails_is_said_and_done_without() -> None:
    class Failing:
        def record(self, call: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    plain, lines = FakeModel(), []
    made = attempt(plain, ATTENTION, storage(), [4], COLUMNS, Failing(), lambda *line: lines.append(line))
    assert made is plain
    ((stage, detail),) = lines
    assert stage == "warning"
    assert detail.endswith("RuntimeError: operation not permitted when stream is capturing")
