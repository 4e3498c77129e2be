"""The octavo command, with `worker.py` as its engine."""

from __future__ import annotations

import sys

from server import engine_process
from server.__main__ import main

if __name__ == "__main__":
    engine_process.WORKER = (sys.executable, "-P", "-m", "tests.faults.worker")
    sys.exit(main())
