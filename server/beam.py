"""Beam search, as a request asks for it and as the engine is told."""

from __future__ import annotations

from scheduler.messages import BeamSearch
from server.errors import InvalidRequest
from server.protocol.completions import CompletionRequest


def beam_search(body: CompletionRequest, seats: int) -> BeamSearch | None:
    """None where none is asked for. InvalidRequest where it needs more than all `seats` of the engine: the beams of a
    search run side by side."""
    if not body.use_beam_search:
        return None
    if body.beams > seats:
        name = "n" if body.beam_width is None else "beam_width"
        raise InvalidRequest(
            f"{name}: {body.beams} beams cannot run at once; this server runs {seats} sequences (--max-num-seqs)",
            param=name,
        )
    return BeamSearch(width=body.beams, length_penalty=body.length_penalty, early_stopping=body.early_stopping)
