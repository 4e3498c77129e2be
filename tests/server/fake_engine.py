"""An engine without a model, at the other end of a socket pair: it says what it is told to say, and remembers.

It obeys Submit, Abort, max_tokens, stop tokens and n like the real one, holds "blocks", and can be paused, slowed or
killed. As a program (`--fd N`) it stands in for `scheduler.worker`.
"""

from __future__ import annotations

import argparse
import math
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from model.params import Logprob
from model.pooling import finished, pooled
from scheduler.beams import Beams
from scheduler.messages import (
    Abort,
    BeamSearch,
    EmbeddingConfig,
    EngineConfig,
    EngineStats,
    FinishReason,
    FromEngine,
    Pooled,
    Pooling,
    Progress,
    PromptLogprobs,
    Ready,
    RowError,
    Started,
    StepOutput,
    Submit,
    ToEngine,
)
from scheduler.wire import HEADER_BYTES, frame

TOTAL_BLOCKS = 200
BLOCK = 16
HIDDEN = 8
READY = Ready(
    max_model_len=1024,
    vocab_size=49152,
    num_blocks=TOTAL_BLOCKS,
    block_size=BLOCK,
    kv_bytes_per_token=100,
    kv_bytes=100 * BLOCK * TOTAL_BLOCKS,
    device="cpu",
    dtype="float32",
    kv_cache_dtype="float32",
    attention="fake",
    weight_bytes=1000,
    load_seconds=0.1,
    embedding=EmbeddingConfig(hidden_size=HIDDEN, sizes=(4,)),
    kv_divergence=0.03125,
    kv_agreement=0.875,
)
DEFAULT_REPLY = list(range(1000, 1032))
"""Token ids; their texts depend on the tokenizer."""


@dataclass
class Sequence:
    submit: Submit
    index: int
    tokens: list[int]
    running: bool = False


@dataclass
class FakeEngine:
    """Runs in a thread. Knobs may be turned at any time."""

    sock: socket.socket
    reply: list[int] = field(default_factory=lambda: list(DEFAULT_REPLY))
    """What every sequence says, over and over."""
    interval: float = 0.001
    """Seconds per step."""
    max_running: int = 64
    ready: Ready = READY
    load_seconds: float = 0.0
    fail_with: str | None = None
    """Every new request ends with this error."""
    received: list[ToEngine] = field(default_factory=list)
    config: EngineConfig | None = None

    def __post_init__(self) -> None:
        self.paused = threading.Event()
        self.changed = threading.Condition()
        self.sequences: list[Sequence] = []
        self.steps = 0
        self._started: list[Started] = []
        self._prompts: list[PromptLogprobs] = []
        self._pooled: list[Pooled] = []
        self._seen: set[int] = set()
        self._failed: list[Submit] = []

    def run(self) -> None:
        """Until the other end hangs up."""
        try:
            self.config = msgspec.msgpack.decode(self._frame(), type=EngineConfig)
            self._send(Progress("weights", "none"))
            time.sleep(self.load_seconds)
            self._send(self.ready)
            while True:
                busy = bool(self.sequences or self._failed) and not self.paused.is_set()
                timeout = self.interval if busy else 0.02
                inbox = self._inbox(timeout)
                if busy or inbox:
                    self._step()
        except (ConnectionError, OSError):
            pass

    def wait_for(self, condition: Callable[[FakeEngine], bool], seconds: float = 5.0) -> None:
        """Until what was received, or what runs, meets a condition."""
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self), seconds), f"never came true; got {self.received}"

    def submits(self) -> list[Submit]:
        return [message for message in self.received if isinstance(message, Submit)]

    def aborts(self) -> list[Abort]:
        return [message for message in self.received if isinstance(message, Abort)]

    def die(self) -> None:
        self.sock.shutdown(socket.SHUT_RDWR)

    def _inbox(self, timeout: float) -> bool:
        """Takes in all that has come; whether there was anything."""
        got = False
        while select.select([self.sock], [], [], 0 if got else timeout)[0]:
            message = msgspec.msgpack.decode(self._frame(), type=ToEngine)
            got = True
            with self.changed:
                self.received.append(message)
                if isinstance(message, Abort):
                    self.sequences = [
                        s for s in self.sequences if s.submit.id != message.id or message.index not in (None, s.index)
                    ]
                elif self.fail_with is not None:
                    self._failed.append(message)
                else:
                    known = message.generated or [[] for _ in range(message.n)]
                    many = message.n if message.search is None else 1
                    running = [i for i in range(many) if i not in message.finished]
                    self.sequences += [Sequence(message, i, list(known[i])) for i in running]
                self.changed.notify_all()
        return got

    def _step(self) -> None:
        """One token for everybody who runs."""
        rows: list[tuple[int, int, int, int, Logprob | None]] = []
        errors = [RowError(row, self.fail_with or "") for row, _ in enumerate(self._failed)]
        rows += [(submit.id, 0, -1, FinishReason.ERROR, None) for submit in self._failed]
        self._failed.clear()
        for sequence in self.sequences[: self.max_running]:
            self._admit(sequence)
            if self.paused.is_set():
                continue
            if sequence.submit.search is not None:
                rows += self._searched(sequence.submit, sequence.submit.search)
            else:
                rows.append(self._row(sequence))
        ended = {(id, index) for id, index, _, finish, _ in rows if finish}
        with self.changed:
            self.sequences = [s for s in self.sequences if (s.submit.id, s.index) not in ended]
            self.steps += 1
            self.changed.notify_all()
        output = StepOutput(
            ids=[row[0] for row in rows],
            indices=[row[1] for row in rows],
            tokens=[row[2] for row in rows],
            finishes=[int(row[3]) for row in rows],
            logprobs={number: row[4] for number, row in enumerate(rows) if row[4] is not None},
            started=self._started,
            prompt_logprobs=self._prompts,
            pooled=self._pooled,
            errors=errors,
            stats=self.stats(len(rows)),
            now=time.monotonic(),
        )
        self._started, self._prompts, self._pooled = [], [], []
        self._send(output)

    def _admit(self, sequence: Sequence) -> None:
        sequence.running = True
        submit = sequence.submit
        if submit.id in self._seen:
            return
        self._seen.add(submit.id)
        self._started.append(Started(submit.id, time.monotonic(), 0))
        k = submit.params.prompt_logprobs
        if k is not None:
            self._prompts.append(PromptLogprobs(submit.id, [logprob(t, k) for t in submit.prompt_ids[1:]]))

    def _row(self, sequence: Sequence) -> tuple[int, int, int, int, Logprob | None]:
        submit, params = sequence.submit, sequence.submit.params
        if params.pooling is not None:
            self._pooled.append(Pooled(submit.id, vector(submit.prompt_ids, params.pooling)))
            return submit.id, 0, -1, FinishReason.STOP, None
        if params.max_tokens == 0:
            return submit.id, sequence.index, -1, FinishReason.LENGTH, None
        token = self.reply[len(sequence.tokens) % len(self.reply)]
        sequence.tokens.append(token)
        finish = FinishReason.RUNNING
        if token in params.stop_token_ids:
            finish = FinishReason.STOP
        elif len(sequence.tokens) == params.max_tokens:
            finish = FinishReason.LENGTH
        scored = None if params.logprobs is None else logprob(token, params.logprobs)
        return submit.id, sequence.index, token, finish, scored

    def _searched(self, submit: Submit, search: BeamSearch) -> list[tuple[int, int, int, int, Logprob | None]]:
        """The whole search at once: after every beam the reply's token and its neighbours may come."""
        params = submit.params
        beams = Beams(search, params.stop_token_ids, params.max_tokens, params.logprobs or 0)
        while not beams.done:
            for slot in beams.live:
                beams.note(slot, [logprob(self.reply[beams.length % len(self.reply)], beams.wanted)])
            beams.advance()
        rows: list[tuple[int, int, int, int, Logprob | None]] = []
        for index, (_, beam) in enumerate(beams.ended[: submit.n]):
            rows += [(submit.id, index, step.token, 0, step.value) for step in beam.steps()]
            finish = FinishReason.STOP if beam.stopped else FinishReason.LENGTH
            rows[-1] = (*rows[-1][:3], finish, rows[-1][4])
        return rows

    def stats(self, rows: int = 0) -> EngineStats:
        running = [s for s in self.sequences if s.running]
        lengths = [len(s.submit.prompt_ids) + len(s.tokens) for s in running]
        active = sum(math.ceil(length / BLOCK) for length in lengths)
        waiting = [s for s in self.sequences if not s.running]
        return EngineStats(
            running=len(running),
            waiting=len(waiting),
            waiting_tokens=sum(len(s.submit.prompt_ids) for s in waiting),
            blocks_total=TOTAL_BLOCKS,
            blocks_free=TOTAL_BLOCKS - active,
            blocks_cached=0,
            blocks_active=active,
            tokens_active=sum(lengths),
            preemptions=0,
            prefix_queried_tokens=10,
            prefix_hit_tokens=0,
            computed_tokens=20,
            drafts=0,
            drafted_tokens=0,
            accepted_tokens=0,
            steps=self.steps,
            step_seconds=self.interval,
            step_tokens=rows,
            step_rows=rows,
        )

    def _frame(self) -> bytes:
        return self._read(int.from_bytes(self._read(HEADER_BYTES), "big"))

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self.sock.recv(size - len(data))
            if not chunk:
                raise ConnectionError
            data += chunk
        return data

    def _send(self, message: FromEngine) -> None:
        self.sock.sendall(frame(message))


def vector(prompt: list[int], pooling: Pooling) -> bytes:
    """Numbers that no two prompts share, pooled as the real engine does it."""
    states = np.array([[(token * (i + 3)) % 101 - 50 for i in range(HIDDEN)] for token in prompt], np.float32)
    values = finished(pooled(states, None, pooling), len(prompt), pooling)
    assert values is not None
    return values


def logprob(token: int, k: int) -> Logprob:
    """The token is the likeliest; its neighbours follow."""
    return Logprob(-0.5, 1, [token + i for i in range(k)], [-0.5 - i for i in range(k)])


def main() -> None:
    """In place of `scheduler.worker`: speaks slowly and at any length."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--interval", type=float, default=0.02)
    parser.add_argument("--max-running", type=int, default=FakeEngine.max_running)
    arguments = parser.parse_args()
    sock = socket.socket(fileno=arguments.fd)
    FakeEngine(sock, interval=arguments.interval, max_running=arguments.max_running).run()


if __name__ == "__main__":
    main()
