"""What every test process needs."""

import os
import signal

# Who runs the tests in the background ignores Ctrl-C, and a child inherits that: servers under test would be deaf.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Kernels for a GPU run in numpy here. Read when triton is imported, which torch or transformers may do first.
os.environ["TRITON_INTERPRET"] = "1"
