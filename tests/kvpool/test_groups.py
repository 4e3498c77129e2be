"""Which layers share pages, and how many pages a sequence takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.groups import MOST_GROUPS, LayerGroups, Paging

WINDOWS = st.lists(st.sampled_from([None, 64, 512]), min_size=1, max_size=70)


def gemma3(layers: int) -> list[int | None]:
    return [None if (layer + 1) % 6 == 0 else 512 for layer in range(layers)]


@pytest.mark.parametrize(
    ("windows", "size", "groups"),
    [
        ([None] * 30, 30, 1),
        ([4096] * 32, 32, 1),
        (gemma3(18), 3, 6),
        (gemma3(26), 2, 13),
        (gemma3(34), 5, 7),  # one by one there would be 34
        (gemma3(48), 8, 6),
        (gemma3(62), 4, 16),
        ([512, None] * 13, 13, 2),
        ([None] * 21 + [4096] * 7, 7, 4),
    ],
)
def test_families(windows: list[int | None], size: int, groups: int) -> None:
    made = LayerGroups.by(windows)
    assert (made.size, len(made.windows)) == (size, groups)
    assert made.size * groups <= 1.05 * len(windows)


@given(WINDOWS)
def test_every_layer_has_a_place_of_its_own_and_its_window(windows: list[int | None]) -> None:
    made = LayerGroups.by(windows)
    assert len(set(zip(made.of, made.slots, strict=True))) == len(windows)
    assert [made.windows[group] for group in made.of] == windows
    assert 0 <= min(made.slots) <= max(made.slots) < made.size
    assert set(made.of) == set(range(len(made.windows)))
    assert len(made.windows) <= MOST_GROUPS
    assert list(made.windows) == sorted(made.windows, key=lambda window: window or 0)


@given(
    windows=st.lists(st.none() | st.integers(1, 40), min_size=1, max_size=4).map(tuple),
    size=st.integers(1, 8),
    chunk=st.integers(1, 30),
    pages=st.integers(0, 200),
    most=st.integers(1, 500),
)
def test_the_longest_sequence_fits_and_a_longer_one_does_not(
    windows: tuple[int | None, ...], size: int, chunk: int, pages: int, most: int
) -> None:
    paging = Paging(size, windows)
    longest = paging.longest(pages, chunk, most)
    assert longest <= most
    assert longest == 0 or paging.pages(longest, chunk) <= pages
    assert longest == most or paging.pages(longest + 1, chunk) > pages
    assert sum(count for _, count, _ in paging.kinds) == len(windows)


@given(window=st.integers(1, 40), size=st.integers(1, 8), chunk=st.integers(1, 30), data=st.data())
def test_what_a_window_holds_at_most(window: int, size: int, chunk: int, data: st.DataObject) -> None:
    """Steps of up to `chunk` tokens, blocks given back as others are filled."""
    paging, end, first, most = Paging(size, (window,)), 0, 0, 0
    for count in data.draw(st.lists(st.integers(1, chunk), min_size=30, max_size=60)):
        start, end = end, end + count
        most = max(most, paging.columns(end) - first)
        if end // size > start // size:
            first = max(first, (end - window) // size)
    assert most <= paging.pages(end, chunk)
