"""A tiny model put together with a tier: what start-up says, what it refuses, and that real keys come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpool.budget import BudgetError
from kvpool.disk import TierError
from model.params import SamplingParams
from scheduler.assembly import assemble
from scheduler.config import EngineConfig
from scheduler.engine import Engine
from scheduler.messages import Submit
from tests.loadtest.tiny import write
from tests.model.parity import build, prompts

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assembly")
    build("mistral", folder)
    return folder


def made(folder: Path, **options: Any) -> tuple[Engine, list[str]]:
    """The engine, and what start-up says of its tier, its window and with a warning."""
    lines: list[str] = []

    def progress(stage: str, detail: str) -> None:
        if stage in ("kv tier", "warning") or "slide" in detail:
            lines.append(f"{stage}: {detail}")

    values: dict[str, Any] = {"model": str(folder), "device": "cpu", "kv_cache_memory": MIB, "max_model_len": 400}
    return assemble(EngineConfig(**(values | options)), progress)[0], lines


@pytest.mark.parametrize(("asked", "at_once"), [(None, 1), (True, 0)])
def test_steps_overlap_where_that_is_asked_for(folder: Path, asked: bool | None, at_once: int) -> None:
    engine, lines = made(folder, async_scheduling=asked)
    assert ("--async-scheduling buys nothing on a CPU" in "".join(lines)) == (asked is True)
    params = SamplingParams(max_tokens=3, seed=0, temperature=0.0)
    assert len(engine.step([Submit(id=1, prompt_ids=[1, 2, 3], params=params)]).tokens) == at_once
    assert len(engine.step().tokens) == 1


def run(engine: Engine, prompt: list[int], id: int) -> tuple[list[int], int]:
    """Tokens of a greedy answer, and cached tokens of the prompt."""
    params = SamplingParams(max_tokens=8, seed=0, temperature=0.0)
    output = engine.step([Submit(id=id, prompt_ids=prompt, params=params)])
    (started,), tokens = output.started, output.tokens
    while engine.has_work:
        tokens += engine.step().tokens
    engine.check()
    return tokens, started.cached_tokens


@pytest.mark.parametrize("kv", ["auto", "tq4"])
def test_real_keys_come_back(folder: Path, tmp_path: Path, kv: str) -> None:
    """Behind a restart, from a model with a window and from one with fitted keys; what is drawn is what it was."""
    options = {"kv_disk": str(tmp_path / "kv"), "kv_disk_size": 4 * MIB, "kv_cache_dtype": kv}
    if kv == "tq4":
        options["model"] = str(write(tmp_path / "tiny.gguf"))
    (prompt,) = prompts(100, (70,))
    engine, lines = made(folder, **options)
    assert lines[-1].endswith("; 0 were found")
    window = "kv cache: every layer slides: a sequence keeps the blocks of its last 32 tokens"
    assert lines[:-1] == ([window] if kv == "auto" else [])
    first, cached = run(engine, prompt, 1)
    assert cached == 0
    assert engine.tiering is not None
    engine.tiering.close()

    engine, lines = made(folder, **options)
    assert lines[-1].endswith("; 4 were found")
    assert run(engine, prompt, 1) == (first, 64)
    assert engine.tiering is not None
    engine.tiering.close()


def test_layers_that_slide_give_back_unless_there_is_a_tier(tmp_path: Path) -> None:
    """Which changes no token, and finds what was asked before."""
    build("gemma2", tmp_path / "model")
    engine, lines = made(tmp_path / "model")
    assert lines == ["kv cache: 2 of 4 layers slide: a sequence keeps the blocks of its last 8 tokens in those"]
    whole, lines = made(tmp_path / "model", kv_disk=str(tmp_path / "kv"), kv_disk_size=4 * MIB)
    assert lines[0].startswith("kv cache: blocks hold all layers, for a tier's sake")
    (prompt,) = prompts(100, (70,))
    first, _ = run(whole, prompt, 1)
    assert run(engine, prompt, 1) == (first, 0)
    assert run(engine, prompt, 2) == run(whole, prompt, 2) == (first, 64)
    assert whole.tiering is not None
    whole.tiering.close()


def test_host_memory_on_a_cpu(folder: Path) -> None:
    engine, lines = made(folder, kv_host_memory=2 * MIB)
    assert engine.tiering is not None
    assert lines[1].startswith("warning: --kv-host-memory buys nothing on a CPU")
    with pytest.raises(BudgetError, match=r"^--kv-host-memory 1 KiB: a block takes"):
        made(folder, kv_host_memory=1024)
    with pytest.raises(BudgetError, match=r"^--kv-host-memory 1024 TiB is more than the"):
        made(folder, kv_host_memory=1 << 50)


@pytest.mark.parametrize("kv", ["tq4", "bfloat16"])
def test_the_gates_figures_are_told(tmp_path: Path, kv: str) -> None:
    """Those of the start-up line stand on /metrics."""
    said: list[str] = []
    config = EngineConfig(model=str(write(tmp_path / "tiny.gguf")), kv_cache_memory=MIB, kv_cache_dtype=kv)
    _, ready = assemble(config, lambda stage, detail: said.append(detail))
    found = [line for line in said if line.startswith("tq4 beside 16 bits: ")]
    if kv == "bfloat16":
        assert (ready.kv_divergence, ready.kv_agreement, found) == (None, None, [])
        return
    assert ready.kv_divergence is not None
    assert ready.kv_agreement is not None
    figures = f"KL {ready.kv_divergence:.4f} nats, greedy agreement {ready.kv_agreement:.1%}"
    assert found == [f"tq4 beside 16 bits: {figures}"]


def test_a_file_in_the_way_is_seen_before_the_model_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "thesis"
    file.write_text("chapter one")
    with pytest.raises(TierError, match="holds something else"):
        made(tmp_path / "no-model", kv_disk=str(file), kv_disk_size=MIB)
