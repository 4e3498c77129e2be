from __future__ import annotations

from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import NotFound
from server.store import Record, ResponseStore


def record(number: int, size: int = 10, owner: bytes = b"me") -> Record:
    item = {"id": f"msg_{number}", "text": "x" * size}
    response = orjson.dumps({"id": f"resp_{number}", "output": [item]})
    return Record(
        f"resp_{number}", owner, orjson.dumps([{"id": f"in_{number}"}]), response, (f"in_{number}", item["id"])
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def kept(store: ResponseStore, numbers: range) -> list[int]:
    """Without touching the order of use."""
    return [number for number in numbers if f"resp_{number}" in store._records]


def test_what_was_said() -> None:
    store = ResponseStore()
    store.put(record(1))
    assert store.get("resp_1", b"me") == record(1)
    assert [item["id"] for item in record(1).items] == ["in_1", "msg_1"]
    assert store.item("msg_1", b"me", "input.0")["text"] == "x" * 10
    store.delete("resp_1", b"me")
    assert (len(store), store.bytes) == (0, 0)
    for missing in (lambda: store.get("resp_1", b"me"), lambda: store.item("msg_1", b"me", "input.0")):
        with pytest.raises(NotFound):
            missing()


def test_other_owners_find_nothing() -> None:
    store = ResponseStore()
    store.put(record(1))
    for act in (store.get, store.delete):
        with pytest.raises(NotFound):
            act("resp_1", b"you")
    with pytest.raises(NotFound):
        store.item("in_1", b"you", "input.0")
    assert len(store) == 1


def test_an_item_is_there_as_long_as_a_response_that_holds_it() -> None:
    store = ResponseStore()
    first, second = record(1), record(2)
    later = replace(second, context=orjson.dumps(first.items), item_ids=("in_1", "msg_1", "msg_2"))
    theirs = replace(record(3, 5, b"you"), response=first.response, id="resp_3", item_ids=("in_3", "msg_1"))
    for each in (first, later, theirs):
        store.put(each)
    store.delete("resp_3", b"you")
    assert store.item("msg_1", b"me", "input.0")["text"] == "x" * 10
    store.delete("resp_2", b"me")
    assert store.item("msg_1", b"me", "input.0")["text"] == "x" * 10
    store.delete("resp_1", b"me")
    with pytest.raises(NotFound):
        store.item("msg_1", b"me", "input.0")


def test_the_longest_unused_goes_first() -> None:
    store = ResponseStore(max_responses=3)
    for number in range(3):
        store.put(record(number))
    store.get("resp_0", b"me")
    store.put(record(3))
    assert kept(store, range(4)) == [0, 2, 3]


def test_bytes_are_bounded() -> None:
    size = record(1, 1000).size
    store = ResponseStore(max_bytes=3 * size)
    for number in range(1, 6):
        store.put(record(number, 1000))
    assert kept(store, range(6)) == [3, 4, 5]
    store.put(record(6, 10_000))
    assert kept(store, range(7)) == [3, 4, 5], "what alone is too large isn't kept"
    assert store.bytes <= 3 * size


def test_age_is_bounded() -> None:
    clock = Clock()
    store = ResponseStore(max_seconds=10, clock=clock)
    store.put(record(1))
    clock.now = 9.0
    store.get("resp_1", b"me")
    store.put(record(2))
    clock.now = 11.0
    with pytest.raises(NotFound):
        store.get("resp_1", b"me")
    assert (len(store), store.bytes) == (1, record(2).size)
    clock.now = 30.0
    store.put(record(3))
    assert kept(store, range(4)) == [3]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 400), st.sampled_from(["put", "get", "delete"])), max_size=60)
)
def test_the_books_are_right(steps: list[tuple[int, int, str]]) -> None:
    """Whatever happens: bytes and items are those of what is there."""
    store = ResponseStore(max_bytes=8000, max_responses=4)
    for count, (number, size, act) in enumerate(steps):
        name = f"resp_{number}"
        if act == "put" and name not in store._records:
            ids = (f"in_{count}", "shared")
            store.put(replace(record(number, size), item_ids=ids))
        elif act != "put" and name in store._records:
            (store.get if act == "get" else store.delete)(name, b"me")
        held = [record for _, record in store._records.values()]
        assert store.bytes == sum(record.size for record in held) <= 8000
        assert len(held) <= 4
        there = {id for record in held for id in record.item_ids}
        holders = {id: {record.id for record in held if id in record.item_ids} for id in there}
        assert {id: set(of) for (_, id), of in store._holders.items()} == holders
