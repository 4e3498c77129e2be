"""Fields that /v1/completions and /v1/chat/completions share."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, WithJsonSchema, model_validator

from server.errors import InvalidRequest
from server.protocol.base import Body, Count, Int, TokenId, at_most
from server.protocol.structured import StructureFields

MAX_N = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 2048
"""Bounds what a request holds. A stop of 2,000 characters is served (fault A11: a long stop must delay nothing)."""
MAX_LOGPROBS = 20
MAX_LOGPROB_IDS = 128
MAX_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 1024
MAX_ALLOWED_IDS = 262_144
TOKEN_KEY = re.compile(r"[0-9]{1,10}")


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _token_keys(value: object) -> object:
    """JSON keys are strings: the ids in them must be plain decimal numbers."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} entries are allowed, not {len(value)}")
    for key in value:
        if not (isinstance(key, str) and TOKEN_KEY.fullmatch(key)):
            raise ValueError("every key must be a token id in decimal digits")
    return {int(key): bias for key, bias in value.items()}


StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[
    list[StopString],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_as_list),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                {
                    "type": "array",
                    "maxItems": MAX_STOPS,
                    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                },
            ]
        }
    ),
]
LogitBias = Annotated[
    dict[int, Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_token_keys),
    WithJsonSchema(
        {"type": "object", "maxProperties": MAX_BIASES, "additionalProperties": {"type": "number"}},
    ),
]
BadWord = Annotated[str, StringConstraints(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
Metadata = Annotated[
    dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
    Field(max_length=16),
]
Label = Annotated[str, StringConstraints(max_length=128)]
CacheKey = Annotated[str, StringConstraints(max_length=1024)]
Tier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
SaltString = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]*$")]

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # samplers of other servers
    "typical_p": (1,),
    "top_a": (0,),
    "tfs": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "top_n_sigma": (-1, 0),
    "dynatemp_range": (0,),
    "adaptive_p": (),
    "adaptive_target": (-1,),
    "samplers": (),
    "repeat_penalty": (1,),
    "n_predict": (),
    "watermark": (False,),
    "custom_logit_processor": (),
    "logits_processors": (),
    "custom_params": ({},),
    "vllm_xargs": ({},),
    # output
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_token_offsets": (False,),
    "return_tokens": (False,),
    "return_progress": (False,),
    "response_fields": ([],),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "t_max_predict_ms": (0, -1),
    "no_stop_trim": (False,),
    "stop_regex": ([],),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
    # input that this server does not take
    "prompt_embeds": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "kv_transfer_params": ({},),
    "routed_dp_rank": (),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "lora": ([],),
    "lora_path": (),
    "adapter_id": (),
}
"""Refused with 400 unless the value asks for nothing."""
BEAMS: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "beam_width": (),
    "length_penalty": (1,),
    "early_stopping": (False,),
}
"""Of /v1/completions only."""


class StreamFields(Body):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False
    """Accepted; no obfuscation is sent."""


class SamplingFields(Body):
    """How to draw tokens. A value that is absent comes from the model's generation_config, else it is neutral."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    min_tokens: Count = 0
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1, le=2**31 - 1, description="0 and -1 switch it off")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: LogitBias = Field(default_factory=dict)
    seed: Annotated[Int, Field(ge=-(2**63), le=2**63 - 1, description="-1: as if absent")] | None = None
    stop: Stops = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=128)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    bad_words: list[BadWord] = Field(default_factory=list, max_length=MAX_BAD_WORDS)
    allowed_token_ids: (
        Annotated[
            list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_IDS, fail_fast=True), at_most(MAX_ALLOWED_IDS)
        ]
        | None
    ) = None
    priority: Annotated[Int, Field(ge=-(2**63), le=2**63 - 1, description="lower runs first")] = 0
    cache_salt: SaltString | None = None
    user: Annotated[str, StringConstraints(max_length=1024)] = ""


class GenerationRequest(SamplingFields, StructureFields):
    """How to generate, and what to tell of it."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED

    n: Annotated[Int, Field(ge=1, le=MAX_N)] = 1
    best_of: Annotated[Int, Field(ge=1, le=MAX_N)] | None = None
    logprob_token_ids: Annotated[list[TokenId], Field(max_length=MAX_LOGPROB_IDS)] = Field(default_factory=list)
    prompt_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_prompt_text: bool = False
    timings_per_token: Annotated[bool, Field(description="llama.cpp's timings, in the answer and every chunk")] = False
    stream: bool = False
    stream_options: StreamFields | None = None
    stream_interval: Annotated[Int, Field(ge=1, le=1024)] = 1
    truncate_prompt_tokens: (
        Annotated[Int, Field(ge=-1, le=2**31 - 1, description="-1: to what the context allows")] | None
    ) = None
    truncation_side: Annotated[str, StringConstraints(pattern="^(left|right)$")] = "left"
    request_id: CacheKey | None = None
    rid: CacheKey | None = None
    session_id: CacheKey | None = None
    store: bool = False
    metadata: Metadata = Field(default_factory=dict)
    service_tier: Tier | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: CacheKey | None = None
    prompt_cache_options: Annotated[dict[str, Any], Field(max_length=16)] = Field(default_factory=dict)
    prompt_cache_retention: Label | None = None
    moderation: Annotated[dict[str, Any], Field(max_length=16)] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequest(f"best_of: must not be below n ({self.best_of} < {self.n})", param="best_of")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise InvalidRequest("best_of: above n not allowed with stream: true", param="best_of")
        if self.logprob_token_ids and not self.scored:
            raise InvalidRequest("logprob_token_ids: only allowed with logprobs", param="logprob_token_ids")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: only allowed with stream: true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs: not allowed with stream: true", param="prompt_logprobs")
        return self

    @property
    def scored(self) -> bool:
        """Whether logprobs of generated tokens are asked for."""
        asked = getattr(self, "logprobs", None)
        return asked is not None and asked is not False

    @property
    def sequences(self) -> int:
        """Generated for each prompt; `n` of them are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def service_fields(self) -> dict[str, str]:
        """What an answer says of a `service_tier`: there is only one."""
        return {} if self.service_tier is None else {"service_tier": "default"}

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_in_every_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats
