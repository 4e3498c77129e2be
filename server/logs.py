"""Log lines: one of text, or one JSON object. On stderr; never a prompt, never a key."""

from __future__ import annotations

import logging
import sys
import time

import orjson


class TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s  %(message)s", "%Y-%m-%d %H:%M:%S")


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()


def start_logging(level: str, shape: str) -> None:
    """Send everything to stderr. uvicorn's own lines only where they warn: the access log is ours."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if shape == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("octavo").setLevel(level.upper())
