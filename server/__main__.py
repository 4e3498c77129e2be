"""The octavo command: serve, plan and bench."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.engine_process import EngineProcess

BAD_START, INTERRUPTED = 2, 130
HELP = frozenset({"-h", "--help"})


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0 after a clean end, 2 where it could not start, 130 after Ctrl-C.

    Everything is imported from here on, since that takes seconds in which somebody may think better of it.
    """
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(argv: list[str]) -> int:
    command, rest = argv[:1], argv[1:]
    if command == ["serve"] and HELP.isdisjoint(rest):
        from server.engine_process import EngineProcess

        # It imports for seconds; what follows, until it can be told what to load, takes a third of that.
        try:
            begun = EngineProcess()
        except OSError as error:
            return _refuse(f"no process can be made for the engine: {error.strerror}")
        with begun as engine:
            return _serve(argv, engine)
    if command == ["plan"]:
        from server.planning import PlanError, print_plan

        try:
            print_plan(rest)
        except PlanError as error:
            return _refuse(error)
        return 0
    if command == ["bench"]:
        from loadtest.__main__ import main as bench

        return bench(rest)
    _flags(argv)
    return BAD_START


def _flags(argv: list[str]) -> dict[str, object]:
    """What is given to `octavo serve`. Ends the process where anything else is asked."""
    from server.cli import Flags, add_serve_arguments
    from server.version import VERSION

    parser = Flags("octavo", description="Serve open-weight language models over the OpenAI HTTP API.")
    parser.add_argument("--version", action="version", version=f"octavo {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    add_serve_arguments(commands.add_parser("serve", help="serve a model", prog="octavo serve"))
    # All their arguments are their own, --help too.
    commands.add_parser("plan", help="say what fits into a KV cache", add_help=False)
    commands.add_parser("bench", help="measure a server, or the engine alone", add_help=False)
    flags = vars(parser.parse_args(argv))
    del flags["command"]
    return flags


def _serve(argv: list[str], engine: EngineProcess) -> int:
    import os
    from pathlib import Path

    flags = _flags(argv)
    from server.settings import ENV_PREFIX, BadSettings, load_settings, unknown_variables

    try:
        file = flags.pop("config", os.environ.get(f"{ENV_PREFIX}CONFIG"))
        settings = load_settings(flags, None if file is None else Path(str(file)))
    except BadSettings as error:
        return _refuse(error)
    from server.logs import start_logging
    from server.start import StartError, serve, warn  # a bad flag is refused without all that this brings in

    start_logging(settings.log_level, settings.log_format)
    if settings.log_requests:
        warn("--log-requests: the log will hold what clients send, their prompts included")
    for name in unknown_variables(os.environ):
        warn(f"the variable {name} is no setting of this server and does nothing")
    try:
        return serve(settings, engine)
    except StartError as error:
        return _refuse(error)


def _refuse(error: object) -> int:
    sys.stderr.write(f"octavo: {error}\n")
    return BAD_START


if __name__ == "__main__":
    sys.exit(main())
