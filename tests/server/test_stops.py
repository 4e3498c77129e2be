from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.stops import StopMatcher, StopStrings

STOPS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4)
PIECES = st.lists(st.text("abc", max_size=5), max_size=12)


def reference(pieces: list[str], stops: list[str], armed_from: int) -> tuple[int, str] | None:
    """End and text of the first stop, looked for by brute force in whole text."""
    text = ""
    for number, piece in enumerate(pieces):
        for char in piece:
            text += char
            found = [stop for stop in stops if text.endswith(stop)]
            if found and number >= armed_from:
                return len(text), max(found, key=len)
    return None


def must_wait(text: str, stops: list[str]) -> int:
    """Length of the longest end of the text that is the beginning, but not the whole, of a stop."""
    return max(
        length
        for stop in stops
        for length in range(min(len(stop), len(text) + 1))
        if text.endswith(stop[:length]) or not length
    )


@given(STOPS, PIECES, st.booleans(), st.integers(0, 4))
@example(["AAB"], ["AAA", "AAB"], False, 0)
@example(["aba"], list("ababa"), False, 0)
@example(["ab", "b", "aab"], ["aab"], False, 0)
@example(["aab", "b"], ["aa", "b"], True, 1)
def test_every_cutting_gives_the_brute_force_answer(
    stops: list[str], pieces: list[str], include: bool, armed_from: int
) -> None:
    matcher = StopMatcher(StopStrings(stops, include))
    expected = reference(pieces, stops, armed_from)
    seen, sent = "", ""
    for number, piece in enumerate(pieces):
        seen += piece
        sent += matcher.push(piece, number >= armed_from)
        if matcher.matched is not None:
            break
        assert sent == seen[: len(seen) - must_wait(seen, stops)]
    if expected is None:
        assert matcher.matched is None
        assert sent + matcher.flush() == "".join(pieces)
        return
    end, stop = expected
    assert matcher.matched == stop
    assert sent == "".join(pieces)[: end if include else end - len(stop)]
    assert matcher.flush() == ""


def test_the_match_that_ends_first_wins_and_of_two_the_longer() -> None:
    matcher = StopMatcher(StopStrings(["long stop here", "stop", "op"]))
    assert matcher.push("a long stop here") == "a long "
    assert matcher.matched == "stop"


def test_a_long_stop_delays_nothing_that_does_not_begin_it() -> None:
    matcher = StopMatcher(StopStrings(["Z" * 1000]))
    assert matcher.push("hello, no stop") == "hello, no stop"
    assert matcher.push("ZZ") == ""
    assert matcher.push("!") == "ZZ!"


def test_a_stop_that_ends_before_it_counts_is_text() -> None:
    matcher = StopMatcher(StopStrings(["END"]))
    assert matcher.push("END", armed=False) == "END"
    assert matcher.push(" EN", armed=False) == " "
    assert matcher.push("D") == ""
    assert matcher.matched == "END"


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


class Counting(StopStrings):
    steps = 0

    def border(self, which: int, length: int) -> int:
        Counting.steps += 1
        return super().border(which, length)


@pytest.mark.parametrize("text", ["a" * 8_000, ("a" * 1022 + "c") * 8])
def test_the_work_grows_with_the_text_alone(text: str) -> None:
    Counting.steps = 0
    stops = Counting("a" * length + "b" for length in range(1000, 1023))
    matcher = StopMatcher(stops)
    sent = "".join(matcher.push(text[at : at + 7]) for at in range(0, len(text), 7))
    assert sent + matcher.flush() == text
    assert Counting.steps <= 2 * len(text) * len(stops.strings)
