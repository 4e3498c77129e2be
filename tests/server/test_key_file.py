"""--api-keys-file: what may stand in it, and one line about what may not."""

from __future__ import annotations

import hashlib
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from server.key_file import MAX_KEYS, ApiKey, read_keys
from server.settings import BadSettings, load_settings

HASH = hashlib.sha256(b"second").hexdigest()
YAML = f"""
keys:
  - name: first
    key: sesame-1
    weight: 2
    priority: -3
    requests_per_minute: 60
    tokens-per-minute: 1000
    max_concurrency: 4
    expires: 2027-01-31T12:00:00Z
    admin: true
  - name: second
    sha256: {HASH.upper()}
"""
TOML = f"""
[[keys]]
name = "first"
key = "sesame-1"
weight = 2
priority = -3
requests_per_minute = 60
tokens_per_minute = 1000
max_concurrency = 4
expires = 2027-01-31T12:00:00Z
admin = true
[[keys]]
name = "second"
sha256 = "{HASH}"
"""
ENTRIES = [
    {
        "name": "first",
        "key": "sesame-1",
        "weight": 2,
        "priority": -3,
        "requests_per_minute": 60,
        "tokens_per_minute": 1000,
        "max_concurrency": 4,
        "expires": "2027-01-31T12:00:00Z",
        "admin": True,
    },
    {"name": "second", "sha256": HASH},
]


def write(folder: Path, content: object, name: str = "keys.json") -> Path:
    file = folder / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


@pytest.mark.parametrize(("suffix", "text"), [("yaml", YAML), ("toml", TOML), ("json", json.dumps({"keys": ENTRIES}))])
def test_three_kinds_of_files(tmp_path: Path, suffix: str, text: str) -> None:
    first, second = read_keys(write(tmp_path, text, f"keys.{suffix}"))
    assert first == ApiKey(
        name="first",
        digest=hashlib.sha256(b"sesame-1").digest(),
        weight=2.0,
        priority=-3,
        requests_per_minute=60,
        tokens_per_minute=1000,
        max_concurrency=4,
        expires=datetime(2027, 1, 31, 12, tzinfo=UTC).timestamp(),
        admin=True,
    )
    assert second == ApiKey(name="second", digest=hashlib.sha256(b"second").digest())


@pytest.mark.parametrize(
    ("written", "moment"),
    [
        ("2027-02-01", datetime(2027, 2, 1, tzinfo=UTC)),
        ("2027-02-01T10:00:00", datetime(2027, 2, 1, 10, tzinfo=UTC)),
        ("2027-02-01T10:00:00+02:00", datetime(2027, 2, 1, 8, tzinfo=UTC)),
    ],
)
@pytest.mark.parametrize("suffix", ["yaml", "toml", "json"])
def test_days_and_times(tmp_path: Path, suffix: str, written: str, moment: datetime) -> None:
    text = {
        "yaml": f"keys:\n  - name: a\n    key: b\n    expires: {written}\n",
        "toml": f'[[keys]]\nname = "a"\nkey = "b"\nexpires = {written}\n',
        "json": json.dumps({"keys": [{"name": "a", "key": "b", "expires": written}]}),
    }
    (key,) = read_keys(write(tmp_path, text[suffix], f"keys.{suffix}"))
    assert key.expires == moment.timestamp()


def entry(**fields: Any) -> dict[str, Any]:
    return {"keys": [{"name": "good", "key": "g"}, {"name": "bad", "key": "very-secret", **fields}]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (entry(weight=0), r"entry 2 \('bad'\): weight: "),
        (entry(weight="2"), r"entry 2 \('bad'\): weight: "),
        (entry(weight=1e9), r"entry 2 \('bad'\): weight: "),
        (entry(priority=1.5), r"entry 2 \('bad'\): priority: "),
        (entry(priority=2**63), r"entry 2 \('bad'\): priority: "),
        (entry(requests_per_minute=0), r"entry 2 \('bad'\): requests_per_minute: .*1"),
        (entry(requests_per_minute=True), r"entry 2 \('bad'\): requests_per_minute: "),
        (entry(requests_per_minute=1.5), r"entry 2 \('bad'\): requests_per_minute: "),
        (entry(tokens_per_minute=-1), r"entry 2 \('bad'\): tokens_per_minute: "),
        (entry(tokens_per_minute=10**18), r"entry 2 \('bad'\): tokens_per_minute: "),
        (entry(max_concurrency=0), r"entry 2 \('bad'\): max_concurrency: "),
        (entry(expires="tomorrow"), r"entry 2 \('bad'\): expires: .*ISO 8601"),
        (entry(expires=5), r"entry 2 \('bad'\): expires: .*ISO 8601"),
        (entry(admin="yes"), r"entry 2 \('bad'\): admin: "),
        (entry(colour="red"), r"entry 2 \('bad'\): .*unknown field `colour`"),
        (entry(sha256=HASH), r"entry 2 \('bad'\): key: give the key or its sha256, and not both"),
        (entry(key=None), r"entry 2 \('bad'\): key: give the key"),
        (entry(key=""), r"entry 2 \('bad'\): key: "),
        (entry(key="with blank"), r"entry 2 \('bad'\): key: "),
        (entry(key=12345), r"entry 2 \('bad'\): key: "),
        (entry(key="g"), r"entry 2 \('bad'\): key: it is the key of 'good', too"),
        (entry(key=None, sha256="very-secret"), r"entry 2 \('bad'\): sha256: "),
        (entry(key=None, sha256=hashlib.sha256(b"").hexdigest()), r"entry 2 \('bad'\): sha256: .*empty"),
        (entry(name="good"), r"entry 2 \('good'\): name: another entry has it"),
        (entry(name="api-key-1"), r"entry 2 \('api-key-1'\): name: "),
        (entry(name="a b"), r"entry 2 \('a b'\): name: "),
        (entry(name=5), r"entry 2: name: "),
        (entry(name="x" * 65), "entry 2 .*name: "),
        ({"keys": [{"key": "very-secret"}]}, "entry 1: .*missing required field `name`"),
        ({"keys": ["very-secret"]}, "entry 1: must be a mapping"),
        ({"keys": []}, f"keys: must be a list of 1 to {MAX_KEYS} entries"),
        ({"keys": [{"name": f"n{n}", "key": f"k{n}"} for n in range(MAX_KEYS + 1)]}, f"keys: .*{MAX_KEYS}"),
        ({"keys": {"good": "g"}}, "keys: must be a list"),
        ({}, "keys: must be a list"),
        ({"keys": [], "limits": 1}, "unknown field 'limits'"),
        ([], "must hold a mapping"),
        ("{", "keys.json"),
    ],
)
def test_what_is_wrong_is_one_line_without_the_key(tmp_path: Path, content: object, words: str) -> None:
    file = write(tmp_path, content)
    with pytest.raises(BadSettings, match=words) as caught:
        load_settings({"api_keys_file": str(file)})
    message = str(caught.value)
    assert message.startswith(f"--api-keys-file {file}: ")
    assert "\n" not in message
    assert "very-secret" not in message


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    for weight in (".nan", ".inf"):
        file = write(tmp_path, f"keys: [{{name: a, key: b, weight: {weight}}}]", "keys.yaml")
        with pytest.raises(BadSettings, match="weight"):
            read_keys(file)


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        ("yaml", "keys:\n  - name: a\n    key: very-secret: x\n"),
        ("yaml", "keys:\n  - name: a\n    key: *very-secret\n"),
        ("yaml", "keys:\n  - name: a\n    key: !very-secret\n"),
        ("toml", '[[keys]]\nname = "a"\nkey = very-secret\n'),
        ("json", '{"keys": [{"name": "a", "key": "very-secret]}'),
    ],
)
def test_a_file_that_cannot_be_read_is_not_quoted(tmp_path: Path, suffix: str, text: str) -> None:
    with pytest.raises(BadSettings, match=r"line [13]") as caught:
        read_keys(write(tmp_path, text, f"keys.{suffix}"))
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_documented_file(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    example = page.partition("```yaml\nkeys:")[2].partition("```")[0]
    operator, batch = read_keys(write(tmp_path, "keys:" + example, "keys.yaml"))
    assert (operator.admin, operator.digest) == (True, hashlib.sha256(b"in-plain-if-you-like").digest())
    assert (batch.admin, batch.weight, batch.priority, batch.max_concurrency) == (False, 0.5, 10, 8)
    assert batch.expires is not None


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(BadSettings, match=re.escape("--api-keys-file: ")):
        load_settings({"api_keys_file": "/nowhere.yaml"})
