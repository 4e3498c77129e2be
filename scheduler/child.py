"""How a child process finds our packages, wherever this one was begun."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGES = Path(__file__).resolve().parent.parent


def python_path() -> str:
    """Its PYTHONPATH: ours in front of what is there."""
    return os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
