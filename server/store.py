"""ResponseStore: what /v1/responses may be asked for again. Bounded in number, bytes and age, and apart for every key.

get, and being the previous one of a new response, makes a record young; the oldest go first
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from server.errors import NotFound

MAX_RESPONSES = 4096
MAX_BYTES = 64 * 2**20
MAX_SECONDS = 24 * 3600.0
RECORD_BYTES, ID_BYTES = 1024, 512
"""What a record takes beside its texts, and the id of an item."""


@dataclass(frozen=True, slots=True)
class Record:
    """One response. Texts are JSON, since that is the smallest form of them and the only one that is ever sent."""

    id: str
    owner: bytes
    """Of the key that made it; nobody else finds it."""
    context: bytes
    """The items that it answers, earlier responses included: a list."""
    response: bytes
    """The whole object."""
    item_ids: tuple[str, ...] = ()
    """Of the items in both, by which later requests may refer to them."""

    @property
    def size(self) -> int:
        return RECORD_BYTES + len(self.context) + len(self.response) + ID_BYTES * len(self.item_ids)

    @property
    def items(self) -> list[dict[str, Any]]:
        """Everything said so far: what a later response goes on from."""
        items: list[dict[str, Any]] = orjson.loads(self.context) + orjson.loads(self.response)["output"]
        return items


class ResponseStore:
    """Used on the event loop's thread only."""

    def __init__(
        self,
        max_bytes: int = MAX_BYTES,
        max_responses: int = MAX_RESPONSES,
        max_seconds: float = MAX_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bytes = 0
        self._records: OrderedDict[str, tuple[float, Record]] = OrderedDict()
        """By id, the longest unused first; with the time at which it ends."""
        self._holders: dict[tuple[bytes, str], dict[str, None]] = {}
        """By owner and id of an item, the responses that hold it, the newest last: a response holds those that it goes
        on from too, and clients may name their own."""
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._max_seconds = max_seconds
        self._clock = clock

    def __len__(self) -> int:
        return len(self._records)

    def put(self, record: Record) -> None:
        """Keep it, and let go of others where that is too much. What alone is too large isn't kept."""
        if record.size > self._max_bytes:
            return
        now = self._clock()
        self._records[record.id] = now + self._max_seconds, record
        self.bytes += record.size
        for item in record.item_ids:
            self._holders.setdefault((record.owner, item), {})[record.id] = None
        while self._records:
            end, oldest = next(iter(self._records.values()))
            if self.bytes <= self._max_bytes and len(self) <= self._max_responses and end > now:
                break
            self._remove(oldest)

    def get(self, id: str, owner: bytes, param: str = "response_id") -> Record:
        """Raises NotFound, also for another key's. `param`: the field that holds the id."""
        end, record = self._records.get(id, (0.0, None))
        if record is not None and end <= self._clock():
            self._remove(record)
            record = None
        if record is None or record.owner != owner:
            raise NotFound(
                f"{param}: there is no stored response {id[:128]!a}; it was not stored, or it has been let go",
                param=param,
                code="response_not_found",
            )
        self._records.move_to_end(id)
        return record

    def delete(self, id: str, owner: bytes) -> None:
        """Raises NotFound."""
        self._remove(self.get(id, owner))

    def item(self, id: str, owner: bytes, param: str) -> dict[str, Any]:
        """An item of a stored response. Raises NotFound."""
        holders = self._holders.get((owner, id))
        if not holders:
            raise NotFound(f"{param}: there is no stored item {id[:128]!a}", param=param, code="item_not_found")
        return next(item for item in self.get(next(reversed(holders)), owner, param).items if item.get("id") == id)

    def _remove(self, record: Record) -> None:
        del self._records[record.id]
        self.bytes -= record.size
        for item in set(record.item_ids):
            holders = self._holders[record.owner, item]
            del holders[record.id]
            if not holders:
                del self._holders[record.owner, item]
