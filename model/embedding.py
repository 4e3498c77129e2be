"""What an embedding is made of: the model's way, and a request's wish."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["mean", "last"]


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """What one request wants of its prompt's hidden states (after the last norm)."""

    kind: Kind
    size: int
    """Leading values of the vector that are kept; at most the model's hidden size."""
    normalize: bool = True
    """To length 1, after the cut."""


class EmbeddingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the model's vectors are made."""

    hidden_size: int
    kind: Kind = "mean"
    """Of a model that says nothing: a causal model that was not trained for it does better with the mean of all
    states than with its last one."""
    refusal: str | None = None
    """Why this model can give none."""
    sizes: tuple[int, ...] | None = None
    """Matryoshka models: lengths to which a vector may be cut; empty: any. None: no other than `hidden_size`."""

    def allows(self, size: int) -> bool:
        """Whether a vector may have so many values."""
        if size == self.hidden_size:
            return True
        return self.sizes is not None and 1 <= size < self.hidden_size and (not self.sizes or size in self.sizes)
