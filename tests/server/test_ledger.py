from __future__ import annotations

from server.ledger import DAYS, Ledger

DAY = 86_400


class Clock:
    """Seconds since 1970, as one sets them."""

    now = 1_800_000_000.0  # 2027-01-15, 08:00 UTC

    def __call__(self) -> float:
        return self.now


def test_lines_add_up() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    ledger.add("alice", requests=1, prompt_tokens=10, cached_tokens=4, completion_tokens=7)
    ledger.add("alice", requests=1, prompt_tokens=1, completion_tokens=2, aborted=1)
    ledger.add("bob", rejected=1)
    clock.now += DAY
    ledger.add("alice", rejected=1)
    line = ledger.line("alice")
    days = line.pop("days")
    assert line == {
        "name": "alice",
        "requests": 2,
        "rejected": 1,
        "aborted": 1,
        "prompt_tokens": 11,
        "cached_tokens": 4,
        "completion_tokens": 9,
    }
    assert [day.pop("date") for day in days] == ["2027-01-15", "2027-01-16"]
    assert {field: sum(day[field] for day in days) for field in days[0]} == {
        field: count for field, count in line.items() if field != "name"
    }
    assert [day["rejected"] for day in ledger.line("bob")["days"]] == [1]
    assert ledger.names == {"alice", "bob"}
    assert ledger.since == 1_800_000_000


def test_who_has_used_nothing() -> None:
    line = Ledger().line("nobody")
    assert line["days"] == []
    assert {line[field] for field in line if field not in ("name", "days")} == {0}
    assert Ledger().line("")["name"] is None


def test_days_are_bounded_and_totals_stay() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    for _ in range(3 * DAYS):
        ledger.add("alice", requests=1)
        clock.now += DAY
    line = ledger.line("alice")
    assert line["requests"] == 3 * DAYS
    assert len(line["days"]) == DAYS
    assert line["days"] == sorted(line["days"], key=lambda day: day["date"])
