"""The fit of keys changes no score's differences, makes the noise of codes weigh less, and survives odd keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpool.codes import Codec
from kvpool.fit import KeyFit
from kvpool.rotation import rotation

HEADS, KEYS, QUERIES, DIM = 2, 600, 400, 16


def heads() -> tuple[Tensor, Tensor]:
    """Keys [HEADS, KEYS, DIM] and queries, whose places have much in common and large means."""
    generator = torch.Generator().manual_seed(0)

    def vectors(count: int, low: float, high: float) -> Tensor:
        mixed = torch.eye(DIM) + 0.5 * torch.randn(HEADS, DIM, DIM, generator=generator)
        return torch.randn(HEADS, count, DIM, generator=generator) * torch.linspace(low, high, DIM) @ mixed

    return vectors(KEYS, 0.1, 3) + torch.linspace(-4, 4, DIM), vectors(QUERIES, 5, 0.5)


def fitted(fit: KeyFit, keys: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    return fit.key(1, keys.transpose(0, 1)).transpose(0, 1), fit.query(1, queries)


def error(fit: KeyFit, keys: Tensor, queries: Tensor, bits: int) -> float:
    """Mean square by which codes change scores."""
    key, query = fitted(fit, keys, queries)
    codec = Codec(bits, unbiased=True)
    return float((query @ (codec.decode(*codec.encode(key)) - key).mT).square().mean())


def test_until_it_is_set_it_is_the_rotation() -> None:
    keys, queries = heads()
    turn = rotation(DIM, torch.device("cpu")).T
    for found, given in zip(fitted(KeyFit(3, HEADS, DIM), keys, queries), (keys, queries), strict=True):
        torch.testing.assert_close(found, given @ turn)


@pytest.mark.parametrize("centred", [True, False])
def test_scores_differ_by_what_they_differed(centred: bool) -> None:
    keys, queries = heads()
    fit = KeyFit(3, HEADS, DIM)
    before = fit.data.clone()
    fit.set(1, keys, queries.mT @ queries / QUERIES, centred=centred)
    key, query = fitted(fit, keys, queries)
    scores = queries @ keys.mT
    moved = query @ key.mT - scores
    torch.testing.assert_close(moved, moved[:, :, :1].expand_as(moved), rtol=0, atol=1e-4 * float(scores.abs().max()))
    assert (moved.abs().max() < 1e-4 * scores.abs().max()) != centred
    assert torch.equal(fit.data[[0, 2]], before[[0, 2]])
    assert torch.equal(fit.layer(1)[0], fit.data[1])


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_change_scores_less(bits: int) -> None:
    keys, queries = heads()
    plain, fit, off = (KeyFit(3, HEADS, DIM) for _ in range(3))
    moments = queries.mT @ queries / QUERIES
    fit.set(1, keys, moments)
    off.set(1, keys, moments, centred=False)
    assert error(fit, keys, queries, bits) < 0.2 * error(plain, keys, queries, bits)
    assert error(fit, keys, queries, bits) < error(off, keys, queries, bits) < error(plain, keys, queries, bits)


def test_keys_and_queries_spread_alike() -> None:
    keys, queries = heads()
    fit = KeyFit(3, HEADS, DIM)
    fit.set(1, keys, queries.mT @ queries / QUERIES)
    key, query = fitted(fit, keys, queries)
    ours, theirs = (x.mT @ x / x.square().sum((1, 2), keepdim=True) for x in (key, query))
    assert float((ours - theirs).norm() / ours.norm()) < 0.3


def test_places_that_are_always_zero_or_never_differ_break_nothing() -> None:
    fit = KeyFit(1, 1, DIM)
    same = torch.ones(1, 5, DIM)
    few = same.clone()
    few[:, ::2, :3] = 2
    for keys, moments in (
        (torch.zeros(1, 5, DIM), torch.zeros(1, DIM, DIM)),
        (same, torch.ones(1, DIM, DIM)),
        (few, torch.eye(DIM)[:1, None] * torch.eye(DIM)[0, :, None]),
    ):
        fit.set(0, keys, moments)
        assert fit.data.isfinite().all()
        _, turned, back = fit.data[0, 0].split([1, DIM, DIM])
        torch.testing.assert_close(back @ turned.T, torch.eye(DIM), rtol=0, atol=1e-2)
