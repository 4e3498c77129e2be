"""The octavo command: serve and bench."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from server.cli import add_serve_arguments
from server.settings import ENV_PREFIX, BadSettings, load_settings
from server.version import VERSION

BAD_START = 2


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0 after a clean end, 2 where it could not start."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        "octavo", description="Serve open-weight language models over the OpenAI HTTP API."
    )
    parser.add_argument("--version", action="version", version=f"octavo {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    add_serve_arguments(commands.add_parser("serve", help="serve a model", prog="octavo serve"))
    commands.add_parser("bench", help="measure a server, or the engine alone", add_help=False)
    if argv[:1] == ["bench"]:
        # All its arguments are its own, --help too.
        from loadtest.__main__ import main as bench

        return bench(argv[1:])
    flags = vars(parser.parse_args(argv))
    del flags["command"]
    return _serve(flags)


def _serve(flags: dict[str, object]) -> int:
    try:
        file = flags.pop("config", os.environ.get(f"{ENV_PREFIX}CONFIG"))
        settings = load_settings(flags, None if file is None else Path(str(file)))
    except BadSettings as error:
        return _refuse(error)
    from server.daemon import StartError, serve  # a bad flag is refused without all that this brings in
    from server.logs import start_logging

    start_logging(settings.log_level, settings.log_format)
    try:
        return serve(settings)
    except StartError as error:
        return _refuse(error)
    except KeyboardInterrupt:
        return 130


def _refuse(error: Exception) -> int:
    sys.stderr.write(f"octavo: {error}\n")
    return BAD_START


if __name__ == "__main__":
    sys.exit(main())
