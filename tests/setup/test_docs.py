"""README and docs: what they say of flags, targets and files is so."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest

from loadtest.compare import make_parser as make_compare_parser
from loadtest.growth import make_parser as make_growth_parser
from loadtest.kv import make_parser as make_kv_parser
from loadtest.options import check, make_parser
from loadtest.perplexity import make_parser as make_perplexity_parser
from loadtest.sharing import make_parser as make_sharing_parser
from loadtest.turns import make_parser as make_turns_parser
from server.cli import add_serve_arguments
from server.planning import plan_parser
from server.settings import Settings, load_settings

DOCUMENTS = (
    *("README.md", "docs/api.md", "docs/design.md", "docs/operations.md", "docs/performance.md"),
    *("docs/security.md", "docs/tools.md"),
)


def table_row(readme: str, first: str) -> list[str]:
    rows = [line.split("|")[1:-1] for line in readme.splitlines() if line.startswith(f"| `{first}` |")]
    assert len(rows) == 1, f"{first}: {len(rows)} rows"
    return [cell.strip() for cell in rows[0]]


@pytest.mark.parametrize("name", sorted(set(Settings.model_fields) - {"model"}))
def test_readme_knows_every_flag_and_its_default(root: Path, name: str) -> None:
    field = Settings.model_fields[name]
    _, description, default = table_row((root / "README.md").read_text(), "--" + name.replace("_", "-"))
    assert description == field.description
    value = {True: "on", False: "off"}.get(field.default) if field.annotation is bool else field.default
    silent = field.default_factory is not None or value is None
    assert default == ("" if silent else f"`{value}`")


def test_readme_names_no_flag_that_is_gone(root: Path) -> None:
    rows = re.findall(r"^\| `--([\w-]+)` \|", (root / "README.md").read_text(), re.MULTILINE)
    assert {row.replace("-", "_") for row in rows} == set(Settings.model_fields) - {"model"}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_named_files_exist(root: Path, name: str) -> None:
    text = (root / name).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (root / name).parent.joinpath(target).exists(), target
    for path in re.findall(r"`((?:server|scheduler|model|kvpool|loadtest|tests|docs)/[\w./-]*)`", text):
        assert (root / path).exists() or (root / f"{path}.py").exists(), path


@pytest.mark.parametrize("name", DOCUMENTS)
def test_make_targets_exist(root: Path, name: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (root / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", (root / name).read_text(), re.MULTILINE)) <= targets


def test_bodies_of_curl_examples_are_json(root: Path) -> None:
    bodies = re.findall(r"-d '(\{.*?\})'", (root / "README.md").read_text(), re.DOTALL)
    assert len(bodies) == 2
    for body in bodies:
        assert {"messages", "prompt"} & json.loads(body).keys()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_are_understood(root: Path, name: str) -> None:
    """The flags of every `octavo serve`, `plan` and `bench` of the documents, and of `make serve` and `make bench`."""
    blocks = re.findall(r"```sh\n(.*?)```", (root / name).read_text(), re.DOTALL)
    text = "\n".join(blocks).replace("\\\n", " ")
    commands = re.findall(r'^(?:make |\S*octavo )(serve|plan|bench)(?: ARGS="(.*?)"| ([^#\n]*)|$)', text, re.MULTILINE)
    assert commands or not blocks
    for command, quoted, plain in commands:
        words = shlex.split(quoted or plain)
        if command == "serve":
            parser = argparse.ArgumentParser(exit_on_error=False)
            add_serve_arguments(parser)
            load_settings(vars(parser.parse_args(words)))
        elif command == "plan":
            plan_parser().parse_args(words)
        elif words[:1] == ["compare"]:
            make_compare_parser().parse_args(words[1:])
        elif words[:1] == ["perplexity"]:
            make_perplexity_parser().parse_args(words[1:])
        elif words[:1] == ["kv"]:
            make_kv_parser().parse_args(words[1:])
        elif words[:1] == ["turns"]:
            make_turns_parser().parse_args(words[1:])
        elif words[:1] == ["growth"]:
            make_growth_parser().parse_args(words[1:])
        elif words[:1] == ["sharing"]:
            make_sharing_parser().parse_args(words[1:])
        else:
            bench = make_parser()
            check(bench, bench.parse_args(words))
