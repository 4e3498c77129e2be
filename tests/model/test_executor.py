"""The runner's contract: what a step returns, and that one row's trouble stays its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.formats import FORMATS
from model.batch import BAD_LOGITS, NO_TOKEN, Batch, Row
from model.executor import PROMPT_ROWS, Runner
from model.params import Logprob, SamplingParams
from tests.model.conftest import TINY
from tests.model.parity import EXACT, GREEDY, build, make_runner, prompts

VOCAB = TINY["vocab_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("executor")
    build("llama", folder)
    return folder


@pytest.fixture
def runner(folder: Path) -> Runner:
    return make_runner(folder)


def row(tokens: list[int], start: int, count: int, first_block: int, **changes: Any) -> Row:
    blocks = list(range(first_block, first_block + -(-len(tokens) // 16)))
    values: dict[str, Any] = {"prompt_len": len(tokens), "params": GREEDY} | changes
    return Row(tokens=tokens, start=start, count=count, blocks=blocks, **values)


def one(runner: Runner, *rows: Row) -> list[int]:
    """The token that each row draws, or NO_TOKEN."""
    return [drawn[0] if drawn else NO_TOKEN for drawn in runner.execute(Batch(list(rows))).result().tokens]


def asking(**changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, seed=0, temperature=0.0, **changes)


def test_an_empty_batch(runner: Runner) -> None:
    result = runner.execute(Batch([])).result()
    assert (result.tokens, result.logprobs, result.prompt_logprobs) == ([], [], [])


def test_a_chunk_draws_only_at_its_end(runner: Runner) -> None:
    (prompt,) = prompts(VOCAB, [40])
    assert one(runner, row(prompt, 0, 30, 1)) == [NO_TOKEN]
    assert one(runner, row(prompt, 30, 10, 1, samples=False)) == [NO_TOKEN]
    assert one(runner, row(prompt, 30, 10, 1))[0] >= 0


def test_a_result_may_be_asked_for_twice(runner: Runner) -> None:
    (prompt,) = prompts(VOCAB, [10])
    pending = runner.execute(Batch([row(prompt, 0, 10, 1)]))
    assert pending.result() is pending.result()


def test_copies_are_made_before_the_step(runner: Runner) -> None:
    (prompt,) = prompts(VOCAB, [10])
    expected = one(runner, row(prompt, 0, 10, 1))
    copied = row(prompt, 9, 1, 7)
    runner.storage.data[:, :, 7] = torch.nan
    assert runner.execute(Batch([copied], copies=[(1, 7)])).result().tokens == [expected]


@pytest.mark.parametrize("kv", ["int8", "k8v4", "tq4"])
def test_blocks_of_codes_are_copied_whole(folder: Path, kv: str) -> None:
    (prompt,) = prompts(VOCAB, [10])
    runner = make_runner(folder, precision=replace(EXACT, kv=FORMATS[kv]))
    expected = one(runner, row(prompt, 0, 10, 1))
    copied = row(prompt, 9, 1, 7)
    assert runner.execute(Batch([copied], copies=[(1, 7)])).result().tokens == [expected]
    for plane in (runner.storage.keys, runner.storage.values):
        assert torch.equal(plane.tiles[:, 7], plane.tiles[:, 1])


def test_a_step_larger_than_the_runner_is_refused(folder: Path) -> None:
    (prompt,) = prompts(VOCAB, [33])
    with pytest.raises(ValueError, match="larger than the 32 of the runner"):
        one(make_runner(folder, max_tokens=32), row(prompt, 0, 33, 1))


def test_broken_numbers_of_one_row_do_not_reach_its_neighbours(runner: Runner) -> None:
    good, bad = prompts(VOCAB, [40, 40])
    expected = one(runner, row(good, 0, 40, 1))
    one(runner, row(bad, 0, 30, 11))
    runner.storage.data[:, :, 11] = torch.nan
    assert one(runner, row(bad, 30, 10, 11), row(good, 39, 1, 1)) == [BAD_LOGITS, *expected]
    # The blocks it leaves behind are given to somebody else, who fills less of them.
    runner.storage.data[:, :, 11:14] = torch.nan
    assert one(runner, row(good, 0, 40, 11)) == expected


def test_seeded_draws_do_not_depend_on_the_batch(runner: Runner) -> None:
    first, second = prompts(VOCAB, [20, 31])
    params = SamplingParams(max_tokens=5, seed=7, temperature=1.5)
    alone = one(runner, row(first, 0, 20, 1, params=params))
    together = one(runner, row(second, 0, 31, 5, params=params), row(first, 0, 20, 1, params=params))
    assert together[1:] == alone


def test_rows_that_ask_for_the_likeliest_token_alone_need_no_logits(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = prompts(VOCAB, [20, 31])
    expected = one(runner, row(first, 0, 20, 1), row(second, 0, 31, 5))
    last = row([*first, expected[0]], 20, 1, 1)
    follows = one(runner, replace(last, tokens=[*last.tokens]))
    draft = replace(row(first, 19, 1, 1), draft=[expected[0], follows[0]])
    both = [replace(draft, plain=True), row(second, 0, 31, 5, plain=True)]
    sampled = row(second, 0, 31, 5, plain=True, params=SamplingParams(max_tokens=1, seed=0))
    mixed = runner.execute(Batch([both[0], sampled])).result().tokens[0]
    monkeypatch.delattr(type(runner.model), "logits")
    result = runner.execute(Batch(both)).result().tokens
    assert result == [mixed, expected[1:]]
    assert mixed[:2] == [expected[0], follows[0]]
    runner.storage.data[:, :, 1] = torch.nan
    assert runner.execute(Batch(both)).result().tokens == [[BAD_LOGITS], expected[1:]]


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(4),
    seed=st.integers(0, 3),
    temperature=st.sampled_from([0.0, 0.0, 0.7]),
    top_k=st.sampled_from([0, 1]),
    logit_bias=st.sampled_from([{}, {}, {}, {5: 100.0}]),
    min_tokens=st.sampled_from([0, 0, 0, 2]),
    stop_token_ids=st.sampled_from([(), tuple(range(100))]),
    allowed_token_ids=st.sampled_from([None, None, None, (7, 8)]),
    logprobs=st.sampled_from([None, None, None, 2]),
    prompt_logprobs=st.sampled_from([None, 1]),
)
ROWS = st.lists(
    st.tuples(PARAMS, st.integers(3, 20), st.lists(st.integers(0, VOCAB - 1), max_size=2)), min_size=1, max_size=3
)


def test_who_finds_the_likeliest_token_changes_nothing(folder: Path) -> None:
    """Whatever the rows ask for; all that asks for more than the token takes the logits."""
    runner = make_runner(folder)
    found, found_by_head = list[bool](), runner.model.likeliest

    def note(hidden: torch.Tensor) -> torch.Tensor | None:
        tokens = found_by_head(hidden)
        found.append(tokens is not None)
        return tokens

    @settings(max_examples=60, deadline=None)
    @given(ROWS)
    def check(asked: list[tuple[SamplingParams, int, list[int]]]) -> None:
        texts = prompts(VOCAB, [length for _, length, _ in asked])
        rows = [
            Row(text, len(text), 0, len(text), [1 + 2 * i, 2 + 2 * i], params, plain=params.plain, draft=draft)
            for i, (text, (params, _, draft)) in enumerate(zip(texts, asked, strict=True))
        ]
        found.clear()
        runner.model.likeliest = note  # type: ignore[method-assign]
        result = runner.execute(Batch(rows)).result()
        simple = all(params.plain and (params.temperature == 0 or params.top_k == 1) for params, _, _ in asked)
        assert found == [True] * simple
        runner.model.likeliest = lambda hidden: None  # type: ignore[method-assign]
        assert result == runner.execute(Batch(rows)).result()

    check()


Reference = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    """Log-probabilities [tokens, vocab] of a prompt, by transformers."""
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logprobs(prompt: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = module(torch.tensor([prompt]), use_cache=False).logits[0]
        return logits.log_softmax(-1)

    return logprobs


def test_prompt_logprobs_in_chunks(runner: Runner, reference: Reference) -> None:
    (prompt,) = prompts(VOCAB, [PROMPT_ROWS + 40])
    params = asking(prompt_logprobs=2, logprobs=1)
    found = []
    for start, count in ((0, 5), (5, PROMPT_ROWS + 34), (PROMPT_ROWS + 39, 1)):
        part = row(prompt, start, count, 1, params=params)
        plain = row(prompt[:17], 0, 17, 20)
        result = runner.execute(Batch([plain, part])).result()
        assert result.prompt_logprobs[0] is None
        values = result.prompt_logprobs[1]
        assert values is not None
        found += values
    expected = reference(prompt)
    assert len(found) == len(prompt) - 1
    for position, value in enumerate(found):
        exact = expected[position]
        assert value.logprob == pytest.approx(float(exact[prompt[position + 1]]), abs=1e-3)
        assert value.top_ids == exact.topk(2).indices.tolist()
    (drawn,) = result.logprobs[1]
    assert drawn.logprob == pytest.approx(float(expected[-1].max()), abs=1e-3)
    assert drawn.top_ids == result.tokens[1]


def test_no_prompt_logprobs_after_the_prompt(runner: Runner) -> None:
    (prompt,) = prompts(VOCAB, [12])
    params = asking(prompt_logprobs=0)
    one(runner, row(prompt, 0, 12, 1, params=params))
    decode = row([*prompt, 5], 12, 1, 1, prompt_len=12, params=params)
    assert runner.execute(Batch([decode])).result().prompt_logprobs == [[]]


# ---- drafts ----


def told(runner: Runner, prompt: list[int], params: SamplingParams, count: int) -> list[Logprob]:
    """`count` tokens behind the prompt one step at a time, each as its Logprob; the tokens are appended to it."""
    values = []
    start = 0
    for _ in range(count):
        part = row(prompt, start, len(prompt) - start, 1, prompt_len=20, params=params)
        result = runner.execute(Batch([part])).result()
        start = len(prompt)
        prompt.append(result.tokens[0][0])
        values += result.logprobs[0]
    return values


SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.2, "top_p": 0.95, "top_k": 50},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.5},
    "least": {"temperature": 1.0, "stop_token_ids": tuple(range(3, VOCAB, 2)), "min_tokens": 6},
    "masks": {"temperature": 1.0, "allowed_token_ids": tuple(range(40, 80)), "logit_bias": {41: 5.0}},
}


@pytest.mark.parametrize("kind", SAMPLED)
@pytest.mark.parametrize("wrong", [None, 0, 2, 4])
def test_a_draft_draws_what_steps_would(runner: Runner, kind: str, wrong: int | None) -> None:
    """Beside other rows, and whatever lies in the slots that wrong guesses leave behind."""
    params = SamplingParams(max_tokens=50, seed=3, logprobs=2, **SAMPLED[kind])
    (text,) = prompts(VOCAB, [20])
    if kind == "masks":
        params = msgspec.structs.replace(params, bad_words=((told(runner, [*text], params, 2)[1].top_ids[0],),))
    values = told(runner, text, params, 11)
    runner.storage.data[:, :, 1:] = torch.nan
    beside = row(prompts(VOCAB, [31], seed=5)[0], 0, 31, 9)
    known = text[:24]
    one(runner, row(known, 0, 23, 1, prompt_len=20))
    draft = text[24:29]
    right = 5
    if wrong is not None:
        draft[wrong] = (draft[wrong] + 1) % VOCAB
        right = wrong
    guessed = Row(known, 20, 23, 1, [1, 2], params, draft=draft)
    result = runner.execute(Batch([beside, guessed, beside_too(runner)])).result()
    assert result.tokens[1] == text[24 : 24 + right + 1]
    assert [v.top_ids for v in result.logprobs[1]] == [v.top_ids for v in values[4 : 4 + right + 1]]
    assert [len(drawn) for drawn in result.tokens] == [1, right + 1, 0]
    # From there on without a draft: slots behind the right guesses are written again.
    known = text[: 24 + right + 1]
    (following,) = one(runner, row(known, len(known) - 1, 1, 1, prompt_len=20, params=params))
    assert following == text[len(known)]


def beside_too(runner: Runner) -> Row:
    """A chunk that draws nothing."""
    (prompt,) = prompts(VOCAB, [40], seed=6)
    return row(prompt, 0, 17, 20)


def test_broken_numbers_of_a_draft_break_its_row_alone(runner: Runner) -> None:
    good, bad = prompts(VOCAB, [40, 40])
    expected = one(runner, row(good, 0, 40, 1))
    one(runner, row(bad, 0, 39, 11))
    runner.storage.data[:, :, 11] = torch.nan
    guessed = Row(bad, 40, 39, 1, [11, 12, 13], GREEDY, draft=[5, 6])
    assert runner.execute(Batch([guessed, row(good, 39, 1, 1)])).result().tokens == [[BAD_LOGITS], expected]
