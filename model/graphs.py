"""Decode steps as CUDA graphs: all their launches in one, for as many rows as the smallest bucket has that they fit.

    a step of    1  2  3  5  9   rows     is copied to      fields   three rows, and zeros: a fourth, of the null block
    a graph of   1  2  4  8  16  rows     what stays put:   plans    of three rows; the fourth attends to nothing

A graph knows the weights, the pool and these tensors by their addresses, and of a step what they hold when it is
launched. Padding is computed with the rest, written to the null block and cut off. Steps with prompts, chunks or drafts
are launched kernel by kernel: they have too many shapes, and enough work to hide behind.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvpool.storage import KVStorage
from model.attention.base import Attention
from model.batch import Batch, Row
from model.decoder import Decoder, Model
from model.inputs import InputBuilder, StepInputs
from model.params import SamplingParams

BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Padding costs little while a step waits for memory; every bucket costs a moment at the start."""

Replay = Callable[[], object]


class Room(Protocol):
    """What a backend derives from a step, in tensors that stay where they are; `model.gpu.plan.Reserved`."""

    plan: Any

    def fill(self, inputs: StepInputs) -> None: ...


class Reserving(Attention, Protocol):
    """An attention backend whose launches depend on nothing of a step but its plans."""

    def reserve(self, key: Hashable, rows: int, columns: int) -> Room:
        """For the plan that it keeps in a step under `key`: up to `rows` rows, tables of up to `columns` blocks."""
        ...


class Recorder(Protocol):
    """What captures; the tests have one that remembers the call."""

    def record(self, call: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        """What `call` returned, and what makes it anew in the same place, of what its inputs hold then."""
        ...


class CudaRecorder:
    """Graphs that share one pool of memory, since no two run at once: capture the largest first."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, call: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            call()  # compiles kernels, and makes what libraries and caches keep: nothing of that may be captured
        torch.cuda.synchronize()  # what goes wrong in it is raised here
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream):
            out = call()
        return out, graph.replay


@dataclass(frozen=True, slots=True)
class Graph:
    """A decode step of one bucket."""

    inputs: StepInputs
    rooms: list[tuple[int, Room]]
    """With the number of the group whose plan each has room for."""
    hidden: Tensor
    replay: Replay

    def run(self, inputs: StepInputs) -> Tensor:
        count, fields = inputs.fields.shape[1], self.inputs.fields
        fields[:, :count].copy_(inputs.fields)
        fields[:, count:].zero_()
        for group, room in self.rooms:
            room.fill(inputs.groups[group])
        self.replay()
        return self.hidden[:count].clone()  # the next step is computed in the same place


class Captured:
    """A model whose decode steps over one pool are graphs. See `model.decoder.Model`."""

    def __init__(
        self,
        model: Model,
        attention: Reserving,
        storage: KVStorage,
        sizes: Sequence[int],
        columns: int,
        recorder: Recorder,
    ) -> None:
        """Capture steps of these many rows, ascending, with tables of up to `columns` blocks. Writes to the null block
        only."""
        self.model = model
        self.storage = storage
        self.config = model.config
        self.attention: Attention = attention
        self.weight_bytes, self.rope_switch = model.weight_bytes, model.rope_switch
        self.reads_unwritten = model.reads_unwritten
        windows = storage.groups.windows
        padding = Row([0], 1, 0, 1, [0], SamplingParams(max_tokens=1, seed=0), more=[[0]] * (len(windows) - 1))
        probe = InputBuilder(1, storage.block_size, storage.data.device, windows).build(Batch([padding]))
        model.forward(probe, storage)
        keys = [(group, key) for group, view in enumerate(probe.groups) for key in view.plans]
        self.sizes = sizes
        self._graphs = {}
        for size in reversed(self.sizes):
            rooms = [(group, key, attention.reserve(key, size, columns)) for group, key in keys]
            self._graphs[size] = self._capture(size, rooms, recorder)

    def forward(self, inputs: StepInputs, storage: KVStorage) -> Tensor:
        rows = len(inputs.counts)
        if rows != inputs.fields.shape[1] or rows > self.sizes[-1] or storage is not self.storage:
            return self.model.forward(inputs, storage)
        return self._graphs[self.sizes[bisect_left(self.sizes, rows)]].run(inputs)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)

    def likeliest(self, hidden: Tensor) -> Tensor | None:
        return self.model.likeliest(hidden)

    def _capture(self, rows: int, rooms: list[tuple[int, Hashable, Room]], recorder: Recorder) -> Graph:
        storage = self.storage
        fields = torch.zeros(4 + len(storage.groups.windows), rows, dtype=torch.int64, device=storage.data.device)
        inputs = StepInputs(fields, fields[0, :0], storage.block_size)
        for group, key, room in rooms:
            inputs.groups[group].plans[key] = room.plan
        hidden, replay = recorder.record(lambda: self.model.forward(inputs, storage))
        return Graph(inputs, [(group, room) for group, _, room in rooms], hidden, replay)


def buckets(rows: int) -> list[int]:
    """Sizes of graphs for steps of up to `rows` rows, ascending."""
    return [size for size in BUCKETS if size < rows] + ([rows] if rows <= BUCKETS[-1] else [])


def captured(
    model: Model, storage: KVStorage, sizes: Sequence[int], columns: int, progress: Callable[[str, str], None]
) -> Model:
    """The model with its decode steps captured, where a GPU computes it with our kernels; else as it is, and with one
    line that says why where capturing failed."""
    device = storage.data.device
    if device.type != "cuda" or not isinstance(model, Decoder) or model.attention.name != "triton":
        return model
    from model.attention.triton import TritonAttention  # here: only a GPU has triton

    assert isinstance(model.attention, TritonAttention)
    return attempt(model, model.attention, storage, sizes, columns, CudaRecorder(device), progress)


def attempt(
    model: Model,
    attention: Reserving,
    storage: KVStorage,
    sizes: Sequence[int],
    columns: int,
    recorder: Recorder,
    progress: Callable[[str, str], None],
) -> Model:
    """As `captured`, by any recorder."""
    try:
        with torch.inference_mode():
            made = Captured(model, attention, storage, sizes, columns, recorder)
    except Exception as error:
        progress("warning", f"decode steps are launched kernel by kernel, which is slower: {_line(error)}")
        return model
    progress("graphs", f"decode steps of up to {sizes[-1]} rows, in {len(sizes)} sizes")
    return made


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
