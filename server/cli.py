"""The command line of `octavo serve`, made of Settings: one flag per field, grouped, with default and unit."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo

from server.settings import ENV_PREFIX, Settings

DESCRIPTION = """Serve a language model over the OpenAI HTTP API."""
EPILOG = f"""Each flag is also a variable ({ENV_PREFIX}MAX_MODEL_LEN for --max-model-len) and a key of the --config file
(max-model-len or max_model_len). A flag wins over a variable, a variable over the file."""


class Flags(argparse.ArgumentParser):
    """Says what is wrong in one line. A part of a flag's name is no flag: --prot would be --protect-metrics."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Only what is given on the command line ends up in the namespace, so that other sources keep their say."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.argument_default = argparse.SUPPRESS
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in Settings.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        title = str(extra["group"])
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        if name == "model":
            group.add_argument("model", nargs="?", metavar="MODEL", help=field.description)
            continue
        group.add_argument("--" + name.replace("_", "-"), help=_help(field), **_kind(field, extra["metavar"]))
    groups["Server"].add_argument("--config", type=Path, metavar="FILE", help="settings as .yaml, .toml or .json")


def _help(field: FieldInfo) -> str:
    if field.default_factory is not None or field.default is None:
        return str(field.description)
    shown = {True: "on", False: "off"}.get(field.default, field.default) if field.annotation is bool else field.default
    return f"{field.description} (default: {shown})"


def _kind(field: FieldInfo, metavar: object) -> dict[str, Any]:
    """How argparse reads it. Values stay strings: Settings converts and judges them."""
    if bool in (field.annotation, *get_args(field.annotation)):
        return {"action": argparse.BooleanOptionalAction}
    if field.default_factory is not None:
        return {"action": "append", "metavar": metavar}
    # A Literal, or one of the parts of Literal | None.
    choices = [kind for kind in (field.annotation, *get_args(field.annotation)) if get_origin(kind) is Literal]
    if choices and metavar is None:
        return {"metavar": "{" + ",".join(get_args(choices[0])) + "}"}
    return {"metavar": metavar}
