"""Few combinations that have every pair of values of any two parameters among them; or all combinations."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def cases(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """With KERNEL_SHAPES=all in the environment, the whole product."""
    everything = list(product(*parameters))
    if os.environ.get("KERNEL_SHAPES") == "all":
        return everything
    indices = list(product(*(range(len(values)) for values in parameters)))
    missing = {pair for index in indices for pair in combinations(enumerate(index), 2)}
    chosen = []
    while missing:
        best = max(range(len(indices)), key=lambda n: len(missing & set(combinations(enumerate(indices[n]), 2))))
        missing -= set(combinations(enumerate(indices[best]), 2))
        chosen.append(everything[best])
    return chosen
