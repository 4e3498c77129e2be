"""POST /v1/completions: the request."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from server.errors import InvalidRequest
from server.protocol.base import Count, Int
from server.protocol.sampling import MAX_LOGPROBS, UNSUPPORTED, GenerationRequest

MAX_PROMPTS = 1024
MAX_CHOICES = 1024
"""Prompts times n of one request."""
MAX_BEAMS = 16
PLAIN: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "logprob_token_ids": ([],),
    "prompt_logprobs": (None,),
    "best_of": (None,),
    "stop": ([],),
    "structure": (None,),
    "temperature": (None, 0, 1),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (None,),
}
"""What use_beam_search goes together with: the model's own distribution, and beams that come as a whole."""
BEAM_FIELDS = {"beam_width": None, "length_penalty": 1, "early_stopping": False}
"""What says nothing without use_beam_search."""
MAX_IDS = 2**20
"""Token ids of one prompt, before the model's context is looked at."""
OF_CHATS: dict[str, tuple[Any, ...]] = {
    "messages": (),
    "max_completion_tokens": (),
    "top_logprobs": (0,),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (False,),
    "include_reasoning": (True,),
    "separate_reasoning": (False,),
    "stream_reasoning": (True,),
    "reasoning_format": ("auto", "none"),
}
"""Fields of a chat that ask for what a completion cannot give."""


def _is_ids(value: list[Any]) -> bool:
    """A non-empty list of integers, none of them a bool. Written for lists of millions."""
    return bool(value) and set(map(type, value)) == {int}


def _check_ids(ids: list[int]) -> list[int]:
    if min(ids) < 0 or max(ids) > 2**31 - 1:
        raise ValueError("token ids must lie in the vocabulary")
    return ids


def parse_prompt(value: object, *, most: int = MAX_PROMPTS) -> list[str | list[int]]:
    """One prompt per entry, from a string, a list of token ids, or a list of either. Raises ValueError."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not value:
        raise ValueError("must not be an empty list")
    # Lengths come first: a list of millions takes its time even where nobody wants it.
    one = type(value[0]) is int
    if not one and len(value) > most:
        raise ValueError(f"at most {most} prompts are allowed, not {len(value)}")
    for ids in [value] if one else value:
        if isinstance(ids, list) and len(ids) > MAX_IDS:
            raise ValueError(f"at most {MAX_IDS} token ids are allowed, not {len(ids)}")
    if _is_ids(value):
        return [_check_ids(value)]
    if all(isinstance(entry, str) for entry in value):
        return list(value)
    if all(isinstance(entry, list) and _is_ids(entry) for entry in value):
        return [_check_ids(entry) for entry in value]
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists, none empty")


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(parse_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]


class CompletionRequest(GenerationRequest):
    """Continue one prompt or several; choice p * n + i is sequence i of prompt p."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED | {
        "suffix": ("",),
        "tools": ([],),
        "documents": ([],),
        "chat_template": (),
        "modalities": (["text"],),
        "audio": (),
        **OF_CHATS,
    }

    prompt: Prompts
    max_tokens: Count = 16
    logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False
    use_beam_search: bool = False
    beam_width: Annotated[Int, Field(ge=1, le=MAX_BEAMS, description="default: n")] | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] = 1.0
    early_stopping: bool | Literal["never"] = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens: must not exceed max_tokens ({self.min_tokens} > {self.max_tokens})", param="min_tokens"
            )
        if len(self.prompt) * self.sequences > MAX_CHOICES:
            name = "n" if self.sequences == self.n else "beam_width" if self.use_beam_search else "best_of"
            raise InvalidRequest(
                f"{name}: {len(self.prompt)} prompts times {self.sequences} exceed the limit of {MAX_CHOICES} choices",
                param=name,
            )
        if self.use_beam_search:
            for name, accepted in PLAIN.items():
                if getattr(self, name) not in accepted:
                    raise InvalidRequest(f"{name}: not allowed with use_beam_search", param=name)
            if self.n > MAX_BEAMS:
                raise InvalidRequest(f"n: at most {MAX_BEAMS} with use_beam_search, not {self.n}", param="n")
            if self.beams < self.n:
                raise InvalidRequest(f"beam_width: must not be below n ({self.beams} < {self.n})", param="beam_width")
        else:
            for name, neutral in BEAM_FIELDS.items():
                if getattr(self, name) != neutral:
                    raise InvalidRequest(f"{name}: only allowed with use_beam_search", param=name)
        if self.echo and len(self.stop) > 1:
            raise InvalidRequest("echo: not supported with a list of stop strings", param="echo")
        return self

    @property
    def beams(self) -> int:
        """Of a search."""
        return self.n if self.beam_width is None else self.beam_width

    @property
    def sequences(self) -> int:
        return self.beams if self.use_beam_search else super().sequences
