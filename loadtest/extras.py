"""Libraries that only some commands need: brought in when they are used, missed in one line."""

from __future__ import annotations

import importlib
from typing import Any

EXTRA = ".[bench]"


class MissingExtra(Exception):
    """A library of the extra is not installed; one line."""


def extra(module: str) -> Any:
    """Import it. Raises MissingExtra with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(f"{module} cannot be imported ({error}); it comes with: pip install -e '{EXTRA}'") from None
