"""In float32 our greedy tokens are those of transformers' `generate`, whatever batch, chunks and pool do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvpool.formats import FORMATS
from model.attention.reference import clean
from model.batch import Batch, Row
from model.executor import Runner
from model.inputs import InputBuilder
from model.precision import Precision
from tests.model.conftest import FAMILIES, TINY
from tests.model.parity import CPU, GREEDY, Driver, build, expected, make_runner, prompts

LENGTHS = (20, 50, 90)
"""Within, across and beyond longrope's original length of 64, with 24 tokens generated."""


@dataclass(frozen=True, slots=True)
class Case:
    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]
    runner: Runner


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family = str(request.param)
    folder = tmp_path_factory.mktemp(f"parity-{family}")
    build(family, folder)
    given = prompts(TINY["vocab_size"], LENGTHS)
    return Case(folder, given, expected(folder, given), make_runner(folder))


def test_the_reference_is_not_dull(case: Case) -> None:
    generated = [tokens[len(prompt) :] for prompt, tokens in zip(case.prompts, case.expected, strict=True)]
    assert len(set().union(*generated)) > 12


@pytest.mark.parametrize(("chunk", "number"), [(1, 1), (7, 1), (64, 0), (64, 2)])
def test_alone(case: Case, chunk: int, number: int) -> None:
    driver = Driver(case.runner)
    driver.add(case.prompts[number])
    assert driver.run(chunk) == [case.expected[number]]


@pytest.mark.parametrize("chunk", [7, 64])
def test_batched(case: Case, chunk: int) -> None:
    driver = Driver(case.runner)
    for prompt in case.prompts:
        driver.add(prompt)
    assert driver.run(chunk) == case.expected


def test_a_chunk_beside_decodes(case: Case) -> None:
    driver = Driver(case.runner)
    driver.add(case.prompts[0])
    for _ in range(5):
        driver.step(64)
    for prompt in case.prompts[1:]:
        driver.add(prompt)
    assert driver.run(7) == case.expected


def test_a_full_and_a_partial_prefix_hit(case: Case) -> None:
    driver = Driver(case.runner)
    prompt, tokens = case.prompts[2], case.expected[2]
    driver.add(prompt)
    assert driver.run(64) == [tokens]
    full = driver.add(prompt, cached=True)
    assert full.computed == 80
    assert driver.run(64) == [tokens]
    other = prompt[:70] + prompts(TINY["vocab_size"], [20], seed=1)[0]
    partial = driver.add(other, cached=True)
    assert partial.computed == 64
    mine = driver.run(64)
    driver = Driver(case.runner)
    driver.add(other)
    assert driver.run(64) == mine


def test_after_a_fork(case: Case) -> None:
    driver = Driver(case.runner)
    first = driver.add(case.prompts[0])
    for _ in range(3):
        driver.step(64)
    driver.fork(first)
    assert driver.run(64) == [case.expected[0]] * 2


def test_through_transformers_own_code(case: Case) -> None:
    runner = make_runner(case.folder, native=False)
    driver = Driver(runner)
    for prompt in case.prompts:
        driver.add(prompt)
    assert driver.run(7) == case.expected
    first = driver.add(case.prompts[0], cached=True)
    driver.step(64)
    driver.fork(first)
    assert driver.run(64) == [case.expected[0]] * 2


@pytest.mark.parametrize(
    ("weights", "compute", "kv"),
    [
        (torch.float32, torch.float32, "bfloat16"),
        (torch.bfloat16, torch.float32, "bfloat16"),
        (torch.float16, torch.float32, "float32"),
        (torch.float32, torch.float32, "int8"),
    ],
)
def test_fewer_bits_stay_close(case: Case, weights: torch.dtype, compute: torch.dtype, kv: str) -> None:
    """The last logits of a prompt, against those in float32."""
    narrow = make_runner(case.folder, precision=Precision(weights, compute, FORMATS[kv]))
    exact, rounded = (last_logits(runner, case.prompts[0]) for runner in (case.runner, narrow))
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=0) > 0.97
    assert not torch.equal(exact, rounded)


def last_logits(runner: Runner, prompt: list[int]) -> torch.Tensor:
    row = Row(prompt, len(prompt), 0, len(prompt), list(range(1, 10)), GREEDY)
    inputs = InputBuilder(len(prompt), 16, CPU).build(Batch([row]))
    with torch.inference_mode():
        clean(runner.storage, inputs.opened)
        return runner.model.logits(runner.model.forward(inputs, runner.storage)[-1:])[0]
