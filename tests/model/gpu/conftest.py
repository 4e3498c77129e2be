"""Kernels for a GPU run in Triton's interpreter here, in numpy: slow, so shapes are small.

Without triton (`pip install --no-deps triton`, 1 GB) its tests are skipped. `make triton` tries every combination
of what `make test` tries in pairs, and compiles the kernels for GPUs that are elsewhere.
"""

from __future__ import annotations

import os

# Read when triton decorates a function, so before any module with kernels is imported.
os.environ["TRITON_INTERPRET"] = "1"
