"""The fit of keys changes no score's differences, makes keys smaller and is undone by the query."""

from __future__ import annotations

import torch

from kvpool.fit import KeyFit
from kvpool.rotation import rotation


def test_scores_differ_by_what_they_differed() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 50, 16, generator=generator) * torch.linspace(0.1, 3, 16) + torch.linspace(-4, 4, 16)
    queries = torch.randn(2, 9, 16, generator=generator) * torch.linspace(5, 0.5, 16)
    fit = KeyFit(3, 2, 16)
    assert torch.equal(fit.key(1, keys.transpose(0, 1)), keys.transpose(0, 1))
    assert torch.equal(fit.query(1, queries), queries)
    for centred in (True, False):
        fit.set(1, keys, queries.square().mean(1), keys[:, :3], centred=centred)
        key, query = fit.key(1, keys.transpose(0, 1)).transpose(0, 1), fit.query(1, queries)
        moved = query @ key.transpose(1, 2) - queries @ keys.transpose(1, 2)
        torch.testing.assert_close(moved, moved[:, :, :1].expand_as(moved), rtol=1e-4, atol=1e-4)
        assert (moved.abs().max() < 1e-4) != centred
        # Noise that the rotation spreads evenly weighs as both together.
        before = keys.square().sum() * queries.square().sum()
        assert key.square().sum() * query.square().sum() < (0.2 if centred else 0.9) * before
        sink = fit.key(1, keys.transpose(0, 1))[:3].mean(0) @ rotation(16, torch.device("cpu")).T
        torch.testing.assert_close(fit.sink(1), sink, rtol=1e-4, atol=1e-4)
    assert fit.data[[0, 2], 0].eq(0).all()
    assert fit.data[[0, 2], 1:3].eq(1).all()
    assert fit.data[[0, 2], 3].eq(0).all()


def test_a_place_that_is_always_zero_breaks_nothing() -> None:
    fit = KeyFit(1, 1, 16)
    fit.set(0, torch.zeros(1, 5, 16), torch.zeros(1, 16), torch.zeros(1, 1, 16))
    assert fit.data.isfinite().all()
    keys = torch.ones(1, 5, 16)
    keys[:, ::2, :3] = 2
    fit.set(0, keys, torch.eye(16)[:1], keys[:, :1])
    assert fit.data.isfinite().all()
    assert fit.data[0, 1:3].gt(0).all()
