"""Executes batches: copies, packed inputs, forward pass, sampling. Owns every tensor: the weights and the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvpool.storage import KVStorage
from model.attention.reference import clean
from model.batch import BAD_GRAMMAR, Batch, Pending, Row, StepResult
from model.decoder import Model
from model.drawn import Drawn
from model.grammar import Masks
from model.inputs import InputBuilder, draws, to_device
from model.kernels.loaded import Kernels
from model.logprobs import prompt_logprobs
from model.params import Logprob
from model.pooling import pooled
from model.sampler import Sampler, likeliest
from model.speculation import agreed, positions

PROMPT_ROWS = 64
"""Prompt positions whose logits exist at once."""


@dataclass(frozen=True, slots=True)
class Draws:
    """What a step draws, in the order of its logits."""

    logits: Tensor | None
    """float32 [draws, vocab]; None where `ahead` has all that is asked."""
    rows: list[Row]
    """Of each draw the row as it stands there."""
    first: dict[int, int]
    """By number of a row that draws: its first draw."""
    ahead: Drawn | None
    """Those that a GPU, or the head's product, has drawn by itself."""

    def take(self, numbers: Sequence[int]) -> Tensor | None:
        """What these rows draw, on the device; None where some of it is not drawn there."""
        if self.ahead is None or any(self.first.get(number) not in self.ahead.places for number in numbers):
            return None
        return self.ahead.take([self.first[number] for number in numbers])


class Runner:
    """See `model.batch.Executor`. On a CPU `execute` computes layers and logits and `result` draws, but where all rows
    want the likeliest token alone, the head finds it at once; on a GPU `execute` only enqueues, and `result` waits."""

    def __init__(
        self, model: Model, storage: KVStorage, max_num_batched_tokens: int, kernels: Kernels | None = None
    ) -> None:
        """kernels: to sample with; on a CPU only."""
        self.model = model
        self.storage = storage
        self._builder = InputBuilder(
            max_num_batched_tokens, storage.block_size, storage.data.device, storage.groups.windows
        )
        self._kernels = kernels
        self._sampler = Sampler(kernels, asynchronous=storage.data.device.type != "cpu")
        self._masks = Masks()

    def execute(self, batch: Batch) -> Pending:
        """Enqueue a step. ValueError where it is larger than the runner, or a row's table is too short."""
        with torch.inference_mode():
            if batch.copies:
                self.storage.copy(batch.copies)
            if not batch.rows:
                return Step(None)
            rows = batch.rows  # All that the Step may hold of the batch, whose `after` holds the step before.
            inputs = self._builder.build(batch)
            if inputs.unread:
                assert batch.after is not None
                places, sources = zip(*inputs.unread, strict=True)
                found = drawn(batch.after, sources).to(inputs.device)
                inputs.token_ids.index_copy_(0, to_device(np.array(places), inputs.device), found)
            if self.model.reads_unwritten:
                clean(self.storage, inputs.opened)
            hidden = self.model.forward(inputs, self.storage)
            drawing, count = None, len(inputs.sampled)
            if count:  # most steps are decodes, and draw behind every token
                drawing = self._draws(rows, hidden if count == len(hidden) else hidden.index_select(0, inputs.sampled))
            starts = inputs.row_starts.tolist()
            prompts = self._prompts(rows, starts, hidden)
            states = {n: hidden[starts[n] : starts[n + 1]] for n, row in enumerate(rows) if row.params.pooling}
        return Step(lambda: self._collect(rows, drawing, prompts, states), drawing)

    def _draws(self, rows: list[Row], hidden: Tensor) -> Draws:
        """Of hidden states [draws, hidden]. On a GPU what can be drawn by itself is enqueued with the step."""
        places, first = list[Row](), dict[int, int]()
        for number, row in enumerate(rows):
            if draws(row):
                first[number] = len(places)
                places += positions(row)
        tokens = self.model.likeliest(hidden) if likeliest(places) else None
        if tokens is not None:
            return Draws(None, places, first, Drawn(tokens, range(len(places))))
        logits = self.model.logits(hidden)
        return Draws(logits, places, first, self._ahead(logits, places))

    def _ahead(self, logits: Tensor, places: list[Row]) -> Drawn | None:
        return self._sampler.ahead(logits, places)

    def _collect(
        self,
        rows: list[Row],
        drawing: Draws | None,
        prompts: dict[int, tuple[Tensor, list[int]]],
        states: dict[int, Tensor],
    ) -> StepResult:
        result = StepResult([[] for _ in rows], [[] for _ in rows], [None] * len(rows))
        with torch.inference_mode():
            if drawing is not None:
                tokens, logprobs = self._sample(rows, drawing)
                for number, begin in drawing.first.items():
                    draft, matcher = rows[number].draft, rows[number].matcher
                    end = begin + 1 + len(draft)
                    if matcher is not None and matcher.error is not None:
                        result.tokens[number] = [BAD_GRAMMAR]
                        continue
                    drawn = agreed(draft, tokens[begin:end]) if draft else tokens[begin:end]
                    result.tokens[number] = drawn
                    if rows[number].params.logprobs is not None:
                        result.logprobs[number] = [v for v in logprobs[begin : begin + len(drawn)] if v is not None]
            for number, (hidden, following) in prompts.items():
                k = rows[number].params.prompt_logprobs
                assert k is not None
                values: list[Logprob] = []
                for begin in range(0, len(following), PROMPT_ROWS):
                    logits = self.model.logits(hidden[begin : begin + PROMPT_ROWS])
                    values += prompt_logprobs(logits, following[begin : begin + PROMPT_ROWS], k, self._kernels)
                result.prompt_logprobs[number] = values
            for number, part in states.items():
                row = rows[number]
                assert row.params.pooling is not None
                result.pooled[number] = pooled(part.float().cpu().numpy(), row.pooled, row.params.pooling)
        return result

    def _sample(self, rows: list[Row], drawing: Draws) -> tuple[list[int], list[Logprob | None]]:
        if drawing.logits is None:
            assert drawing.ahead is not None
            return list(drawing.ahead.wait().values()), []
        # Before anything waits for the logits: on a GPU they are still being computed.
        masks = self._masks.fill([rows[number] for number in drawing.first])
        return self._sampler.sample(drawing.logits, drawing.rows, masks, drawing.ahead)

    def _prompts(self, rows: list[Row], row_starts: list[int], hidden: Tensor) -> dict[int, tuple[Tensor, list[int]]]:
        """Per row that wants prompt logprobs: hidden states [n, hidden] and the n ≥ 0 prompt tokens that follow."""
        found = {}
        for number, row in enumerate(rows):
            if row.params.prompt_logprobs is None:
                continue
            count = max(0, min(row.start + row.count, row.prompt_len - 1) - row.start)
            begin = row_starts[number]
            following = row.tokens[row.start + 1 : row.start + 1 + count]
            found[number] = (hidden[begin : begin + count], following)
        return found


@dataclass(slots=True)
class Step:
    """A step under way: `finish` waits for it, and is let go then with the tensors that it holds."""

    finish: Callable[[], StepResult] | None
    draws: Draws | None = None
    done: StepResult = field(default_factory=lambda: StepResult([], [], []))

    def result(self) -> StepResult:
        if self.finish is not None:
            self.done = self.finish()
            self.finish = None
        return self.done


def drawn(step: Pending, rows: Sequence[int]) -> Tensor:
    """The tokens that these rows of a step drew, for one that begins with them; 0 for a row that drew none.
    Waits for nothing where all of them were drawn ahead."""
    ahead = step.draws.take(rows) if isinstance(step, Step) and step.draws is not None else None
    if ahead is not None:
        return ahead
    tokens = step.result().tokens
    return torch.tensor([(tokens[row] or [0])[0] for row in rows]).clamp_(min=0)


__all__ = ["Runner", "Step"]
