"""Dockerfile and compose file, read by hadolint and by Docker Compose's own parser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from server.settings import Settings
from tests.setup.conftest import Tool

PROFILES = ("--profile", "cpu", "--profile", "gpu", "--profile", "monitoring")


@pytest.fixture(scope="module")
def services(compose: Tool) -> dict[str, dict[str, Any]]:
    """The services as Compose understands them, every profile on."""
    shown = compose(*PROFILES, "config", "--format", "json")
    assert shown.returncode == 0, shown.stderr
    found: dict[str, dict[str, Any]] = json.loads(shown.stdout)["services"]
    return found


def seconds(text: str) -> int:
    parts = re.findall(r"(\d+)([hms])", text)
    return sum(int(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in parts)


def stage(root: Path, name: str) -> str:
    """The instructions of one stage, comments and continued lines resolved."""
    text = re.sub(r"^\s*#.*\n", "", (root / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found = re.search(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, name
    return found.group(1)


def test_hadolint_has_nothing_to_say(hadolint: Tool) -> None:
    said = hadolint("Dockerfile")
    assert said.returncode == 0, said.stdout


def test_hadolint_is_awake(hadolint: Tool) -> None:
    assert hadolint("-", text="FROM python\nRUN sudo pip install torch\n").returncode != 0


@pytest.mark.parametrize("name", ["build-cpu", "build-cuda"])
def test_images_can_send_traces(root: Path, name: str) -> None:
    """Every setting is passed on, so what each of them needs must be there."""
    assert 'pip install -c constraints.txt ".[otel]"' in stage(root, name)


@pytest.mark.parametrize("name", ["build-cpu", "build-cuda"])
def test_images_have_the_kernels(root: Path, name: str) -> None:
    """Compiled where the last stage looks for them, which has no compiler; the environment is copied there whole."""
    assert "python3 -m model.kernels.build" in stage(root, name)
    found = re.findall(r"OCTAVO_KERNEL_CACHE=(\S+)", (root / "Dockerfile").read_text())
    assert found == ["/opt/octavo/kernels"] * 2


def test_image_runs_without_root_and_stops_cleanly(root: Path) -> None:
    runtime = stage(root, "runtime")
    for line in (
        "USER 10001:0",
        "STOPSIGNAL SIGTERM",
        "EXPOSE 8000",
        'ENTRYPOINT ["octavo"]',
        'VOLUME ["/data/hf"]',
        'CMD ["serve", "--host", "0.0.0.0"]',
    ):
        assert line in runtime.splitlines()
    assert "HEALTHCHECK --start-period=" in runtime
    for target, build in (("cpu", "build-cpu"), ("cuda", "build-cuda")):
        copies = [line for line in stage(root, target).splitlines() if line.startswith("COPY")]
        assert copies == [f"COPY --from={build} /opt/octavo /opt/octavo"]


def test_healthcheck_is_python_that_compiles(root: Path) -> None:
    command = re.search(r"HEALTHCHECK .*?CMD (\[.*\])", stage(root, "runtime"))
    assert command
    program, flag, script = json.loads(command.group(1))
    assert (program, flag) == ("python3", "-c")
    compile(script, "healthcheck", "exec")
    assert "/ready" in script


def test_build_context_holds_what_the_build_copies(root: Path) -> None:
    ignore = (root / ".dockerignore").read_text().splitlines()
    assert "*" in ignore
    kept = {line[1:].rstrip("/") for line in ignore if line.startswith("!")}
    assert kept == {
        *("pyproject.toml", "constraints.txt", "README.md", "LICENSE"),
        *("server", "scheduler", "model", "kvpool", "loadtest"),
    }


@pytest.mark.parametrize(
    ("profile", "names"),
    [("cpu", {"cpu"}), ("gpu", {"gpu"}), ("monitoring", {"prometheus", "grafana"})],
)
def test_each_profile_stands_alone(compose: Tool, profile: str, names: set[str]) -> None:
    shown = compose("--profile", profile, "config", "--services")
    assert shown.returncode == 0, shown.stderr
    assert set(shown.stdout.split()) == names


def test_services_are_locked_down(services: dict[str, dict[str, Any]]) -> None:
    assert set(services) == {"cpu", "gpu", "prometheus", "grafana"}
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True, name
        assert service["init"] is True, name
        assert {port["host_ip"] for port in service["ports"]} == {"127.0.0.1"}, name


def test_servers_get_time_to_drain_and_to_load(services: dict[str, dict[str, Any]]) -> None:
    drain = Settings.model_fields["drain_timeout"].default
    for name in ("cpu", "gpu"):
        assert seconds(services[name]["stop_grace_period"]) > drain
        assert seconds(services[name]["healthcheck"]["start_period"]) >= 600
        assert services[name]["networks"]["default"]["aliases"] == ["octavo"]
    assert services["gpu"]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert {services[name]["build"]["target"] for name in ("cpu", "gpu")} == {"cpu", "cuda"}


def test_every_setting_is_passed_on(compose: Tool) -> None:
    """All but the address and the port, which the image fixes; nothing that is no setting. Unset ones stay unset."""
    names = {f"OCTAVO_{name.upper()}" for name in Settings.model_fields} - {"OCTAVO_HOST", "OCTAVO_PORT"}
    given = {name: f"value-{number}" for number, name in enumerate(sorted(names))}
    for environment, expected in ((given, given), ({}, {"OCTAVO_LOG_FORMAT": "json"})):
        shown = compose(*PROFILES, "config", "--format", "json", **environment)
        assert shown.returncode == 0, shown.stderr
        for profile in ("cpu", "gpu"):
            variables = json.loads(shown.stdout)["services"][profile]["environment"]
            passed = {name: value for name, value in variables.items() if name.startswith("OCTAVO_")}
            assert {name: value for name, value in passed.items() if value is not None} == expected


def test_mounted_files_exist(services: dict[str, dict[str, Any]]) -> None:
    bound = [v["source"] for s in services.values() for v in s.get("volumes", []) if v["type"] == "bind"]
    assert len(bound) == 4
    assert [source for source in bound if not Path(source).exists()] == []
