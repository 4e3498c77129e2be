"""The kernels, once they are loaded: what torch calls their classes and operators."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from model.kernels.build import BuildError, load, namespace

log = logging.getLogger("octavo.kernels")


@dataclass(frozen=True, slots=True)
class Kernels:
    """Handle of one instruction set's kernels. Signatures: the foot of library.cpp."""

    isa: str

    @property
    def classes(self) -> Any:
        return getattr(torch.classes, namespace(self.isa))

    @property
    def ops(self) -> Any:
        return getattr(torch.ops, namespace(self.isa))


def load_kernels(progress: Callable[[str], None] = lambda detail: None) -> Kernels | None:
    """The kernels for this processor; None, with one warning, where they cannot be built."""
    try:
        return Kernels(load(progress=progress))
    except BuildError as error:
        log.warning("no compiled kernels, plain torch instead, which is several times slower: %s", error)
        return None
