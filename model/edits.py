"""What a request changes in its logits before it draws: penalties, then bias, then masks.

Everything is computed from the row's own tokens, so no state is kept between steps. Ids are gathered on the host for
all rows and applied with one indexed write per kind, on whatever device the logits are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from model.batch import Row
from model.grammar import Mask
from model.kernels.loaded import Kernels


def is_edited(row: Row) -> bool:
    """Whether `edit` would change the row's logits."""
    params = row.params
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or params.bad_words
        or params.allowed_token_ids is not None
        or (params.stop_token_ids and row.length - row.prompt_len < params.min_tokens)
    )


def edit(scores: torch.Tensor, rows: Sequence[Row]) -> None:
    """Apply every row's penalties, bias and masks to `scores` (float32 [len(rows), vocab], contiguous) in place.

    A masked token is -inf, whatever its bias: masks come last. A row may end up with no token at all.
    """
    repetition, counted, bias, banned = (_Writes(scores) for _ in range(4))
    for number, row in enumerate(rows):
        params = row.params
        if params.repetition_penalty != 1.0:
            repetition.add(number, row.tokens, params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            seen, uses = np.unique(np.array(row.tokens[row.prompt_len :], dtype=np.int64), return_counts=True)
            counted.add(number, seen, params.presence_penalty + params.frequency_penalty * uses)
        if params.logit_bias:
            bias.add(number, list(params.logit_bias), list(params.logit_bias.values()))
        if ids := _banned(row):
            banned.add(number, ids, -np.inf)

    # Prompts repeat tokens; all copies are read before any is written, so each is penalised once.
    at, factor = repetition.collect()
    before = repetition.flat[at]
    repetition.flat[at] = torch.where(before > 0, before / factor, before * factor)
    at, value = counted.collect()
    counted.flat[at] -= value
    at, value = bias.collect()
    bias.flat[at] += value
    for number, row in enumerate(rows):
        if row.params.allowed_token_ids is not None:
            _keep_only(scores[number], row.params.allowed_token_ids)
    at, value = banned.collect()
    banned.flat[at] = value


def constrain(scores: torch.Tensor, masks: Mapping[int, Mask], kernels: Kernels | None = None) -> None:
    """Mask, in place, all tokens of a row but those whose bit is set. masks: by number of the row."""
    rows, bits = list(masks), torch.from_numpy(np.stack(list(masks.values())))
    if kernels is not None:
        kernels.ops.constrain(scores, torch.tensor(rows), bits)
        return
    # Eight tokens at a time: what a byte of a mask adds to their scores.
    table = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], 1, bitorder="little"), 0.0, -np.inf)
    added = torch.from_numpy(table.astype(np.float32)).to(scores.device)[bits.to(scores.device).int()]
    vocab = scores.shape[1]
    for row, line in zip(rows, added.flatten(1), strict=True):
        scores[row].add_(line[:vocab])


def _banned(row: Row) -> list[int]:
    """Tokens that would complete a bad word, and the stop tokens while too few tokens are generated."""
    params, tokens = row.params, row.tokens
    ids = list(params.stop_token_ids) if row.length - row.prompt_len < params.min_tokens else []
    for word in params.bad_words:
        before = len(word) - 1
        # The beginning of a word may stand at the end of the prompt: what counts is that the text would contain it.
        if before == 0 or (0 < before <= len(tokens) and tokens[-before:] == list(word[:-1])):
            ids.append(word[-1])
    return ids


def _keep_only(scores: torch.Tensor, allowed: Sequence[int]) -> None:
    """Mask all of one row but the allowed ids."""
    keep = _Writes(scores.unsqueeze(0))
    keep.add(0, allowed, 0.0)
    ids, _ = keep.collect()
    kept = scores[ids]
    scores.fill_(-torch.inf)
    scores[ids] = kept


class _Writes:
    """Positions in the flat scores, and a value for each, of all rows for one kind of edit."""

    def __init__(self, scores: torch.Tensor) -> None:
        self.flat = scores.view(-1)
        self._vocab = scores.shape[1]
        self._at: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
        self._values: list[NDArray[np.float32]] = [np.empty(0, np.float32)]

    def add(self, number: int, ids: ArrayLike, value: ArrayLike) -> None:
        """value: one for all ids, or one for each."""
        at = np.asarray(ids, dtype=np.int64)
        values = np.full(at.shape, value, dtype=np.float32)
        # The front end refuses foreign ids; one that got through must not take its batch mates with it.
        inside = (at >= 0) & (at < self._vocab)
        self._at.append(at[inside] + number * self._vocab)
        self._values.append(values[inside])

    def collect(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions int64 [n] and values float32 [n], on the scores' device."""
        device = self.flat.device
        at, values = np.concatenate(self._at), np.concatenate(self._values)
        return torch.from_numpy(at).to(device), torch.from_numpy(values).to(device)
