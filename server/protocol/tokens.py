"""POST /tokenize and /detokenize, each in the three shapes that clients of other servers send."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, Field, model_validator

from server.protocol.base import Body, TokenId, at_most, fault
from server.protocol.chat import CHAT_UNSUPPORTED, ChatFields

MAX_TOKENS = 1_000_000
PROMPT_UNSUPPORTED: dict[str, tuple[Any, ...]] = CHAT_UNSUPPORTED | {"truncate_prompt_tokens": ()}


class TokenizeRequest(Body):
    """Exactly one of `prompt` (vLLM), `content` (llama.cpp) and `inputs` (TGI); the answer has the same server's shape.

    With `messages` instead, the body is a `TokenizeChatRequest`.
    """

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": [name]} for name in ("prompt", "content", "inputs")]}
    )

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    content: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    inputs: str | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in ("prompt", "content", "inputs") if getattr(self, name) is not None]
        if len(given) != 1:
            raise fault([*given, "prompt"][0], "exactly one of prompt, messages, content and inputs is needed")
        return self


class TokenizeChatRequest(ChatFields):
    """The tokens of the prompt that a conversation becomes."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = PROMPT_UNSUPPORTED | {"prompt": (), "content": (), "inputs": ()}

    model: str | None = None
    return_token_strs: bool = False


class PromptRequest(ChatFields):
    """A conversation whose prompt is asked for, or counted; what only shapes the answer is not looked at."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = PROMPT_UNSUPPORTED

    model: str | None = None


class DetokenizeRequest(Body):
    """`tokens` (vLLM, llama.cpp) or `ids` (TGI)."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": [name]} for name in ("tokens", "ids")]})

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True), at_most(MAX_TOKENS)] | None = None
    ids: Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True), at_most(MAX_TOKENS)] | None = None
    skip_special_tokens: Annotated[bool, Field(description="vLLM keeps special tokens; so does this")] = False

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.tokens is None) == (self.ids is None):
            raise fault("tokens", "exactly one of tokens and ids is needed")
        return self
