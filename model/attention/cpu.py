"""Attention by the compiled kernels, for models whose layers run elsewhere: see kernels/attention.h."""

from __future__ import annotations

from torch import Tensor

from kvpool.storage import KVStorage
from model.attention.reference import ReferenceAttention
from model.inputs import StepInputs
from model.kernels.loaded import Kernels


class CpuAttention:
    """See `model.attention.base.Attention`. Reads each key and value once, from where it lies in the pool.

    Heads that the kernels are not made for (largest, not a multiple of a vector) go to the reference.
    """

    reads_unwritten = True

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.name = f"cpu-{kernels.isa}"
        self._reference = ReferenceAttention()

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
        if not self.kernels.ops.attends(query.shape[1], storage.k[layer].shape[1], query.shape[2]):
            return self._reference(query, storage, layer, inputs, scale=scale, window=window, softcap=softcap)
        out: Tensor = self.kernels.ops.attention(
            query.float().contiguous(),
            storage.k[layer],
            storage.v[layer],
            None if storage.fit is None else storage.fit.layer(layer),
            storage.block_size,
            *inputs.packed(),
            scale,
            window or 0,
            softcap or 0.0,
        )
        return out.to(query.dtype)
