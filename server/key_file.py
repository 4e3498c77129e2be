"""--api-keys-file: who may come in, and how much of the server each of them gets.

    keys:
      - name: alice
        sha256: 5e88…             # or `key`, in plain
        weight: 2
        priority: 0
        requests_per_minute: 600
        tokens_per_minute: 200000
        max_concurrency: 8
        expires: 2027-01-31T12:00:00Z
        admin: true

Messages name an entry by its name and a field by its own; what a field holds is never repeated, it may be a key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from server.settings import BadSettings, read_file

FLAG = "--api-keys-file"
PLAIN_PREFIX = "api-key-"
"""Of the names of keys that have none, those of --api-key."""
MAX_KEYS = 4096
"""Each is compared with the key of every request."""
MAX_PER_MINUTE = 10**12

PerMinute = Annotated[int, Meta(ge=1, le=MAX_PER_MINUTE)]


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key as far as the server knows it."""

    name: str
    digest: bytes
    """SHA-256 of the key."""
    weight: float = 1.0
    """Share of the service, against other keys' weights."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = None
    """Sequences at a time."""
    priority: int = 0
    """The least that its requests may ask for; less goes before more, whoever asks."""
    expires: float | None = None
    """Seconds since 1970."""
    admin: bool = False
    """May see everybody's usage, and put the server to sleep."""


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry as it is written."""

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[!-~]+\Z")]
    key: Annotated[str, Meta(min_length=1, max_length=512, pattern=r"^[!-~]+\Z")] | None = None
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}\Z")] | None = None
    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    max_concurrency: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    priority: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] = 0
    expires: Any = None
    admin: bool = False


def digest(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).digest()


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a YAML, TOML or JSON file. Raises BadSettings: one line that names entry and field."""
    content = read_file(path, FLAG)
    entries = content.pop("keys", None)
    for name in content:
        raise BadSettings(f"{FLAG} {path}: unknown field {name[:64]!a}; the file holds a list `keys`")
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_KEYS:
        raise BadSettings(f"{FLAG} {path}: keys: must be a list of 1 to {MAX_KEYS} entries")
    keys: dict[str, ApiKey] = {}
    digests: dict[bytes, str] = {}
    for number, entry in enumerate(entries, 1):
        where = f"{FLAG} {path}: entry {number}"
        if isinstance(entry, dict) and isinstance(entry.get("name"), str):
            where += f" ({entry['name'][:64]!a})"
        try:
            key = _key(entry)
            if key.name in keys:
                raise ValueError("name: another entry has it already")
            if key.digest in digests:
                raise ValueError(f"key: it is the key of {digests[key.digest]!a}, too")
        except ValueError as error:
            raise BadSettings(f"{where}: {error}") from None
        keys[key.name], digests[key.digest] = key, key.name
    return tuple(keys.values())


def plain_keys(keys: Iterable[str]) -> tuple[ApiKey, ...]:
    """The keys of --api-key: no limits, a weight of 1, and a name that says which it is."""
    return tuple(ApiKey(name=f"{PLAIN_PREFIX}{number}", digest=digest(key)) for number, key in enumerate(keys, 1))


def _key(entry: object) -> ApiKey:
    """Raises ValueError: `field: what is wrong`."""
    if not isinstance(entry, dict):
        raise ValueError("must be a mapping with `name` and `key` or `sha256`")
    fields = {str(name).replace("-", "_"): value for name, value in entry.items()}
    try:
        given = msgspec.convert(fields, _Entry)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        field = f"{place[:-1]}: " if place else ""
        raise ValueError(f"{field}{message[0].lower()}{message[1:]}") from None
    if given.name.startswith(PLAIN_PREFIX):
        raise ValueError(f"name: those that begin with {PLAIN_PREFIX} are for the keys of --api-key")
    if (given.key is None) == (given.sha256 is None):
        raise ValueError("key: give the key or its sha256, and not both")
    hashed = digest(given.key) if given.key is not None else bytes.fromhex(given.sha256 or "")
    if hashed == digest(""):
        raise ValueError("sha256: it is that of an empty key")
    limits = ("name", "weight", "requests_per_minute", "tokens_per_minute", "max_concurrency", "priority", "admin")
    return ApiKey(digest=hashed, expires=_moment(given.expires), **{name: getattr(given, name) for name in limits})


def _moment(value: object) -> float | None:
    """Seconds since 1970. A time without a zone is UTC, a day its first second."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError("expires: must be a day or a time as ISO 8601 has it") from None
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime.combine(value, time())
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise ValueError("expires: must be a day or a time as ISO 8601 has it")
    return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
