"""POST /v1/embeddings: the request."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PlainValidator, StringConstraints, WithJsonSchema, model_validator

from server.protocol.base import Body, Int, fault
from server.protocol.completions import parse_prompt
from server.protocol.sampling import SaltString

MAX_INPUTS = 2048


def parse_input(value: object) -> list[str | list[int]]:
    """One text or list of token ids per entry, none empty. Raises ValueError."""
    inputs = parse_prompt(value, most=MAX_INPUTS)
    if "" in inputs:
        raise ValueError("must hold no empty text")
    return inputs


_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Inputs = Annotated[
    list[str | list[int]],
    PlainValidator(parse_input),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_INPUTS},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_INPUTS},
            ]
        }
    ),
]


class EmbeddingRequest(Body):
    """One vector for each input, in their order."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"messages": (), "prompt_embeds": (), "softmax": (False,)}

    input: Inputs
    model: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    dimensions: Annotated[Int, Field(ge=1, le=2**31 - 1)] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    normalize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: (
        Annotated[Int, Field(ge=-1, le=2**31 - 1, description="-1: to the model's context")] | None
    ) = None
    truncation_side: Annotated[Literal["left", "right"], Field(description="the end that is cut off")] = "right"
    priority: Annotated[Int, Field(ge=-(2**63), le=2**63 - 1, description="lower runs first")] = 0
    cache_salt: SaltString | None = None
    user: Annotated[str, StringConstraints(max_length=1024)] = ""

    @model_validator(mode="after")
    def _some(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            raise fault("truncate_prompt_tokens", "must be -1 or at least 1: an empty text has no vector")
        return self
