"""A rank that is not the first: `python -m scheduler.follower --fd N --parent PID`, a child of the engine's process.

It loads its part of the model and then makes every step that its leader makes. It reads nothing but the leader's orders
and tells nobody anything else; when the leader ends, however that may be, the kernel ends it too.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
import time

PR_SET_PDEATHSIG = 1
EXIT_FAILED, EXIT_USER_ERROR = 1, 2
GRACE_SECONDS = 10.0
"""What fails here fails on the leader too as a rule, which then ends this process and says why in its own words."""


def die_with(parent: int) -> None:
    """From now on this process is killed when its parent ends; at once where that has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_FAILED)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scheduler.follower", description="A rank; the engine's process starts it.")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket")
    parser.add_argument("--parent", type=int, required=True, help="process to end with")
    arguments = parser.parse_args()
    die_with(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to decide on
    # Seconds of imports: only now, for the parent may have died meanwhile.
    from scheduler.assembly import assemble
    from scheduler.link import Link, Setup
    from scheduler.messages import STACKS
    from scheduler.ranks import Follower, lost
    from scheduler.worker import USER_ERRORS

    faulthandler.enable()
    faulthandler.register(STACKS)
    link = Link(socket.socket(fileno=arguments.fd), lost)
    setup = link.receive(Setup)
    logging.basicConfig(level=logging.WARNING, format=f"rank {setup.rank}: %(levelname)s %(name)s: %(message)s")
    log = logging.getLogger(__name__)
    try:
        follower = Follower(link, setup)
        engine, _ = assemble(setup.config, lambda stage, detail: None, follower)
        follower.serve(engine)
    except USER_ERRORS as error:
        time.sleep(GRACE_SECONDS)
        log.error("%s", error)
        return EXIT_USER_ERROR
    except Exception:
        log.exception("the rank failed")
        time.sleep(GRACE_SECONDS)
        return EXIT_FAILED


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
