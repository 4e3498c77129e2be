"""What every test process needs."""

import signal

# Who runs the tests in the background ignores Ctrl-C, and a child inherits that: servers under test would be deaf.
signal.signal(signal.SIGINT, signal.default_int_handler)
