"""The version of this program."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _installed() -> str:
    try:
        return version("octavo")
    except PackageNotFoundError:
        return "0+uninstalled"


VERSION = _installed()
