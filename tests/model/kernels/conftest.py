"""The kernels of every instruction set that this processor has, and those of AVX-512 in others' instructions."""

from __future__ import annotations

import pytest

from model.kernels.build import available, load
from model.kernels.loaded import Kernels

TESTED = [*available(), *(["emulated"] if "avx2" in available() else [])]


@pytest.fixture(params=TESTED, scope="session")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(load(request.param))
