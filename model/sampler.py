"""From logits to tokens, for all rows of a step at once.

    logits ─▶ penalties ─▶ bias ─▶ masks ─▶ temperature ─▶ top-k ─▶ top-p ─▶ min-p ─▶ one uniform, inverse CDF
       └─▶ logprobs           model.edits                      model.truncation          model.uniform

What a row draws depends on its own logits, tokens and parameters only, never on the rows beside it. On a CPU the
compiled kernels (`model/kernels/sampler.h`) do all but the edits; what is here is their reference, and what a GPU runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from model.batch import BAD_LOGITS, NO_TOKEN, Row
from model.drawn import Drawn
from model.edits import constrain, edit, is_edited
from model.grammar import Mask
from model.inputs import to_device
from model.kernels.loaded import Kernels
from model.logprobs import token_logprobs, with_tokens
from model.params import Logprob, SamplingParams
from model.truncation import truncate
from model.uniform import uniforms

_COLDEST = 1e-4
"""Temperatures below it are argmax: dividing by them gains nothing and overflows."""
_BLOCK = 128


def likeliest(rows: Sequence[Row]) -> bool:
    """Whether all that is asked of these is the likeliest token."""
    return all(row.plain and _is_greedy(row.params) for row in rows)


class Sampler:
    """Draws one token per row. Keeps nothing between calls."""

    def __init__(self, kernels: Kernels | None = None, asynchronous: bool = False) -> None:
        """asynchronous: a device computes while the host goes on, so `ahead` is worth its while."""
        self._kernels = kernels
        self.asynchronous = asynchronous

    def ahead(self, logits: torch.Tensor, rows: Sequence[Row]) -> Drawn | None:
        """Enqueue the draws that need nothing of their rows' tokens but how many there are; None where there is none.
        For `sample`, with the same logits and rows."""
        if not self.asynchronous:
            return None
        plain = [i for i, row in enumerate(rows) if row.matcher is None and not is_edited(row)]
        if not plain:
            return None
        own = logits if len(plain) == len(rows) else _select(logits, plain)
        return Drawn(_draw_there(own, [rows[i] for i in plain]), plain)

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[Row],
        masks: Mapping[int, Mask] = MappingProxyType({}),
        ahead: Drawn | None = None,
    ) -> tuple[list[int], list[Logprob | None]]:
        """Token and, where `params.logprobs` asks for it, logprob of every row. logits: float32 [len(rows), vocab],
        may be written to. masks: of the rows that a grammar constrains, by number.

        BAD_LOGITS for a row whose logits hold NaN or +inf, or nothing but -inf. NO_TOKEN where the request's own masks
        leave no token: its sequence must end.
        """
        if ahead is not None:
            rest = [i for i in range(len(rows)) if i not in ahead.places]
            masked = {place: masks[i] for place, i in enumerate(rest) if i in masks}
            others, _ = self.sample(_select(logits, rest), [rows[i] for i in rest], masked) if rest else ([], [])
            found = {**ahead.wait(), **dict(zip(rest, others, strict=True))}
            drawn = [found[i] for i in range(len(rows))]
            return drawn, self._logprobs(logits, rows, drawn)
        draw = _draw if self._kernels is None else partial(_draw_compiled, self._kernels)
        if all(row.plain for row in rows):
            tokens = draw(logits, rows, frozenset())
            tokens[tokens == NO_TOKEN] = BAD_LOGITS
            return tokens.tolist(), [None] * len(rows)
        edited = [i for i, row in enumerate(rows) if is_edited(row) or (i in masks and row.params.logprobs is not None)]
        raw = np.ones(len(rows), np.bool_)
        if direct := {i: masks[i] for i in masks.keys() - set(edited)}:
            # Most constrained rows: nobody asks for their raw logits, so they need no copy.
            constrain(logits, direct, self._kernels)
            raw[list(direct)] = False
        tokens = draw(logits, rows, frozenset(edited))
        tokens[raw & (tokens == NO_TOKEN)] = BAD_LOGITS
        edited = [i for i in edited if tokens[i] >= 0]
        if edited:
            scores, own = _select(logits, edited), [rows[i] for i in edited]
            edit(scores, own)
            if left := {place: masks[i] for place, i in enumerate(edited) if i in masks}:
                constrain(scores, left, self._kernels)
            tokens[edited] = draw(scores, own, frozenset())
        result: list[int] = tokens.tolist()
        return result, self._logprobs(logits, rows, result)

    def _logprobs(self, logits: torch.Tensor, rows: Sequence[Row], tokens: list[int]) -> list[Logprob | None]:
        result: list[Logprob | None] = [None] * len(rows)
        asked = [(i, k) for i, row in enumerate(rows) if (k := row.params.logprobs) is not None and tokens[i] >= 0]
        if asked:
            numbers = [i for i, _ in asked]
            own = [tokens[i] for i in numbers]
            values = token_logprobs(logits, own, [k for _, k in asked], rows=numbers, kernels=self._kernels)
            for i, value in zip(numbers, values, strict=True):
                ids = rows[i].params.logprob_token_ids
                result[i] = with_tokens(logits[i], tokens[i], value, ids) if ids else value
        return result


def _draw_compiled(
    kernels: Kernels, scores: torch.Tensor, rows: Sequence[Row], checked: frozenset[int]
) -> NDArray[np.int64]:
    """`_draw`, in one call."""
    wishes = np.zeros((len(rows), 5))
    drawn = [i for i, row in enumerate(rows) if i not in checked and not _is_greedy(row.params)]
    if drawn:
        params = [rows[i].params for i in drawn]
        wishes[drawn, :4] = [(p.temperature, p.top_k, p.top_p, p.min_p) for p in params]
        wishes[drawn, 4] = _numbers([rows[i] for i in drawn])
    tokens: NDArray[np.int64] = kernels.ops.draw(scores, torch.from_numpy(wishes)).numpy()
    return tokens


def _draw(scores: torch.Tensor, rows: Sequence[Row], checked: frozenset[int]) -> NDArray[np.int64]:
    """A token of every row, NO_TOKEN where all is -inf, BAD_LOGITS where there is NaN or +inf. Rows in `checked` will
    draw later: theirs may be any token."""
    peaks, likeliest = _peaks(scores)
    tokens = np.where(np.isfinite(peaks), likeliest, BAD_LOGITS)
    tokens[np.isneginf(peaks)] = NO_TOKEN
    drawn = [i for i in np.flatnonzero(tokens >= 0).tolist() if i not in checked and not _is_greedy(rows[i].params)]
    if not drawn:
        return tokens
    if len(drawn) < scores.shape[0]:
        scores = _select(scores, drawn)
    params = [rows[i].params for i in drawn]
    device = scores.device
    tops = torch.from_numpy(peaks[drawn]).unsqueeze(1).to(device)
    temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float32).unsqueeze(1).to(device)
    # The peak goes first: logits divided by a small temperature overflow, differences to the peak only underflow.
    probs = torch.softmax((scores - tops).div_(temperatures), 1)
    truncate(probs, params)
    tokens[drawn] = inverse_cdf(probs, _numbers([rows[i] for i in drawn]))
    return tokens


def _draw_there(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """What `_draw` draws, int64 [rows] on the device, without waiting for it; BAD_LOGITS where there is no token."""
    peaks, likeliest = logits.max(1)
    tokens = torch.where(peaks.isfinite(), likeliest, BAD_LOGITS)
    drawn = [i for i, row in enumerate(rows) if not _is_greedy(row.params)]
    if not drawn:
        return tokens
    own, device = [rows[i] for i in drawn], logits.device
    wishes = to_device(np.array([[row.params.temperature for row in own], _numbers(own)]), device).unsqueeze(2)
    which = to_device(np.array(drawn), device)
    scores = logits.index_select(0, which).sub_(peaks.index_select(0, which).unsqueeze(1)).div_(wishes[0].float())
    # Of a row that is not finite any, as long as it is not NaN: it keeps its BAD_LOGITS.
    probs = torch.softmax(scores.nan_to_num_(0.0, neginf=-torch.inf), 1)
    truncate(probs, [row.params for row in own])
    bad = tokens.index_select(0, which)
    return tokens.index_copy_(0, which, torch.where(bad < 0, bad, _pick(probs, wishes[1])))


def _numbers(rows: Sequence[Row]) -> NDArray[np.float64]:
    return uniforms([row.params.seed for row in rows], [row.index for row in rows], [row.length for row in rows])


def inverse_cdf(probs: torch.Tensor, numbers: NDArray[np.float64]) -> NDArray[np.int64]:
    """The first id, per row, at which the sum of `probs` over all ids up to it exceeds number * (sum of the row).

    probs: float32 [rows, vocab], not negative, not all zero, any scale. numbers: [rows], in [0, 1). Never an id of
    probability zero. Sums run first over blocks of ids, then within one block, in an order that depends on the row's
    length only.
    """
    target = torch.from_numpy(numbers).unsqueeze(1).to(probs.device)
    chosen: NDArray[np.int64] = _pick(probs, target).cpu().numpy()
    return chosen


def _pick(probs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`inverse_cdf` for numbers float64 [rows, 1] on the device, which the ids do not leave."""
    rows, vocab = probs.shape
    count = vocab // _BLOCK
    whole = count * _BLOCK
    sums = probs[:, :whole].view(rows, count, _BLOCK).sum(2)
    if whole < vocab:
        sums = torch.cat([sums, probs[:, whole:].sum(1, keepdim=True)], 1)
    block, target = _step(sums, target, scale=True)
    ids = block * _BLOCK + torch.arange(_BLOCK, device=probs.device)
    inside = probs.gather(1, ids.clamp_max(vocab - 1)).masked_fill_(ids >= vocab, 0)
    place, _ = _step(inside, target, scale=False)
    return (block * _BLOCK + place).squeeze(1)


def _step(weights: torch.Tensor, target: torch.Tensor, scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Index [rows, 1] of the first weight whose running sum exceeds target, and target less the sum before it.

    scale: target is a share of the sum. Rounding may push it up to the sum or, between blocks, past it; it is held
    just below, so that the weight found is never zero.
    """
    ladder = weights.cumsum(1, dtype=torch.float64)
    total = ladder[:, -1:]
    target = torch.minimum(target * total if scale else target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(ladder, target, right=True)
    below = torch.where(index > 0, ladder.gather(1, (index - 1).clamp_min(0)), 0.0)
    return index, target - below


def _select(scores: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """A copy of some rows. On a CPU five times faster than indexing with a list."""
    return scores.index_select(0, to_device(np.array(rows), scores.device))


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature < _COLDEST or params.top_k == 1


def _peaks(scores: torch.Tensor) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Largest value of every row and the first id that has it. A row with NaN has the peak NaN."""
    if scores.device.type == "cpu":
        host = scores.numpy()  # numpy's argmax is vectorised; torch's is 14 times slower on a CPU
        ids = host.argmax(1)
        return host[np.arange(len(ids)), ids], ids
    both = torch.max(scores, 1)
    # float64 holds both exactly, so that one copy waits for the device instead of two.
    packed = torch.stack([both.values.double(), both.indices.double()]).cpu().numpy()
    return packed[0].astype(np.float32), packed[1].astype(np.int64)
