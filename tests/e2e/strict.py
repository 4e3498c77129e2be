"""One strict validator for whatever the SDKs read. They make objects of answers without looking at them."""

from __future__ import annotations

from typing import Any

import pydantic


class Strict:
    """Mixed into a client of the openai or anthropic SDK, sync or async: every answer and every event has to be what
    the SDK's own type of it says, with nothing converted."""

    checked = 0
    """How many have been."""

    def _process_response_data(self, *, data: Any, cast_to: Any, **more: Any) -> Any:
        if data is not None:
            pydantic.TypeAdapter(cast_to).validate_python(_as_typed(data, cast_to), strict=True)
            self.checked += 1
        return super()._process_response_data(data=data, cast_to=cast_to, **more)  # type: ignore[misc]


def _as_typed(data: Any, cast_to: Any) -> Any:
    """The SDK has one type for completions and their chunks, and it knows no null for a choice that goes on, which
    OpenAI and everybody else sends. Chunks with choices have no usage."""
    if getattr(cast_to, "__name__", "") != "Completion" or data.get("usage") is not None:
        return data
    choices = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in data["choices"]]
    return {**data, "choices": choices}
