"""Log lines: one of text, or one JSON object. On stderr; never a key, and a prompt only where --log-requests is given.

A line may have fields (`extra={"fields": …}`). JSON has them beside the message; text appends, as name=value, those
that the message does not name itself:

    log.info("%(method)s %(status)d", fields, extra={"fields": fields})      GET 200 request_id=1f ttft_ms=31.5
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any


class TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s  %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        pairs = [f" {name}={_word(value)}" for name, value in fields.items() if f"%({name})" not in record.msg]
        return super().formatMessage(record) + "".join(pairs)


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _word(value: object) -> str:
    """A value that cannot be taken for two, or for another line: in quotes where it is no plain word."""
    text = str(value)
    plain = text.isprintable() and text.isascii() and not set(text) & set(' "=')
    return text if plain and text else json.dumps(text)


def start_logging(level: str, shape: str) -> None:
    """Send everything to stderr. uvicorn's own lines only where they warn: the access log is ours."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if shape == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("octavo").setLevel(level.upper())
