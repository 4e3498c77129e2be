"""Few combinations that have every pair of values of any two parameters among them; or all combinations."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

TRIES = 40
"""Combinations that are drawn for each one that is chosen."""


def cases(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """With KERNEL_SHAPES=all in the environment, the whole product."""
    if os.environ.get("KERNEL_SHAPES") == "all":
        return list(product(*parameters))
    sizes = [range(len(values)) for values in parameters]
    missing = {pair for a, b in combinations(range(len(sizes)), 2) for pair in product(_at(a, sizes), _at(b, sizes))}
    generator = random.Random(0)
    chosen = []
    while missing:
        fixed = dict(min(missing))
        tries = [[fixed.get(n, generator.choice(size)) for n, size in enumerate(sizes)] for _ in range(TRIES)]
        best = max(tries, key=lambda indices: len(missing & _pairs(indices)))
        missing -= _pairs(best)
        chosen.append(tuple(values[index] for values, index in zip(parameters, best, strict=True)))
    return chosen


def _at(place: int, sizes: list[range]) -> list[tuple[int, int]]:
    return [(place, index) for index in sizes[place]]


def _pairs(indices: list[int]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(combinations(enumerate(indices), 2))
