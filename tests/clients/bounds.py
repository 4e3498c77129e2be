"""What schemathesis does to a case before it is sent: answers are short, and half of the conversations make sense.

A random conversation hardly ever gets past validation, so that without this the model would not be asked at all.
What is sent is counted by route; the counts go to the file that COUNTED names."""

from __future__ import annotations

import atexit
import json
import os
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis

MODEL = "SmolLM2-135M-Instruct"
MAX_TOKENS = 4
WIDTHS = ("n", "best_of", "beam_width")
MAX_WIDTH = 4
LIMITS = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
"""The fields that bound an answer; where the first is not there, there may be no bound at all."""
COUNTED: Counter[str] = Counter()
atexit.register(lambda: Path(os.environ["COUNTED"]).write_text(json.dumps(COUNTED)))


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    COUNTED[f"{case.method.upper()} {case.path}"] += 1
    body, limits = case.body, LIMITS.get(case.path, ())
    if not isinstance(body, dict):
        return
    if zlib.crc32(json.dumps(body, default=repr).encode()) % 2:
        if isinstance(body.get("model"), str):
            body["model"] = MODEL
        if isinstance(body.get("messages"), list):
            body["messages"] = [{"role": "user", "content": "Hi."}]
    for names, most in ((limits, MAX_TOKENS), (WIDTHS, MAX_WIDTH)):
        for name in names:
            if isinstance(body.get(name), int | float) and body[name] > most:
                body[name] = most
    if limits and all(body.get(name) is None for name in limits) and case.path != "/v1/messages":
        body[limits[0]] = MAX_TOKENS
