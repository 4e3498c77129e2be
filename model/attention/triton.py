"""Attention by our own Triton kernels: see `model/gpu/attention.py`. Needs triton; a CUDA build of torch brings it."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from kvpool.storage import KVStorage
from model.gpu.attention import attention
from model.gpu.launch import dot_type, torch_type
from model.gpu.plan import Reserved, plan
from model.gpu.rotation import turning
from model.inputs import StepInputs

EMULATED = 8
"""Programs at once, where kernels are interpreted."""


class TritonAttention:
    """See `model.attention.base.Attention`. Reads each key and value once for all heads that share it, from where it
    lies in the pool, and no slot that nobody wrote. Head sizes must be even."""

    name = "triton"
    reads_unwritten = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cuda = device.type == "cuda"
        self.programs = torch.cuda.get_device_properties(device).multi_processor_count if cuda else EMULATED

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
        _, heads, dim = query.shape
        if query.stride(2) != 1 or query.stride(1) != dim:
            query = query.contiguous()
        if storage.fit is not None:
            dot = dot_type(query.dtype, torch.uint8)
            turned = query.new_empty(query.shape, dtype=torch_type(dot))
            balance = storage.fit.data[layer, 2]
            turning(query, turned, dot, balance=balance, group=heads // len(balance)).run()
            query, dtype = turned, query.dtype
        else:
            dtype = query.dtype
        return self.attend(query, dtype, storage, layer, inputs, scale=scale, window=window, softcap=softcap)

    def reserve(self, key: Hashable, rows: int, columns: int) -> Reserved:
        """Room for what the plan `key` of a step is derived from; see `model.graphs`."""
        assert isinstance(key, tuple)
        _, window, kv_heads, group = key
        return Reserved(rows, columns, window, kv_heads, group, self.programs, self.device)

    def attend(
        self,
        query: Tensor,
        dtype: torch.dtype,
        storage: KVStorage,
        layer: int,
        inputs: StepInputs,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """As a call, for queries that are rotated already where keys are; the result has the type `dtype`."""
        (_, heads, _), kv_heads = query.shape, storage.k[layer].shape[1]
        group = heads // kv_heads
        steps = inputs.plan(
            ("triton", window, kv_heads, group), lambda: plan(inputs, window, kv_heads, group, self.programs)
        )
        rotated = storage.values.codec is not None and storage.values.codec.rotated
        out = query.new_empty(query.shape, dtype=torch.float32 if rotated else dtype)
        for work in steps.works:
            for launch in attention(
                query, out, storage, layer, steps, work, scale=scale, window=window, softcap=softcap
            ):
                launch.run()
        if not rotated:
            return out
        back = out.new_empty(out.shape, dtype=dtype)
        turning(out, back, dot_type(dtype, torch.uint8), back=True).run()
        return back
