"""A fake runner with a real paged memory, and a driver that holds an engine against an oracle.

The runner stores (token, position, kind of rotary factors, group of layers) in slots, reads every row's context back
through its block tables and refuses to go on where it is not exactly the row's tokens. What it draws depends on what it
read. So a block that is shared, freed, copied or recycled wrongly cannot pass, and any schedule must give the tokens
that the oracle gives without an engine.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest

from kvpool.pool import KVPool
from kvpool.tier import Tier
from model.batch import BAD_LOGITS, NO_TOKEN, Batch, Row, StepResult
from model.grammar import Grammars
from model.params import Logprob, SamplingParams
from scheduler import estimate
from scheduler.cost import CostModel
from scheduler.engine import Engine, Message
from scheduler.limits import Limits
from scheduler.messages import Abort, BeamSearch, FinishReason, StepOutput, Submit
from scheduler.refusal import longest
from tests.scheduler.device import Device
from tests.scheduler.searching import following, likeliest, search_slowly

VOCAB = 40
Cell = tuple[int, int, bool, int] | None


def draw(tokens: list[int], params: SamplingParams, index: int) -> int:
    """The token after `tokens`: a pure function of them, the seed and the random stream."""
    text = f"{params.seed} {index} {tokens}".encode()
    token = zlib.crc32(text) % VOCAB
    masked = token in params.stop_token_ids and len(tokens) - params.top_k < params.min_tokens
    return token + 1 if masked else token


def logprob(tokens: list[int], token: int) -> Logprob:
    return Logprob(-zlib.crc32(f"{tokens}".encode()) / 2**32, token, [token], [0.0])


class WrongContext(BaseException):
    """The memory does not hold what a row believes. Not an Exception: the engine must not take it for a bad row."""


@dataclass
class Done:
    value: StepResult

    def result(self) -> StepResult:
        return self.value


class FakeRunner:
    """Implements model.batch.Executor over a memory of cells."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        advance: Callable[[float], None],
        rope_switch: int | None,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        self.draw = draw
        self.windows = [window or 10**9 for window in windows]  # of the groups of layers, the widest first
        self.switch = rope_switch or 10**9
        self.size = block_size
        self.memory: list[Cell] = [None] * (num_blocks * block_size)
        self.advance = advance
        self.raises: Callable[[Row], bool] = lambda row: False
        """Rows that make a step raise."""
        self.spoiled: Callable[[Row], bool] = lambda row: False
        """Rows whose logits are not finite."""
        self.muted: Callable[[Row], bool] = lambda row: False
        """Rows whose masks leave no token."""
        self.seconds: Callable[[Batch], float] = lambda batch: 0.001
        """What a step takes."""
        self.batches: list[list[tuple[int, int]]] = []
        """(start, count) of every row that was computed."""
        self.drafted = 0
        """Tokens of drafts."""

    def execute(self, batch: Batch) -> Done:
        self.advance(self.seconds(batch) if batch.rows else 0.0)
        size = self.size
        for source, target in batch.copies:
            self.memory[target * size : (target + 1) * size] = self.memory[source * size : (source + 1) * size]
        owners: dict[int, int] = {}
        for number, row in enumerate(batch.rows):
            self._check(row)
            for position, blocks in product(range(row.start, row.start + row.count + len(row.draft)), row.groups):
                block = blocks[position // size]
                if not block or owners.setdefault(block, number) != number:
                    raise WrongContext(f"block {block} is not one that row {number} may write to")
                # Half of a failed step was written: whoever retries must not trust it.
                self.memory[block * size + position % size] = None
        if guilty := next((row for row in batch.rows if self.raises(row)), None):
            raise ValueError(f"row at {guilty.start}\nand a second line")
        for row in batch.rows:
            known = row.tokens + row.draft
            for position in range(row.start, row.start + row.count + len(row.draft)):
                for group, blocks in enumerate(row.groups):
                    cell = known[position], position, max(len(row.tokens), position + 1) > self.switch, group
                    self.memory[blocks[position // size] * size + position % size] = cell
        if batch.rows:
            self.batches.append([(row.start, row.count) for row in batch.rows])
            self.drafted += sum(len(row.draft) for row in batch.rows)
        results = [self._result(row) for row in batch.rows]
        return Done(StepResult([r[0] for r in results], [r[1] for r in results], [r[2] for r in results]))

    def gather(self, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        """See `scheduler.tiering.BlockMemory`; a cell, of one group, is 8 bytes."""
        cells = [self.memory[b * self.size : (b + 1) * self.size] for b in blocks]
        numbers = [[-1 if c is None else c[0] + (c[1] << 20) + (c[2] << 60) for c in block] for block in cells]
        return np.array(numbers, np.int64).view(np.uint8)

    def scatter(self, blocks: Sequence[int], content: npt.NDArray[np.uint8]) -> None:
        for block, row in zip(blocks, content.view(np.int64).tolist(), strict=True):
            cells = [None if n < 0 else (n % (1 << 20), n >> 20 & (1 << 40) - 1, bool(n >> 60), 0) for n in row]
            self.memory[block * self.size : (block + 1) * self.size] = cells

    def _check(self, row: Row) -> None:
        end = row.start + row.count
        if row.count < 1 or end > len(row.tokens) or len(set(map(len, row.groups))) != 1:
            raise WrongContext(f"impossible row {row}")
        if end + len(row.draft) > min(len(row.blocks) * self.size, row.prompt_len + row.params.max_tokens):
            raise WrongContext(f"row without room {row}")
        if row.draft and (not row.samples or row.params.prompt_logprobs is not None):
            raise WrongContext(f"row must not have a draft: {row}")
        if row.samples != (end == len(row.tokens) and row.params.max_tokens > 0):
            raise WrongContext(f"row must draw or must not: {row}")
        for group, (window, blocks) in enumerate(zip(self.windows, row.groups, strict=True)):
            for position in range(max(0, row.start + 1 - window), row.start):
                cell = self.memory[blocks[position // self.size] * self.size + position % self.size]
                if cell != (row.tokens[position], position, len(row.tokens) > self.switch, group):
                    raise WrongContext(f"position {position} holds {cell}, not {row.tokens[position]}")

    def _read(self, row: Row, end: int) -> list[int]:
        first = max(0, end - self.windows[0])
        cells = [self.memory[row.blocks[p // self.size] * self.size + p % self.size] for p in range(first, end)]
        return row.tokens[:first] + [cell[0] for cell in cells if cell is not None]

    def _result(self, row: Row) -> tuple[list[int], list[Logprob], list[Logprob] | None]:
        end = row.start + row.count
        seen = self._read(row, end)
        prompt = None
        if row.params.prompt_logprobs is not None:
            last = min(end, row.prompt_len - 1)
            prompt = [logprob(seen[: p + 1], row.tokens[p + 1]) for p in range(row.start, last)]
        if self.spoiled(row):
            return [BAD_LOGITS], [], prompt
        if not row.samples:
            return [], [], prompt
        drawn: list[int] = []
        values: list[Logprob] = []
        for place in range(len(row.draft) + 1):
            seen = self._read(row, end + place)
            if self.muted(replace(row, tokens=seen)):
                drawn.append(NO_TOKEN)
                break
            drawn.append(self.draw(seen, row.params, row.index))
            if row.params.logprobs:  # Only a search asks for more than none.
                values.append(likeliest(seen, row.params.seed, row.params.logprobs))
            elif row.params.logprobs is not None:
                values.append(logprob(seen, drawn[-1]))
            if drawn[: place + 1] != row.draft[: place + 1]:
                break
        return drawn, values, prompt


@dataclass
class Stream:
    """What one client has got of one sequence."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason = FinishReason.RUNNING
    error: str = ""


class World:
    """An engine over a fake runner, its clients, and the oracle."""

    def __init__(
        self,
        blocks: int = 64,
        block_size: int = 4,
        prefix_caching: bool = True,
        limits: Limits | None = None,
        windows: tuple[int | None, ...] = (None,),
        tier: Tier | None = None,
        depth: int = 0,
    ) -> None:
        """`blocks`: usable ones. `tier`: of blocks of 8 bytes a token. `depth`: the engine's; 1 has a fake device."""
        self.now = 0.0
        self.limits = limits or Limits(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=10_000)
        self.pool = KVPool(blocks + 1, block_size, prefix_caching, windows, tier)
        self.runner = FakeRunner(blocks + 1, block_size, self._advance, self.limits.rope_switch, windows)
        self.cost = CostModel()
        self.device = Device(self.runner, lambda: self.now) if depth else None
        self.engine = self.make_engine()
        self.capacity = self.pool.paging.longest(blocks, self.limits.max_num_batched_tokens, self.limits.max_model_len)
        self.submits: dict[int, Submit] = {}
        self.streams: dict[tuple[int, int], Stream] = {}
        self.prompt_values: dict[int, list[Logprob]] = {}
        self.started: dict[int, int] = {}
        """Cached tokens by request."""
        self.order: list[int] = []
        """Requests in the order in which they were admitted."""
        self.times: dict[int, list[float]] = {}
        """When a request's rows came."""
        self.inbox: list[Message] = []
        self.last: StepOutput | None = None

    def make_engine(self, grammars: Grammars | None = None) -> Engine:
        runner, depth = self.device or self.runner, int(self.device is not None)
        return Engine(self.pool, runner, self.limits, lambda: self.now, self.cost, grammars, runner, depth)

    def _advance(self, seconds: float) -> None:
        self.now += seconds

    def add(
        self,
        prompt: Iterable[int],
        max_tokens: int = 8,
        n: int = 1,
        generated: list[list[int]] | None = None,
        priority: int = 0,
        salt: bytes = b"",
        stops: tuple[int, ...] = (),
        min_tokens: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        seed: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        search: BeamSearch | None = None,
    ) -> int:
        """Put a Submit into the inbox; its id."""
        prompt = list(prompt)
        submit = Submit(
            id=len(self.submits) + 1,
            prompt_ids=prompt,
            params=SamplingParams(
                max_tokens=max_tokens,
                seed=seed,
                stop_token_ids=stops,
                min_tokens=min_tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                top_k=len(prompt),  # The fake runner's way to know where a prompt ends.
            ),
            n=n,
            search=search,
            generated=generated or [],
            priority=priority,
            tenant=tenant,
            weight=weight,
            salt=salt,
            arrival=self.now,
        )
        self.submits[submit.id] = submit
        self.times[submit.id] = []
        for index in range(n):
            had = submit.generated[index] if submit.generated else []
            self.streams[submit.id, index] = Stream(list(had))
        self.inbox.append(submit)
        return submit.id

    def abort(self, request: int, index: int | None = None) -> None:
        self.inbox.append(Abort(request, index))

    def step(self) -> StepOutput:
        """One step with everything in the inbox; invariants and the protocol are checked."""
        output = self.last = self.engine.step(self.inbox)
        self.inbox = []
        self.engine.check()
        if self.device is not None:
            self.device.check(self.pool)
        self._deliver(output)
        return output

    def run(self, most: int = 10_000) -> None:
        """Until nobody has work; fails where that takes too long."""
        for _ in range(most):
            if not (self.inbox or self.engine.has_work):
                break
            self.step()
        else:
            pytest.fail(f"still busy after {most} steps: {self.last and self.last.stats}")
        stats = self.step().stats
        assert (stats.running, stats.waiting, stats.waiting_tokens) == (0, 0, 0)
        assert (stats.blocks_active, stats.tokens_active) == (0, 0)
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        assert all(stream.finish for stream in self.streams.values()), "a sequence never ended"

    def _deliver(self, output: StepOutput) -> None:
        assert len(output.ids) == len(output.indices) == len(output.tokens) == len(output.finishes)
        for started in output.started:
            assert started.id not in self.started, "started twice"
            self.started[started.id] = started.cached_tokens
            self.order.append(started.id)
        for values in output.prompt_logprobs:
            assert values.id not in self.prompt_values, "prompt logprobs sent twice"
            self.prompt_values[values.id] = values.values
        errors = {error.row: error.message for error in output.errors}
        for row, (request, index) in enumerate(zip(output.ids, output.indices, strict=True)):
            stream = self.streams[request, index]
            assert stream.finish is FinishReason.RUNNING, "a row after the end"
            token, finish = output.tokens[row], FinishReason(output.finishes[row])
            params = self.submits[request].params
            if token != NO_TOKEN:
                assert token >= 0
                context = self.submits[request].prompt_ids + stream.tokens
                if self.submits[request].search is not None:
                    assert output.logprobs[row].logprob == following(context, params.seed)[token]
                elif params.logprobs is not None:
                    assert output.logprobs[row] == logprob(context, token)
                stream.tokens.append(token)
                fresh = not any(self.submits[request].generated)
                assert params.prompt_logprobs is None or not fresh or request in self.prompt_values
                self.times[request].append(output.now)
            else:
                assert finish is not FinishReason.RUNNING, "a row without token or end"
            stream.finish = finish
            assert (row in errors) == (finish is FinishReason.ERROR)
            stream.error = errors.get(row, "")

    # ---- the oracle ----

    def expected(self, request: int, index: int) -> Stream:
        """What the sequence must bring when nothing goes wrong."""
        submit = self.submits[request]
        params = submit.params
        if submit.search is not None:
            return self._found(submit, submit.search)[index]
        stream = Stream(list(submit.generated[index]) if submit.generated else [])
        limit = min(len(submit.prompt_ids) + params.max_tokens, self.capacity)
        while True:
            if stream.tokens and stream.tokens[-1] in params.stop_token_ids and len(stream.tokens) > params.min_tokens:
                return replace(stream, finish=FinishReason.STOP)
            if len(submit.prompt_ids) + len(stream.tokens) >= limit:
                return replace(stream, finish=FinishReason.LENGTH)
            stream.tokens.append(self.runner.draw(submit.prompt_ids + stream.tokens, params, index))

    def _found(self, submit: Submit, search: BeamSearch) -> list[Stream]:
        prompt, params, pool = submit.prompt_ids, submit.params, self.pool
        most = min(params.max_tokens, longest(submit, self.limits, pool.paging, pool.num_usable) - len(prompt))
        found = search_slowly(
            search, params.stop_token_ids, most, lambda generated: following(prompt + generated, params.seed)
        )
        ends = {True: FinishReason.STOP, False: FinishReason.LENGTH}
        streams = [Stream(tokens, ends[stopped]) for tokens, _, stopped in found]
        missing = Stream(finish=FinishReason.STOP if params.max_tokens else FinishReason.LENGTH)
        return [*streams, *[missing] * (submit.n - len(streams))]

    def verify(self) -> None:
        """Every sequence brought what the oracle says, or a beginning of it where it was aborted."""
        for (request, index), stream in self.streams.items():
            expected = self.expected(request, index)
            if stream.finish is FinishReason.ABORT:
                assert stream.tokens == expected.tokens[: len(stream.tokens)]
            else:
                assert stream == expected, (request, index)
        for request, submit in self.submits.items():
            if request in self.prompt_values:
                prompt = submit.prompt_ids
                right = [logprob(prompt[: p + 1], prompt[p + 1]) for p in range(len(prompt) - 1)]
                assert self.prompt_values[request] == right
            elif submit.params.prompt_logprobs is not None and not any(submit.generated):
                assert all(self.streams[request, i].finish is FinishReason.ABORT for i in range(submit.n))


@pytest.fixture
def world() -> type[World]:
    """The class; a test makes as many as it wants."""
    return World


@pytest.fixture
def hopeful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission that expects every sequence to end at once, so that the pool runs out all the time."""
    monkeypatch.setattr(estimate, "FIRST_GUESS", 1)
    monkeypatch.setattr(estimate, "MIN_REMAINING", 1)
    monkeypatch.setattr(estimate, "QUANTILE", 0.0)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Seeded by the test's own name."""
    return random.Random(request.node.name)
