"""POST /v1/responses and /v1/responses/input_tokens: the requests."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, StringConstraints, model_validator

from server.errors import Unsupported
from server.protocol.base import Body, Int, Positive, at_most, fault, variant
from server.protocol.items import Item, Items, parse_items
from server.protocol.sampling import BEAMS, MAX_LOGPROBS, UNSUPPORTED, Metadata, SamplingFields
from server.protocol.structured import StructureFields
from server.protocol.tools import MAX_TOOLS, CustomFormat

Name = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
ResponseId = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _hosted(value: object) -> object:
    """Refuses tools that a server would have to run, before anything else about them is looked at."""
    for number, tool in enumerate(value if isinstance(value, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in ("function", "custom"):
            where = f"tools.{number}.type"
            raise Unsupported(
                f"{where}: this server runs no tools itself; of type function or custom, not {kind[:40]!a}",
                param=where,
                code="unsupported_value",
            )
    return value


class FlatTool(Body):
    """A tool with its fields at the top."""

    type: Literal["function", "custom"]
    name: Name
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: Annotated[CustomFormat, Field(description="of a custom tool")] | None = None


class TextFormat(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                *(variant("type", kind) for kind in ("text", "json_object")),
                variant("type", "json_schema", "name", "schema"),
            ]
        }
    )

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.type == "json_schema" and (self.name is None or self.schema_ is None):
            raise fault("schema" if self.schema_ is None else "name", "json_schema needs a name and a schema")
        return self


class TextFields(Body):
    format: TextFormat | None = None
    verbosity: Annotated[Literal["low", "medium", "high"], Field(description="for templates that read it")] | None = (
        None
    )


Summary = Annotated[
    Literal["auto", "concise", "detailed"], Field(description="accepted: reasoning comes whole, as reasoning_text")
]


class ReasoningFields(Body):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"context": ("auto",), "mode": ("auto", "standard")}

    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class ResponseStreamFields(Body):
    """`stream_options`."""

    include_obfuscation: Annotated[bool, Field(description="accepted; no obfuscation is sent")] = False


class InputFields(SamplingFields, StructureFields):
    """What makes up the prompt; /v1/responses/input_tokens counts its tokens."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **UNSUPPORTED,
        **BEAMS,
        "background": (False,),
        "background_options": (),
        "conversation": (),
        "prompt": (),
        "context_management": ([],),
        "image": (),
        "access_programs": ([],),
        "truncation": ("disabled",),
        "n": (1,),
        "best_of": (1,),
        "prompt_logprobs": (),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "return_prompt_text": (False,),
        "timings_per_token": (False,),
        "logprob_token_ids": ([],),
        "stream_interval": (1,),
        "truncate_prompt_tokens": (),
        "documents": ([],),
        "chat_template": (),
        "echo": (False,),
        "messages": (),
        "logprobs": (False,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "reasoning_effort": (),
        "modalities": (["text"],),
        "audio": (),
        "suffix": ("",),
    }

    input: Annotated[list[Item], PlainValidator(parse_items, json_schema_input_type=str | Items)]
    instructions: Annotated[str, Field(description="a system message; later responses don't inherit it")] | None = None
    previous_response_id: ResponseId | None = None
    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS), BeforeValidator(_hosted), at_most(MAX_TOOLS)] = Field(
        default_factory=list
    )
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningFields = Field(default_factory=ReasoningFields)
    text: TextFields = Field(default_factory=TextFields)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=64)


class ResponseRequest(InputFields):
    """Answer a conversation of items."""

    max_output_tokens: Positive | None = None
    max_tokens: Annotated[Positive, Field(description="the same, by the name it has in a chat")] | None = None
    max_tool_calls: Annotated[Positive, Field(description="of hosted tools, which there are none of")] | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        default_factory=list, max_length=16, description="reasoning comes in plain, so there is nothing encrypted"
    )
    store: bool = True
    stream: bool = False
    stream_options: ResponseStreamFields | None = None
    metadata: Metadata = Field(default_factory=dict)
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = None
    safety_identifier: Annotated[str, StringConstraints(max_length=128)] | None = None
    prompt_cache_key: Annotated[str, StringConstraints(max_length=1024)] | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise fault("stream_options", "only allowed with stream: true")
        if self.limit is not None and self.min_tokens > self.limit:
            raise fault("min_tokens", f"must not exceed max_output_tokens ({self.min_tokens})")
        return self

    @property
    def limit(self) -> int | None:
        """Generated tokens at most; None: to the end of the context."""
        return self.max_tokens if self.max_output_tokens is None else self.max_output_tokens

    @property
    def logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in self.include
