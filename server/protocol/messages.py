"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's requests."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationError,
    model_validator,
)

from server.errors import InvalidRequest, RequestError, Unsupported
from server.protocol.base import Body, Count, Int, at_most, fault, invalid, variant
from server.protocol.sampling import MAX_STOPS, SaltString, StopString
from server.protocol.tools import MAX_TOOLS

MAX_MESSAGES = 4096
MAX_BLOCKS = 4096
Name = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
Id = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class Block(Body):
    """`cache_control` and `citations` are accepted everywhere and not read: every prompt is cached."""

    cache_control: dict[str, Any] | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: list[Any] | dict[str, Any] | None = None


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str, Field(description="not read: thoughts come back in plain")] = ""


class RedactedBlock(Block):
    type: Literal["redacted_thinking"]
    data: Annotated[str, Field(description="not read: another server's")] = ""


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: Id
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    input: dict[str, Any]


def parse_text(value: object, param: str = "content") -> str:
    """A string, or text blocks joined without a separator. Raises ValueError, or Unsupported for images and such."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text blocks")
    blocks = [parse_block(block, {"text": TextBlock}, param, number) for number, block in enumerate(value)]
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))


Text = Annotated[str, PlainValidator(parse_text, json_schema_input_type=str | list[TextBlock])]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: Id
    content: Text = ""
    is_error: Annotated[bool, Field(description="the content says so to the model, or nothing does")] = False


AnyBlock = TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock
Blocks = Annotated[list[AnyBlock], Field(max_length=MAX_BLOCKS)]
USER: dict[str, type[Block]] = {"text": TextBlock, "tool_result": ToolResultBlock}
ASSISTANT: dict[str, type[Block]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedBlock,
    "tool_use": ToolUseBlock,
}


KINDS: dict[str, dict[str, type[Block]]] = {"user": USER, "assistant": ASSISTANT, "system": {"text": TextBlock}}


def parse_block(value: Any, kinds: dict[str, type[Block]], *place: str | int) -> Block:
    """One block of these kinds. Raises a RequestError that names it."""
    where = ".".join(map(str, place))
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequest(f"{where}: must be an object with a type", param=where)
    if kind not in kinds:
        known = ", ".join(kinds)
        raise Unsupported(
            f"{where}: a block of type {kind[:40]!a} is not supported here ({known} are)",
            param=where,
            code="unsupported_value",
        )
    try:
        return kinds[kind].model_validate(value)
    except ValidationError as error:
        raise invalid(error, *place) from None
    except RequestError as error:
        error.param, error.message = f"{where}.{error.param}", f"{where}.{error.message}"
        raise


def _holds(role: str) -> dict[str, Any]:
    """In a JSON schema: a message of this role holds a text, or blocks of its kinds."""
    blocks = {"type": "array", "items": {"properties": {"type": {"enum": list(KINDS[role])}}}}
    return {"properties": {"role": {"const": role}, "content": {"anyOf": [{"type": "string"}, blocks]}}}


class GivenMessage(Body):
    model_config = ConfigDict(json_schema_extra={"anyOf": list(map(_holds, KINDS))})

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Any], PlainValidator(lambda value: value, json_schema_input_type=str | Blocks)]

    @property
    def blocks(self) -> list[Block]:
        return self.content


GivenMessages = Annotated[list[GivenMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


def parse_messages(value: object) -> list[GivenMessage]:
    """Raises ValueError, or a RequestError that names the block."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        raise ValueError(f"must be a list of 1 to {MAX_MESSAGES} messages")
    return [_message(entry, number) for number, entry in enumerate(value)]


def _message(entry: Any, number: int) -> GivenMessage:
    place = "messages", number
    if not isinstance(entry, dict):
        raise ValueError(f"message {number} must be an object")
    try:
        message = GivenMessage.model_validate(entry)
        content: Any = message.content
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list) or len(content) > MAX_BLOCKS:
            where = f"messages.{number}.content"
            raise InvalidRequest(f"{where}: must be a string or a list of at most {MAX_BLOCKS} blocks", param=where)
        kinds = KINDS[message.role]
        blocks = [parse_block(block, kinds, *place, "content", at) for at, block in enumerate(content)]
    except ValidationError as error:
        raise invalid(error, *place) from None
    return message.model_copy(update={"content": blocks})


class MessageTool(Block):
    type: Literal["custom"] = "custom"
    name: Name
    description: str = ""
    input_schema: dict[str, Any]
    strict: bool = False


def _hosted(value: object) -> object:
    for number, tool in enumerate(value if isinstance(value, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            where = f"tools.{number}.type"
            raise Unsupported(
                f"{where}: this server runs no tools itself; only tools of type custom are accepted, not {kind[:40]!a}",
                param=where,
                code="unsupported_value",
            )
    return value


class ToolChoice(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                *(variant("type", kind, without="name") for kind in ("auto", "any", "none")),
                variant("type", "tool", "name"),
            ]
        }
    )

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> Self:
        if (self.name is None) == (self.type == "tool"):
            raise fault("name", "goes with type tool, and only with it")
        return self


class Thinking(Body):
    """Whether the model thinks is up to the template; where it does, its thoughts come as thinking blocks."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Count, Field(description="accepted; max_tokens is the only limit")] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: (
        Annotated[
            Literal["low", "medium", "high", "xhigh", "max"],
            Field(description="for templates that read reasoning_effort"),
        ]
        | None
    ) = None
    format: OutputFormat | None = None


class MessageMetadata(Body):
    user_id: Annotated[str, StringConstraints(max_length=1024)] = ""


class CountRequest(Body):
    """What makes up the prompt; /v1/messages/count_tokens counts its tokens."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "mcp_servers": ([],),
        "container": (),
        "context_management": ({},),
    }

    model: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
    messages: Annotated[list[GivenMessage], PlainValidator(parse_messages, json_schema_input_type=GivenMessages)]
    system: (
        Annotated[
            str, PlainValidator(lambda value: parse_text(value, "system"), json_schema_input_type=str | list[TextBlock])
        ]
        | None
    ) = None
    tools: Annotated[list[MessageTool], Field(max_length=MAX_TOOLS), BeforeValidator(_hosted), at_most(MAX_TOOLS)] = (
        Field(default_factory=list)
    )
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputFormat, Field(description="the older place of output_config.format")] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=64)


class MessagesRequest(CountRequest):
    """Answer a conversation, in Anthropic's words."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **CountRequest.unsupported,
        "n": (1,),
        "stop": ([],),
        "max_completion_tokens": (),
        "max_output_tokens": (),
        "response_format": ({"type": "text"},),
        "structured_outputs": (),
        "logprobs": (False,),
        "logit_bias": ({},),
        "min_p": (0,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
    }

    max_tokens: Annotated[Count, Field(description="0 computes the prompt only, for the prefix cache")]
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS), at_most(MAX_STOPS)] = Field(
        default_factory=list
    )
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[Int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stream: bool = False
    metadata: MessageMetadata = Field(default_factory=MessageMetadata)
    service_tier: Literal["auto", "standard_only"] | None = None
    priority: Annotated[Int, Field(ge=-(2**63), le=2**63 - 1, description="lower runs first")] = 0
    cache_salt: SaltString | None = None
