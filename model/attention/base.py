"""The one signature of every attention backend."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kvpool.storage import KVStorage
from model.inputs import StepInputs


class Attention(Protocol):
    """Causal attention of a step's queries over the pool.

    The step's own keys and values are in the pool before it is called: a backend reads nothing else.
    """

    name: str
    """As shown at start-up."""
    reads_unwritten: bool
    """Whether it multiplies slots that nobody wrote by zero: they must then hold finite numbers."""

    def __call__(
        self,
        query: Tensor,
        storage: KVStorage,
        layer: int,
        inputs: StepInputs,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """[tokens, heads, head_dim] in any float type → the same shape and type; softmax and sums in float32.

        Query head h reads key head h // (heads / kv_heads). `window` w lets position p see (p - w, p]. `softcap` c
        turns scores s, scaled already, into c · tanh(s / c).
        """
        ...
