"""Frames survive any cut of the byte stream; garbage is an error, not a hang."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from scheduler.config import EngineConfig
from scheduler.messages import Abort, Progress, SamplingParams, Submit, ToEngine
from scheduler.wire import HEADER_BYTES, WireError, decode_config, frame, from_engine_frames, to_engine_frames

if TYPE_CHECKING:
    from tests.scheduler.conftest import World

SUBMIT = Submit(
    id=7,
    prompt_ids=list(range(1000)),
    params=SamplingParams(max_tokens=3, seed=2**63 - 1, logit_bias={5: -1.5}, stop_token_ids=(0, 2)),
    generated=[[1], []],
    n=2,
    salt=b"\0\xff",
)


def test_any_cut() -> None:
    rng = random.Random(0)
    messages: list[ToEngine] = [SUBMIT, Abort(7), Abort(8, 1), SUBMIT] * 10
    stream = b"".join(frame(message) for message in messages)
    frames = to_engine_frames()
    got: list[ToEngine] = []
    at = 0
    while at < len(stream):
        size = rng.choice([1, 2, 3, 5, 100, 5000])
        got += frames.feed(stream[at : at + size])
        at += size
    assert got == messages


def test_other_direction(world: type[World]) -> None:
    it = world()
    it.add([1, 2, 3], max_tokens=2, logprobs=0, prompt_logprobs=0)
    output = it.step()
    assert output.logprobs
    assert output.prompt_logprobs
    progress = Progress("weights", "halfway")
    assert from_engine_frames().feed(frame(progress) + frame(output)) == [progress, output]


def test_config() -> None:
    config = EngineConfig(model="x", kv_cache_memory=1 << 40)
    assert decode_config(frame(config)[HEADER_BYTES:]) == config
    with pytest.raises(WireError, match="not a configuration"):
        decode_config(b"\xc1")


def test_garbage() -> None:
    with pytest.raises(WireError, match="limit"):
        to_engine_frames().feed(b"\xff\xff\xff\xff")
    with pytest.raises(WireError, match="not a message"):
        to_engine_frames().feed(b"\0\0\0\1\xc1")
    with pytest.raises(WireError, match="not a message"):
        to_engine_frames().feed(frame(Progress("a", "b")))
