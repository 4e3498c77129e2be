"""The tiny model as a file, and exported once for all."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.export import export_folder, export_gguf
from model.source import resolve
from tests.loadtest import tiny


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_weights(tiny_gguf: Path) -> Path:
    """The folder of `octavo bench export`, with bf16.gguf in it."""
    folder = tiny_gguf.parent / "weights"
    export_folder(resolve(str(tiny_gguf)), folder)
    export_gguf(tiny_gguf, folder / "bf16.gguf", "bf16")
    return folder
