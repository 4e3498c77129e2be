"""The columns of one StepOutput while it is put together."""

from __future__ import annotations

from model.batch import NO_TOKEN
from scheduler.beams import Beam
from scheduler.messages import EngineStats, FinishReason, Logprob, Pooled, PromptLogprobs, RowError, Started, StepOutput
from scheduler.sequence import Sequence


class Report:
    """Rows in the order in which they are added."""

    __slots__ = ("errors", "finishes", "ids", "indices", "logprobs", "pooled", "prompt_logprobs", "started", "tokens")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.indices: list[int] = []
        self.tokens: list[int] = []
        self.finishes: list[int] = []
        self.logprobs: dict[int, Logprob] = {}
        self.started: list[Started] = []
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.pooled: list[Pooled] = []
        self.errors: list[RowError] = []

    def token(self, sequence: Sequence, token: int, finish: int, logprob: Logprob | None) -> None:
        """A drawn token, and the end where it brought one."""
        if logprob is not None:
            self.logprobs[len(self.ids)] = logprob
        self.ids.append(sequence.request.id)
        self.indices.append(sequence.index)
        self.tokens.append(token)
        self.finishes.append(finish)

    def beam(self, request: int, index: int, beam: Beam) -> None:
        """All tokens of a beam, and its end."""
        for step in beam.steps():
            self.logprobs[len(self.ids)] = step.value
            self.ids.append(request)
            self.indices.append(index)
            self.tokens.append(step.token)
            self.finishes.append(int(FinishReason.RUNNING))
        self.finishes[-1] = int(FinishReason.STOP if beam.stopped else FinishReason.LENGTH)

    def end(self, request: int, index: int, finish: FinishReason, error: str | None = None) -> None:
        """An end without a token."""
        if error is not None:
            self.errors.append(RowError(len(self.ids), error))
        self.ids.append(request)
        self.indices.append(index)
        self.tokens.append(NO_TOKEN)
        self.finishes.append(int(finish))

    def vector(self, request: int, vector: bytes) -> None:
        """The pooled prompt, with which a request ends."""
        self.pooled.append(Pooled(request, vector))
        self.end(request, 0, FinishReason.STOP)

    def output(self, stats: EngineStats, now: float) -> StepOutput:
        return StepOutput(
            ids=self.ids,
            indices=self.indices,
            tokens=self.tokens,
            finishes=self.finishes,
            logprobs=self.logprobs,
            started=self.started,
            prompt_logprobs=self.prompt_logprobs,
            pooled=self.pooled,
            errors=self.errors,
            stats=stats,
            now=now,
        )
