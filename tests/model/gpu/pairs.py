"""Few combinations that have every pair of values of any two parameters among them; or every triple of any three."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

TRIES = 40
"""Combinations that are drawn for each one that is chosen."""
Choice = tuple[tuple[int, int], ...]
"""Some parameters and the values they have, by number."""


def cases(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """With KERNEL_SHAPES=triples in the environment, triples."""
    strength = min(len(parameters), 3 if os.environ.get("KERNEL_SHAPES") == "triples" else 2)
    sizes = [range(len(values)) for values in parameters]
    missing = {
        tuple(zip(places, values, strict=True))
        for places in combinations(range(len(sizes)), strength)
        for values in product(*(sizes[place] for place in places))
    }
    generator = random.Random(0)
    chosen = []
    while missing:
        fixed = dict(min(missing))
        tries = [[fixed.get(n, generator.choice(size)) for n, size in enumerate(sizes)] for _ in range(TRIES)]
        best = max(tries, key=lambda indices: len(missing & _choices(indices, strength)))
        missing -= _choices(best, strength)
        chosen.append(tuple(values[index] for values, index in zip(parameters, best, strict=True)))
    return chosen


def _choices(indices: list[int], strength: int) -> set[Choice]:
    return set(combinations(enumerate(indices), strength))
