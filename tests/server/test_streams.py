from __future__ import annotations

import asyncio
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from model.params import Logprob, SamplingParams
from model.tokenizer import Tokenizer
from scheduler.messages import FinishReason, Started, Submit
from server.echo import make_echo
from server.errors import EngineError, Unavailable
from server.streams import RequestStream, SequenceResult, StreamOptions
from tests.server.played import END, LENGTH, RUNNING, STOP, Engine, collect, play, sum_up, texts

CHARS = st.lists(st.sampled_from(["a", "b", "ab", "é", "😀", "", "c"]), max_size=8).map("".join)


@given(
    CHARS,
    st.lists(st.integers(0, 30), max_size=6),
    st.lists(st.text("abé😀", min_size=1, max_size=3), max_size=3),
    st.booleans(),
    st.sampled_from([STOP, LENGTH]),
    st.sampled_from([None, 0, 1]),
)
@example("ab😀a", [3, 4, 5], ["😀"], False, LENGTH, 1)
@example("AAAAAB", list(range(6)), ["AAB"], False, LENGTH, 1)
def test_a_stream_is_the_whole_answer_in_pieces(
    text: str, places: list[int], stops: list[str], include: bool, finish: int, logprobs: int | None
) -> None:
    data = text.encode()
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    pieces = [data[a:b] for a, b in pairwise(bounds)]
    options: dict[str, Any] = {"stop": tuple(stops), "include_stop": include, "logprobs": logprobs}
    events = play(pieces, finish, **options)
    result = collect(pieces, finish, **options)
    assert sum_up(events) == result
    assert [event.finish_reason is not None for event in events] == [False] * (len(events) - 1) + [True]
    if finish == LENGTH:
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        expected = text
        if found:
            end, _, stop = min(found)
            expected = text[: end if include else end - len(stop)]
            assert (result.finish_reason, result.stop_reason) == ("stop", stop)
        assert result.text == expected
    if result.logprobs is not None:
        assert "".join(entry.text for entry in result.logprobs) == result.text
        at = 0
        for entry in result.logprobs:
            assert entry.offset == at
            at += len(entry.text)
        for event in events:
            # What an event says of tokens never runs ahead of its text.
            sent = "".join(e.text for e in events[: events.index(event) + 1])
            assert all(entry.offset + len(entry.text) <= len(sent) for entry in event.logprobs or ())


def test_nothing_of_a_stop_string_is_sent() -> None:
    engine = Engine(list("ABCDEFGHIJKLM"), stop=("DEFGHIJ",))
    events = asyncio.run(engine.play(range(1, 14)))
    assert texts(events) == ["A", "B", "C"]
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", "DEFGHIJ")
    assert engine.aborts == [(7, 0)]
    assert engine.stream.usage.completion_tokens == 10


def test_a_stop_string_counts_only_behind_min_tokens() -> None:
    result = collect(["a", "b", "a", "b", "c"], stop=("ab",), min_tokens=2)
    assert (result.text, result.stop_reason) == ("ab", "ab")
    assert collect(["a", "b", "c"], stop=("ab",), min_tokens=2).text == "abc"


def test_logprobs_end_with_the_text() -> None:
    result = collect(["AB", "CD", "EF", "GH"], stop=("DEF",), logprobs=1)
    assert result.text == "ABC"
    assert result.logprobs is not None
    assert [(entry.text, entry.offset) for entry in result.logprobs] == [("AB", 0), ("C", 2)]
    assert result.logprobs[1].data == b"CD"
    assert result.token_ids == (1, 2, 3)


@pytest.mark.parametrize("pieces", [["\n"], [b"\xe5", b"\xae", b"\xb6"]])
def test_a_stop_string_that_is_everything_leaves_nothing(pieces: list[str | bytes]) -> None:
    result = collect(pieces, stop=("\n", "家"), logprobs=5)
    assert (result.text, result.logprobs, result.finish_reason) == ("", (), "stop")


def test_a_token_inside_a_character_waits_for_its_end() -> None:
    events = play(["x", b"\xf0\x9f", b"\x98", b"\x80", "y"], logprobs=0)
    assert texts(events) == ["x", "😀", "y"]
    told = [[(entry.text, entry.data) for entry in event.logprobs or ()] for event in events]
    assert told == [[("x", b"x")], [("", b"\xf0\x9f"), ("", b"\x98"), ("😀", b"\x80")], [("y", b"y")]]


def test_the_end_inside_a_character() -> None:
    events = play(["x", b"\xf0\x9f"], logprobs=0)
    assert texts(events) == ["x", "\ufffd"]
    assert events[-1].finish_reason == "length"
    assert [entry.text for entry in events[-1].logprobs or ()] == ["\ufffd"]


def test_a_stop_token_gives_no_text_and_its_id_as_the_reason() -> None:
    engine = Engine(["a", "b"], token_ids=True, logprobs=0)
    events = asyncio.run(engine.play([1, 2], STOP))
    result = sum_up(events)
    assert (result.text, result.token_ids, result.finish_reason, result.stop_reason) == ("a", (1, 2), "stop", 2)
    assert [entry.token_id for entry in result.logprobs or ()] == [1]
    assert engine.stream.usage.completion_tokens == 2
    assert engine.aborts == []


def test_an_end_of_sequence_token_is_no_reason() -> None:
    engine = Engine(["a"])
    events = asyncio.run(engine.play([1, END], STOP))
    assert (sum_up(events).text, events[-1].finish_reason, events[-1].stop_reason) == ("a", "stop", None)
    assert engine.stream.usage.completion_tokens == 2


def test_an_end_without_a_token_has_no_reason() -> None:
    """The request's masks left nothing to draw: the last token did not end it."""
    engine = Engine(["a", "b"])
    engine.step(1)
    engine.step(-1, STOP)
    (result,) = asyncio.run(engine.stream.collect())
    assert (result.text, result.token_ids, result.finish_reason, result.stop_reason) == ("a", (1,), "stop", None)


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    async def text(skip: bool) -> str:
        return sum_up(await Engine(["a", "b"], skip_special_tokens=skip).play([1, END, 2])).text

    assert asyncio.run(text(True)) == "ab"
    assert asyncio.run(text(False)) == "a<end>b"


def test_text_held_back_for_a_stop_comes_at_the_end() -> None:
    assert collect(["a", "E", "N"], stop=("END",)).text == "aEN"
    engine = Engine(["a", "EN"], stop=("END",))
    assert sum_up(asyncio.run(engine.play([1, 2, END], STOP))).text == "aEN"


def test_token_ids_without_text_are_sent_only_where_asked_for() -> None:
    pieces: list[str | bytes] = ["a", b"\xf0", b"\x9f\x98\x80"]
    assert [event.token_ids for event in play(pieces)] == [(1,), (2, 3)]
    assert [event.token_ids for event in play(pieces, token_ids=True)] == [(1,), (2,), (3,)]


def test_a_slow_reader_finds_one_event() -> None:
    engine = Engine(["ab"], token_ids=True, logprobs=0)

    async def scenario() -> None:
        assert engine.stream.stalled_seconds() == 0
        for _ in range(1000):
            engine.step(1)
        assert engine.stream.pending_chars == 2000
        assert engine.stream.stalled_seconds() == 999
        async with aclosing(engine.stream.events()) as batches:
            (event,) = await anext(batches)
            assert event.text == "ab" * 1000
            assert len(event.token_ids) == len(event.logprobs or ()) == 1000
            assert (engine.stream.pending_chars, engine.stream.stalled_seconds()) == (0, 0)

    asyncio.run(scenario())
    assert engine.aborts == [(7, None)]


def test_sequences_end_one_by_one() -> None:
    engine = Engine(["a", "b", "stop"], n=3, stop=("stop",))

    async def scenario() -> list[SequenceResult]:
        for index in range(3):
            engine.stream.feed(index, 1, RUNNING)
        engine.step(3, RUNNING, index=1)
        assert engine.aborts == [(7, 1)]
        assert engine.stream.finished_indices == [1]
        engine.step(2, RUNNING, index=1)  # the abort crossed a token
        engine.step(2, LENGTH, index=0)
        assert not engine.stream.done
        engine.step(END, STOP, index=2)
        assert engine.stream.done
        return await engine.stream.collect()

    results = asyncio.run(scenario())
    assert [(r.index, r.text, r.finish_reason) for r in results] == [
        (0, "ab", "length"),
        (1, "a", "stop"),
        (2, "a", "stop"),
    ]
    assert engine.stream.usage.completion_tokens == 6
    assert engine.aborts == [(7, 1)]


@pytest.mark.parametrize("begun", [False, True])
def test_a_cancelled_reader_aborts_the_request_once(begun: bool) -> None:
    engine = Engine(["a"], n=2)

    async def scenario() -> None:
        reader = asyncio.create_task(engine.stream.collect())
        await asyncio.sleep(0)
        if begun:
            engine.step(1)
            await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        engine.stream.cancel()
        engine.step(1, LENGTH)

    asyncio.run(scenario())
    assert engine.aborts == [(7, None)]
    assert engine.stream.cancelled
    assert engine.stream.timings.finished is not None


def test_leaving_behind_the_end_aborts_nothing() -> None:
    engine = Engine(["a"])
    asyncio.run(engine.play([1]))
    engine.stream.cancel()
    assert engine.aborts == []
    assert not engine.stream.cancelled


def test_a_failure_is_raised_behind_the_text() -> None:
    engine = Engine(["a"])

    async def scenario() -> None:
        engine.step(1)
        engine.stream.fail(Unavailable("gone"))
        engine.step(1, LENGTH)
        async with aclosing(engine.stream.events()) as batches:
            assert [event.text for event in await anext(batches)] == ["a"]
            with pytest.raises(Unavailable, match="gone"):
                await anext(batches)

    asyncio.run(scenario())
    assert engine.aborts == []


def test_a_failed_row_fails_the_request_and_frees_the_others() -> None:
    engine = Engine(["a"], n=2)

    async def scenario() -> None:
        reader = asyncio.create_task(engine.stream.collect())
        await asyncio.sleep(0)
        engine.stream.feed(1, -1, FinishReason.ERROR, message="not finite")
        engine.stream.wake()
        with pytest.raises(EngineError, match="not finite"):
            await reader

    asyncio.run(scenario())
    assert engine.aborts == [(7, None)]


def values(count: int) -> list[Logprob]:
    return [Logprob(-1.0 - number, 1, [1], [-0.1]) for number in range(count)]


def test_an_echoed_prompt_goes_on_in_the_output() -> None:
    pieces = ["\n1", ". Carol", " has", " 20", " apples"]

    async def scenario(read_all: bool) -> SequenceResult:
        engine = Engine(pieces, prompt=(1, 2, 3), echo=True, logprobs=1)
        engine.stream.prompt_logprobs(values(2))
        return sum_up(await engine.play([4, 5], read_all=read_all))

    result = asyncio.run(scenario(True))
    assert result == asyncio.run(scenario(False))
    assert result.text == "\n1. Carol has 20 apples"
    assert result.token_ids == (4, 5)
    entries = result.logprobs or ()
    assert [entry.text for entry in entries] == pieces
    assert [entry.logprob for entry in entries] == [None, -1.0, -2.0, -0.5, -0.5]
    assert entries[0].top is None
    assert all(result.text[entry.offset :].startswith(entry.text) for entry in entries)


def test_an_echo_has_no_more_alternatives_than_the_output() -> None:
    engine = Engine(["a", "b"], prompt=(1, 2), echo=True, logprobs=0)
    engine.stream.prompt_logprobs(values(1))
    (event,) = asyncio.run(engine.play([-1], read_all=False))
    assert [entry.top for entry in event.logprobs or ()] == [None, ()]


def test_an_echo_without_logprobs_is_there_at_once_and_holds_no_stops() -> None:
    engine = Engine(["END", "a", "E", "ND"], prompt=(1, 2), echo=True, stop=("END",), n=2)

    async def scenario() -> None:
        async with aclosing(engine.stream.events()) as batches:
            assert [(e.index, e.text) for e in await anext(batches)] == [(0, "ENDa"), (1, "ENDa")]
            engine.step(3)
            engine.step(4)
            (event,) = await anext(batches)
            assert (event.text, event.finish_reason, event.stop_reason) == ("", "stop", "END")

    asyncio.run(scenario())


@pytest.mark.parametrize(("echo", "text"), [(True, "Your answer"), (False, "")])
def test_no_tokens_at_all(echo: bool, text: str) -> None:
    engine = Engine(["Your", " answer"], prompt=(1, 2), echo=echo, logprobs=1)
    if echo:
        engine.stream.prompt_logprobs(values(1))
    (event,) = asyncio.run(engine.play([-1], read_all=False))
    assert (event.text, event.token_ids, event.finish_reason) == (text, (), "length")
    assert [entry.text for entry in event.logprobs or ()] == (["Your", " answer"] if echo else [])
    assert engine.stream.usage.completion_tokens == 0
    assert engine.stream.timings.first_token is None


def test_a_character_between_prompt_and_output() -> None:
    engine = Engine([b"x\xf0\x9f", b"\x98\x80"], echo=True, logprobs=0)
    engine.stream.prompt_logprobs([])
    result = sum_up(asyncio.run(engine.play([2])))
    assert result.text == "x😀"
    assert [entry.text for entry in result.logprobs or ()] == ["x", "😀"]


def test_usage_and_times() -> None:
    engine = Engine(["a"], prompt=(1, 1, 1))
    stream = engine.stream
    stream.started(Started(7, 10.5, 2))
    stream.started(Started(7, 99.0, 0))
    asyncio.run(engine.play([1, 1, 1]))
    usage = stream.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (3, 2, 3)
    times = stream.timings
    assert (times.arrival, times.scheduled, times.first_token, times.last_token, times.finished) == (
        10,
        10.5,
        11,
        13,
        13,
    )


def test_a_restarted_engine_gets_what_the_client_has() -> None:
    engine = Engine(["a", "b", "stop"], n=2, stop=("stop",))
    engine.step(1)
    engine.step(3, index=1)
    again = engine.stream.resubmit()
    assert (again.id, again.generated, again.finished) == (7, [[1], [3]], [1])
    engine.step(2, LENGTH)
    results = asyncio.run(engine.stream.collect())
    assert [result.text for result in results] == ["ab", ""]


def test_a_chat_s_text_begins_without_sentencepiece_s_space(llama: Tokenizer) -> None:
    ids = llama.encode("Hello there", add_special_tokens=False)

    async def text(new_text: bool, echo: bool = False) -> str:
        params = SamplingParams(max_tokens=9, seed=1)
        submit = Submit(id=1, prompt_ids=[1, *ids], params=params)
        prompt = make_echo(llama, submit.prompt_ids, True, False) if echo else None
        stream = RequestStream(submit, llama, StreamOptions(new_text=new_text), lambda *_: None, echo=prompt)
        for token in ids:
            stream.feed(0, token, RUNNING)
        stream.feed(0, 2, STOP)
        return (await stream.collect())[0].text

    assert asyncio.run(text(True)) == "Hello there"
    assert asyncio.run(text(False)) == " Hello there"
    assert asyncio.run(text(False, echo=True)) == "Hello there Hello there"
