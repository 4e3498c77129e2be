"""Logprobs of the model's own distribution: before penalties, masks and temperature."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from model.kernels.loaded import Kernels
from model.params import Logprob

FLOOR = -9999.0
"""JSON has no -inf."""
_SLAB = 1 << 23
"""Logits looked at in one go: bounds what a long prompt takes beside its logits."""


def token_logprobs(
    logits: torch.Tensor,
    tokens: Sequence[int],
    counts: Sequence[int],
    *,
    rows: Sequence[int] | None = None,
    kernels: Kernels | None = None,
) -> list[Logprob]:
    """Logprob and rank of one token per row, and of the row's likeliest `counts[i]` tokens, lower ids first in a tie.

    logits: float32 [len(tokens), vocab], any device; with `rows`, those of them. Natural logarithms, never below
    FLOOR; NaN reads as FLOOR.
    """
    if kernels is not None:
        return _compiled(kernels, logits, tokens, counts, range(len(tokens)) if rows is None else rows)
    if rows is not None and len(rows) < logits.shape[0]:
        logits = logits.index_select(0, torch.tensor(rows, device=logits.device))
    slab = max(1, _SLAB // logits.shape[1])
    result: list[Logprob] = []
    for start in range(0, len(tokens), slab):
        part = slice(start, start + slab)
        result += _slab_logprobs(logits[part], tokens[part], counts[part])
    return result


def with_tokens(logits: torch.Tensor, token: int, value: Logprob, ids: Sequence[int]) -> Logprob:
    """What `token_logprobs` found for `token`, with the tokens `ids` among its alternatives too, likeliest first.

    logits: float32 [vocab], the same.
    """
    more = [id for id in dict.fromkeys(ids) if id not in value.top_ids]
    if not more:
        return value
    picked = logits[torch.tensor([token, *more], device=logits.device)].double().cpu()
    norm = picked[0] - value.logprob if value.logprob > FLOOR else torch.logsumexp(logits.double(), 0).cpu()
    pairs = [*zip(value.top_ids, value.top_logprobs, strict=True), *zip(more, _floored(picked[1:] - norm), strict=True)]
    pairs = sorted(((id, float(logprob)) for id, logprob in pairs), key=lambda pair: (-pair[1], pair[0]))
    return Logprob(value.logprob, value.rank, [id for id, _ in pairs], [logprob for _, logprob in pairs])


def prompt_logprobs(
    logits: torch.Tensor, next_tokens: Sequence[int], k: int, kernels: Kernels | None = None
) -> list[Logprob]:
    """`token_logprobs` with the same k for all rows; row i's token is the prompt's next one."""
    return token_logprobs(logits, next_tokens, [k] * len(next_tokens), kernels=kernels)


def _compiled(
    kernels: Kernels, logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int], rows: Sequence[int]
) -> list[Logprob]:
    counts = np.minimum(counts, logits.shape[1]).tolist()
    columns = (torch.tensor(column, dtype=torch.int64) for column in (rows, tokens, counts))
    values, numbers = kernels.ops.logprobs(logits, *columns, max(counts))
    result = []
    for i, (row_values, row_numbers) in enumerate(zip(values.tolist(), numbers.tolist(), strict=True)):
        if math.isnan(row_values[0]):  # the reference knows what a broken row reads as
            result += token_logprobs(logits, tokens[i : i + 1], counts[i : i + 1], rows=rows[i : i + 1])
            continue
        end = 1 + counts[i]
        value, *top = [max(value, FLOOR) for value in row_values[:end]]
        result.append(Logprob(logprob=value, rank=row_numbers[0], top_ids=row_numbers[1:end], top_logprobs=top))
    return result


def _slab_logprobs(logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[Logprob]:
    width = min(max(counts), logits.shape[1])
    ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device).unsqueeze(1)
    raw = logits.gather(1, ids)
    norms = torch.logsumexp(logits, 1, keepdim=True)
    ranks = ((logits > raw).sum(1) + 1).tolist()
    chosen = _floored(raw - norms)[:, 0].tolist()
    top, top_ids = (part.cpu().numpy() for part in torch.topk(logits, width, dim=1))
    order = np.lexsort((top_ids, -top), axis=1)
    top_ids = np.take_along_axis(top_ids, order, 1).tolist()
    top_values = np.take_along_axis(_floored(torch.from_numpy(top) - norms.cpu()), order, 1).tolist()
    return [
        Logprob(logprob=value, rank=rank, top_ids=own_ids[:count], top_logprobs=own_values[:count])
        for value, rank, own_ids, own_values, count in zip(chosen, ranks, top_ids, top_values, counts, strict=True)
    ]


def _floored(values: torch.Tensor) -> NDArray[np.float64]:
    host = values.cpu().numpy().astype(np.float64)
    return np.nan_to_num(np.maximum(host, FLOOR), nan=FLOOR)
