"""The stateless uniforms: known outputs, uniformity, independence."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from model.uniform import _output, uniforms


def chi_square(numbers: NDArray[np.float64], cells: int) -> float:
    counts = np.bincount((numbers * cells).astype(np.int64), minlength=cells)
    expected = numbers.size / cells
    return float(((counts - expected) ** 2 / expected).sum())


def test_generator_is_splitmix64() -> None:
    """First outputs of the stream of seed 1234567, as published with the algorithm's reference implementations."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    outputs = _output(np.full(5, 1234567, dtype=np.uint64), np.arange(5, dtype=np.uint64))
    assert outputs.tolist() == known


def test_pure_function_of_its_row() -> None:
    seeds, indices, positions = [7, -1, 2**64 + 7, 7], [0, 0, 0, 1], [5, 5, 5, 5]
    batch = uniforms(seeds, indices, positions)
    alone = [uniforms([s], [i], [p])[0] for s, i, p in zip(seeds, indices, positions, strict=True)]
    assert batch.tolist() == alone
    assert batch[0] == batch[2], "seeds count modulo 2**64"
    assert len({batch[0], batch[1], batch[3]}) == 3


@pytest.mark.parametrize("axis", ["seed", "index", "position"])
def test_uniform_along_each_axis(axis: str) -> None:
    """Neighbouring seeds, indices and positions all give uniform, uncorrelated numbers."""
    count, cells = 200_000, 256
    steps, zeros = list(range(count)), [0] * count
    numbers = uniforms(*(steps if name == axis else zeros for name in ("seed", "index", "position")))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    # 255 degrees of freedom: mean 255, deviation 22.6. Six deviations either way.
    assert 119 < chi_square(numbers, cells) < 391
    pairs = (numbers[:-1] * 16).astype(np.int64) * 16 + (numbers[1:] * 16).astype(np.int64)
    assert 119 < chi_square((pairs[::2] + 0.5) / cells, cells) < 391
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 6 / count**0.5


def test_streams_of_neighbours_are_unrelated() -> None:
    """Position p + 1 of one stream is not position p of another, as it would be without hashed starts."""
    count = 1000
    grid = [(s, i, p) for s in range(10) for i in range(10) for p in range(count // 10)]
    numbers = uniforms(*(list(column) for column in zip(*grid, strict=True)))
    assert np.unique(numbers).size == len(grid)
