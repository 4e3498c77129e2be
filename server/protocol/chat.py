"""POST /v1/chat/completions: the request and its messages."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, PlainValidator, StringConstraints, WithJsonSchema, model_validator

from server.errors import InvalidRequest
from server.protocol.base import Body, Int, Positive, at_most, fault, variant
from server.protocol.parts import joined
from server.protocol.sampling import BEAMS, MAX_LOGPROBS, UNSUPPORTED, GenerationRequest
from server.protocol.tools import KINDS, ToolFields

MAX_MESSAGES = 4096
MAX_DOCUMENTS = 1024
MAX_TEMPLATE_CHARS = 2**16
"""Of a template that comes with a request."""
TEXT_PARTS = {"text": "text", "refusal": "refusal"}
"""Kinds of content parts that are text, and the field that holds it."""


Content = Annotated[
    str,
    PlainValidator(lambda value: joined(value, TEXT_PARTS)),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
            ]
        }
    ),
]


CallName = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class FunctionCall(Body):
    name: CallName
    arguments: str = ""


class CustomCall(Body):
    name: CallName
    input: str = ""


class ToolCall(Body):
    """A call that an assistant made earlier in the conversation."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["function"]}, KINDS[1]]})

    id: str = ""
    type: Literal["function", "custom"] = "function"
    function: FunctionCall | None = None
    custom: CustomCall | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.function is None) != (self.type == "custom") or (self.custom is None) != (self.type == "function"):
            raise fault(self.type, f"a call of type {self.type} has this field, and no other kind's")
        return self


INSTEAD = ("tool_calls", "function_call", "reasoning_content", "reasoning", "refusal")
"""What an assistant's message may hold instead of content."""


class Message(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                *(variant("role", role, "content") for role in ("developer", "system", "user", "assistant")),
                *(variant("role", "assistant", name) for name in INSTEAD),
                variant("role", "tool", "content", "tool_call_id"),
                variant("role", "function"),
            ]
        }
    )

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"audio": ()}

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: Annotated[str, StringConstraints(max_length=256)] | None = None
    reasoning_content: str | None = None
    reasoning: Annotated[str, Field(description="the same as reasoning_content")] | None = None
    refusal: Annotated[str, Field(description="of an assistant, instead of content")] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: str | None = None
    function_call: Annotated[FunctionCall, Field(description="deprecated: tool_calls")] | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.role == "tool" and self.tool_call_id is None:
            raise fault("tool_call_id", "a tool message needs tool_call_id")
        if self.role != "assistant" and (self.tool_calls or self.function_call):
            raise fault("tool_calls", f"a {self.role} message makes no calls")
        if self.content is None and self.role not in ("assistant", "function"):
            raise fault("content", f"a {self.role} message needs content")
        if self.content is None and self.role == "assistant" and not any(getattr(self, name) for name in INSTEAD):
            raise fault("content", "an assistant message needs content or tool_calls")
        if self.tool_calls and self.function_call:
            raise fault("function_call", "not allowed together with tool_calls")
        return self


class ChatFields(ToolFields):
    """What turns messages into a prompt; /tokenize takes it too."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=64)
    add_special_tokens: bool = False
    chat_template: Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEMPLATE_CHARS)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS), at_most(MAX_DOCUMENTS)] = Field(
        default_factory=list
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @model_validator(mode="after")
    def _end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message: not allowed together with add_generation_prompt",
                param="continue_final_message",
            )
        return self

    @property
    def generation_prompt(self) -> bool:
        """Whether the template opens the assistant's turn: yes, unless the last message is to be continued."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt


CHAT_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "stream_reasoning": (True,),
    "suffix": ("",),
}


class Prediction(Body):
    """What much of the answer is expected to be."""

    type: Literal["content"]
    content: Content


class ChatRequest(ChatFields, GenerationRequest):
    """Answer a conversation."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED | CHAT_UNSUPPORTED | BEAMS

    max_completion_tokens: Positive | None = None
    max_tokens: Annotated[Positive, Field(description="deprecated: max_completion_tokens")] | None = None
    echo: bool = False
    verbosity: Literal["low", "medium", "high"] | None = None
    prediction: Prediction | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include_reasoning: Annotated[bool, Field(description="false: reasoning is left out of the answer")] = True
    separate_reasoning: Annotated[bool, Field(description="false: reasoning stays in the content")] = True
    reasoning_format: Annotated[
        Literal["auto", "deepseek", "none"], Field(description="none: the same as separate_reasoning: false")
    ] = "auto"

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs: only allowed with logprobs: true", param="top_logprobs")
        if self.limit is not None and self.min_tokens > self.limit:
            raise InvalidRequest(
                f"min_tokens: must not exceed max_tokens ({self.min_tokens} > {self.limit})", param="min_tokens"
            )
        return self

    @property
    def splits_reasoning(self) -> bool:
        return self.separate_reasoning and self.reasoning_format != "none"

    @property
    def limit_field(self) -> str:
        """Which of the two fields `limit` comes from."""
        return "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"

    @property
    def limit(self) -> int | None:
        """Generated tokens at most; None: to the end of the context."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
