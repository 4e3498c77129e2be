"""Top-k, then top-p, then min-p: which tokens a row may draw from.

All three keep the likeliest tokens, so a row's support is known by one number, the probability at which it is cut, and
by how many of the tokens with exactly that probability belong to it (the lowest ids do):

    p   |####
        |## # #
        |#  # ## #  ← cut
        +------------ ids

On a CPU the cut is found by sorting only values that can belong to the support; on other devices by bisection over
float bits, which needs no sort and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from model.params import SamplingParams

_BLOCK = 64
_ABOVE_ONE = 0x3F80_0100
"""Bits of a float just above the largest probability that softmax may give."""
_SMALLEST = 2.0**-149


def truncate(probs: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Zero, in place, what may not be drawn. probs: float32 [rows, vocab], each row sums to 1; not renormalised.

    Top-p keeps the smallest set of likeliest tokens whose share of what top-k left reaches p; min-p keeps tokens at
    least min_p times as likely as the likeliest. At least one token always stays.
    """
    rows, vocab = probs.shape
    limited = [i for i, p in enumerate(params) if 0 < p.top_k < vocab or p.top_p < 1 or p.min_p > 0]
    if not limited:
        return
    if probs.device.type != "cpu":
        truncate_by_bisection(probs, params)
        return
    host = probs.numpy()
    whole = vocab - vocab % _BLOCK
    tops = None
    if whole and any(0 < params[i].top_k < vocab for i in limited):
        tops = probs[:, :whole].view(rows, whole // _BLOCK, _BLOCK).amax(2).numpy()
    for i in limited:
        _truncate_row(host[i], params[i], None if tops is None else tops[i])


def _truncate_row(probs: NDArray[np.float32], params: SamplingParams, tops: NDArray[np.float32] | None) -> None:
    """One row on the host. tops: the largest value of each whole block of the row."""
    vocab = probs.size
    top_k = params.top_k if 0 < params.top_k < vocab else vocab
    floor = np.float32(params.min_p) * probs.max()
    # Nothing below `bound` can belong to the support. top_k values are at least as large as the k-th largest block top;
    # all tokens below (1 - p) / vocab together weigh less than 1 - p (halved: rounding).
    if top_k < vocab:
        bound = np.partition(tops, -top_k)[-top_k] if tops is not None and top_k <= tops.size else np.float32(0)
    else:
        bound = np.float32((1 - min(params.top_p, 1)) / vocab / 2)
    if top_k == vocab or params.top_p >= 1:
        bound = max(bound, floor)  # else top-p must see all that top-k leaves: it is a share of their sum
    # Through ids: a mask as index costs four times as much.
    ranked = np.sort(probs[np.flatnonzero(probs >= bound)])[::-1]
    count = min(top_k, ranked.size)
    if params.top_p < 1:
        sums = np.cumsum(ranked[:count], dtype=np.float64)
        total = sums[-1] if top_k < vocab else 1.0
        count = min(count, int(np.searchsorted(sums, params.top_p * total)) + 1)
    count = min(count, int(np.count_nonzero(ranked >= floor)))
    cut = ranked[count - 1]
    np.multiply(probs, probs >= cut, out=probs)
    if count < ranked.size and ranked[count] == cut:
        ties = count - int(np.count_nonzero(ranked > cut))
        probs[np.flatnonzero(probs == cut)[ties:]] = 0


def truncate_by_bisection(probs: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """`truncate` for any device, all rows at once, without a sort and without waiting for the device."""
    vocab = probs.shape[1]
    top_k = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    peak = probs.amax(1, keepdim=True)
    if any(k < vocab for k in top_k):
        _cut(probs, _column(top_k, probs, torch.float64), counting=True)
    if any(p.top_p < 1 for p in params):
        share = _column([min(p.top_p, 1.0) for p in params], probs, torch.float64)
        before = probs.clone()
        _cut(probs, share * probs.sum(1, keepdim=True, dtype=torch.float64), counting=False)
        torch.where(share < 1, probs, before, out=probs)
    min_p = _column([p.min_p for p in params], probs, torch.float32)
    probs.mul_(probs >= min_p * peak)


def _cut(probs: torch.Tensor, target: torch.Tensor, counting: bool) -> None:
    """Keep the fewest likeliest tokens whose number, if counting, or whose sum reaches target (float64 [rows, 1]).

    Non-negative floats are ordered like their bits read as integers: 31 halvings find the largest cut that reaches.
    """

    def reached(chosen: torch.Tensor) -> torch.Tensor:
        return (chosen if counting else probs * chosen).sum(1, keepdim=True, dtype=torch.float64)

    low = torch.zeros(probs.shape[0], 1, dtype=torch.int32, device=probs.device)
    high = torch.full_like(low, _ABOVE_ONE)
    for _ in range(31):
        middle = (low + high) // 2
        enough = reached(probs >= middle.view(torch.float32)) >= target
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    cut = low.view(torch.float32)
    each = torch.ones_like(target) if counting else cut.double().clamp_min(_SMALLEST)
    ties = ((target - reached(probs > cut)) / each).ceil().clamp_min(1)
    same = probs == cut
    probs.mul_((probs > cut) | (same & (same.cumsum(1) <= ties)))


def _column(values: Sequence[float], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).unsqueeze(1).to(like.device, non_blocking=True)
