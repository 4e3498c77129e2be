"""The kernels of every instruction set that this processor has."""

from __future__ import annotations

import pytest

from model.kernels.build import available, load
from model.kernels.loaded import Kernels


@pytest.fixture(params=available(), scope="session")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(load(request.param))
