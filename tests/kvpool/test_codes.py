"""Codes of 8 and 4 bits against what they promise: known values, errors, scales; and the rotation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpool.codes import LEVELS, SPREAD, Codec
from kvpool.rotation import rotation

CPU = torch.device("cpu")
DIMS = (16, 64, 80, 96, 128, 256, 320)
BYTES, KEYS, VALUES = Codec(8, False), Codec(4, True), Codec(4, False)


def gaussian(rows: int, dim: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))


def turned(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """x as it lies in the pool, before it is rounded."""
    return x @ rotation(x.shape[-1], CPU).T if codec.rotated else x


def read(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    return codec.decode(*codec.encode(x))


def test_known_bytes() -> None:
    codes, scale = BYTES.encode(torch.tensor([[254.0, -254.0, 1.0, 3.0, -5.0, 0.0, 2.0, 100.0]]))
    assert scale.tolist() == [2.0]
    # Half a step goes to the even neighbour.
    assert codes.view(torch.int8).tolist() == [[127, -127, 0, 2, -2, 0, 1, 50]]


@given(st.lists(st.floats(-3e4, 3e4, width=32), min_size=8, max_size=8))
def test_bytes_are_off_by_half_a_step_at_most(values: list[float]) -> None:
    x = torch.tensor(values)
    codes, scale = BYTES.encode(x)
    # Where the scale was rounded down, the largest value is cut to 127 of it; subnormal scales are coarse.
    step = float(x.abs().max()) / 127
    assert abs(float(scale) - step) <= max(step * 2**-11, 2**-25)
    slack = 127 * abs(float(scale) - step)
    assert float((BYTES.decode(codes, scale) - x).abs().max()) <= float(scale) / 2 + slack + 1e-4 * step


@pytest.mark.parametrize("dim", DIMS)
def test_the_rotation_is_orthogonal_and_spreads(dim: int) -> None:
    r = rotation(dim, CPU)
    assert r.shape == (dim, dim)
    torch.testing.assert_close(r @ r.T, torch.eye(dim), rtol=0, atol=1e-5)
    size = dim & -dim
    assert float(r.abs().max()) == pytest.approx(size**-0.5)
    assert int(r[0].ne(0).sum()) == size
    # Neither one large value nor a mean stays one value.
    for x in (torch.eye(dim)[3], torch.ones(dim)):
        assert float((r @ x).abs().max()) < 0.75 * float(x.norm())


def test_the_signs_are_those_of_pi() -> None:
    assert rotation(16, CPU).mul(4).sign()[0].tolist() == [1 - 2 * int(bit) for bit in f"{0x243F:016b}"]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("codec", [KEYS, VALUES])
def test_the_error_of_four_bits(codec: Codec, dim: int) -> None:
    """That of sixteen free levels is 0.0095 for a Gaussian, a little less for a vector of known length."""
    x = gaussian(20_000, dim)
    error = (read(codec, x) - turned(codec, x)).square().sum(-1) / x.square().sum(-1)
    assert 0.0088 < float(error.mean()) < 0.0096


def test_the_levels_are_those_of_lloyd_and_max() -> None:
    """Each is the mean of what is nearest to it, within what a whole number can be."""
    x = gaussian(1, 4_000_000)[0].abs() * SPREAD
    levels = torch.tensor(LEVELS, dtype=torch.float32)
    nearest = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
    for index, level in enumerate(LEVELS):
        assert abs(float(x[nearest == index].mean()) - level) < 0.75


@pytest.mark.parametrize("dim", DIMS)
def test_a_keys_scale_is_unbiased_and_a_values_the_best(dim: int) -> None:
    x = gaussian(200, dim)
    ratio = (read(KEYS, x) * turned(KEYS, x)).sum(-1) / x.square().sum(-1)
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=2e-3)
    best = read(VALUES, x)
    for factor in (0.99, 1.01):
        worse = (best * factor - turned(VALUES, x)).square().sum(-1)
        assert (worse > (best - turned(VALUES, x)).square().sum(-1)).all()


@pytest.mark.parametrize("codec", [BYTES, KEYS, VALUES])
def test_a_vector_depends_on_itself_alone(codec: Codec) -> None:
    x = gaussian(12, 64).view(3, 4, 64)
    codes, scales = codec.encode(x)
    assert codes.shape == (3, 4, codec.code_bytes(64))
    assert (codes.dtype, scales.dtype, scales.shape) == (torch.uint8, torch.float16, (3, 4))
    factors = torch.tensor([1.0, 64.0, 0.125]).unsqueeze(1)
    same, scaled = codec.encode(x * factors.unsqueeze(2))
    assert torch.equal(same, codes)
    torch.testing.assert_close(scaled.float(), scales.float() * factors)


@pytest.mark.parametrize("codec", [BYTES, KEYS, VALUES])
def test_zeros_and_broken_numbers(codec: Codec) -> None:
    x = gaussian(5, 64)
    x[0] = 0
    x[1] *= 1e-30
    x[2, 5], x[3, 5] = torch.nan, -torch.inf
    x[4] *= 1e12
    found = read(codec, x)
    assert found[:2].eq(0).all()
    assert found[2:4].isnan().all()
    assert found[4].isfinite().all()


@pytest.mark.parametrize("codec", [KEYS, Codec(8, True)])
def test_keys_beside_the_sink(codec: Codec) -> None:
    """One near it keeps what it has beside it, with that one's small error; others are as they were; one that equals
    it is told from one that is zero."""
    sink = 20 * gaussian(1, 64, seed=1)[0]
    x = torch.cat([sink + gaussian(50, 64), gaussian(50, 64, seed=2), sink[None], torch.zeros(1, 64)])
    sink = turned(codec, sink)
    codes, scales = codec.encode(x, sink)
    assert (scales < 0).tolist() == [True] * 50 + [False] * 50 + [True, False]
    errors = (codec.decode(codes, scales, sink) - turned(codec, x)).norm(dim=-1)
    assert float(errors[:50].max()) < 0.2 * 64**0.5
    assert float(errors[100:].max()) < 1e-4
    assert torch.equal(codec.decode(codes, scales, sink)[50:100], read(codec, x[50:100]))
