"""Beam search: every round each beam finds the likeliest next tokens, and of all that could be, the likeliest go on.

    beams ── a prompt of one token to generate for each ──▶ 2 x width candidates each ──▶ width beams, or ends

What a round shares with the one before comes from the prefix cache. It goes by the model's own distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from server.generation import Generation, Job
from server.logprobs import Alternative
from server.streams import StreamOptions


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence of generated tokens; an end token is not among them."""

    tokens: tuple[int, ...] = ()
    logprob: float = 0.0
    """Sum over the tokens, the end included."""
    ended: bool = False
    stop_token: int | None = None

    def score(self, length_penalty: float, length: int = 0) -> float:
        """Logprob by length; `length`: as if it were so long."""
        return float(self.logprob / max(1, length or len(self.tokens) + self.ended) ** length_penalty)


async def search(generation: Generation, job: Job, width: int, length_penalty: float) -> list[Beam]:
    """The `width` best continuations, best first. job.params: how many tokens at most, and which ones end it.

    Raises what the generation failed with.
    """
    most, ends = job.params.max_tokens, frozenset(job.params.stop_token_ids)
    params = msgspec.structs.replace(job.params, max_tokens=1, temperature=0.0, stop_token_ids=(), logprobs=2 * width)
    live, ended = [Beam()], list[Beam]()
    for _ in range(most):
        jobs = [replace(job, prompt_ids=[*job.prompt_ids, *beam.tokens], params=params, n=1) for beam in live]
        generation.submit(jobs, StreamOptions())
        found = [result.logprobs or () for (result,) in await generation.collect()]
        live, new = advanced(live, [entries[0].top or () for entries in found], width, ends)
        ended = sorted([*ended, *new], key=lambda beam: -beam.score(length_penalty))[:width]
        if not live or (
            len(ended) == width
            and ended[-1].score(length_penalty) >= live[0].score(length_penalty, most if length_penalty > 0 else 0)
        ):
            break
    return sorted([*ended, *live], key=lambda beam: -beam.score(length_penalty))[:width]


def advanced(
    beams: Sequence[Beam], found: Sequence[Sequence[Alternative]], width: int, ends: frozenset[int]
) -> tuple[list[Beam], list[Beam]]:
    """The `width` likeliest continuations of the beams by one of their alternatives, and those that ended among the
    2 x width likeliest. Best first."""
    grown = [
        Beam(beam.tokens, beam.logprob + other.logprob, True, other.token_id)
        if other.token_id in ends
        else Beam((*beam.tokens, other.token_id), beam.logprob + other.logprob)
        for beam, alternatives in zip(beams, found, strict=True)
        for other in alternatives
    ]
    likeliest = sorted(grown, key=lambda beam: -beam.logprob)[: 2 * width]
    return [beam for beam in likeliest if not beam.ended][:width], [beam for beam in likeliest if beam.ended]
