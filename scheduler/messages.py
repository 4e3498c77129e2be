"""Messages between the API process and the engine: length-prefixed msgpack over an inherited socket pair.

    API process                                   engine process
      EngineConfig ──────────────────────────────▶  (first message)
                   ◀──────────────────────────────  Progress*, then Ready or Failed
      Submit, Abort ─────────────────────────────▶
                   ◀──────────────────────────────  StepOutput (one per step, and one when only aborts were applied)

Times are CLOCK_MONOTONIC seconds, which all processes of a machine share.
"""

from __future__ import annotations

import signal
from enum import IntEnum
from typing import Literal

import msgspec

from model.embedding import EmbeddingConfig, Pooling
from model.params import Logprob, SamplingParams
from scheduler.config import EngineConfig

__all__ = [
    "COUNTERS",
    "STACKS",
    "Abort",
    "BeamSearch",
    "EmbeddingConfig",
    "EngineConfig",
    "EngineStats",
    "Failed",
    "FinishReason",
    "FromEngine",
    "Logprob",
    "Pooled",
    "Pooling",
    "Progress",
    "PromptLogprobs",
    "Ready",
    "RowError",
    "SamplingParams",
    "Started",
    "StepOutput",
    "Submit",
    "ToEngine",
]

STACKS = signal.SIGUSR2
"""What is said beside the socket: an engine that is hung shows its threads' stacks on stderr before it is killed."""


class FinishReason(IntEnum):
    """Why a sequence ended; RUNNING where it did not."""

    RUNNING = 0
    STOP = 1
    """A stop token id, which is the row's token; or no token (-1), where the request's masks left none to draw, its
    grammar is complete, or it wanted none but a vector."""
    LENGTH = 2
    ABORT = 3
    ERROR = 4


class BeamSearch(msgspec.Struct, frozen=True, kw_only=True):
    """Instead of drawing, find the likeliest continuations by the model's own distribution. Of the request's parameters
    only max_tokens, stop_token_ids and those about logprobs count."""

    width: int
    """Live beams, at least `Submit.n`; sequence i of the answer is the beam of the i-th best score."""
    length_penalty: float = 1.0
    """A beam's score is its logprob by its number of generated tokens to this power."""
    early_stopping: bool | Literal["never"] = False
    """Once `width` beams have ended: True, stop; False, stop where none of them would make room for the best live one
    if that ended now; "never", where it would not at any length that the penalty may favour."""


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """A new request, or one that is resumed: `generated` holds what its client already has, per sequence."""

    id: int
    """Made by the API process, never reused."""
    prompt_ids: list[int]
    params: SamplingParams
    n: int = 1
    """Sequences that share one prefill; sequence i draws from the random stream i."""
    generated: list[list[int]] = []
    finished: list[int] = []
    """Of a resumed request, the sequences that had ended: they do not run again."""
    search: BeamSearch | None = None
    """Its tokens come with its end, all at once, each with a logprob; so one that is resumed begins anew."""
    priority: int = 0
    """Lower runs first."""
    tenant: str = ""
    """Among whom the engine is shared: a key, or else a `user`."""
    weight: float = 1.0
    """Of the tenant, > 0: one of weight 2 is served twice as much as one of weight 1."""
    salt: bytes = b""
    """Part of every prefix hash: requests of different salts never share a block."""
    arrival: float = 0.0


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Ends a request, or one sequence of it; a search as a whole. Unknown ids are ignored: the abort may cross the last
    token."""

    id: int
    index: int | None = None


class Started(msgspec.Struct, frozen=True, array_like=True):
    """A request was admitted for the first time."""

    id: int
    scheduled: float
    cached_tokens: int
    """Prompt tokens that came from the prefix cache."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of prompt tokens 1, 2, …: complete, sent once, at the latest with the first token."""

    id: int
    values: list[Logprob]


class Pooled(msgspec.Struct, frozen=True, array_like=True):
    """The vector that `SamplingParams.pooling` asks for, as little-endian float32; comes with the request's end."""

    id: int
    vector: bytes


class RowError(msgspec.Struct, frozen=True, array_like=True):
    """Why a row finished with FinishReason.ERROR."""

    row: int
    message: str


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine as it stands after the step; COUNTERS never fall."""

    running: int
    waiting: int
    """Sequences of requests that were not yet admitted or are preempted."""
    waiting_tokens: int
    blocks_total: int
    """Without the null block."""
    blocks_free: int
    """Free and holding nothing of use."""
    blocks_cached: int
    """Free, but findable by prefix."""
    blocks_active: int
    tokens_active: int
    """Computed tokens held in active blocks, each block counted once."""
    preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    computed_tokens: int
    """Prompt tokens computed, recomputation included."""
    drafts: int
    """Rows that were computed with a draft."""
    drafted_tokens: int
    """Tokens of those drafts."""
    accepted_tokens: int
    """Of those, the ones that were drawn."""
    failed_raised: int = 0
    """Rows that failed: their step raised; these four count sequences that ended so."""
    failed_memory: int = 0
    """Their step ran out of memory."""
    failed_logits: int = 0
    """Their logits or hidden states were not finite."""
    failed_grammar: int = 0
    """They met a token that their grammar does not allow, or its matcher failed."""
    tier_bytes_used: int = 0
    """Of the tier behind the pool; these are 0 where there is none."""
    tier_bytes_total: int = 0
    tier_restores: int = 0
    """Sequences that began with tokens from there."""
    tier_restored_tokens: int = 0
    """Tokens that were read from there instead of being computed; part of the hits of the prefix cache."""
    tier_stored_tokens: int = 0
    tier_refused_tokens: int = 0
    """Tokens that were there, and whose content was not what had been stored."""
    steps: int
    step_seconds: float
    """Of the last step."""
    step_tokens: int
    """Drafts included."""
    step_rows: int


COUNTERS = (
    *("preemptions", "prefix_queried_tokens", "prefix_hit_tokens", "computed_tokens", "steps"),
    *("drafts", "drafted_tokens", "accepted_tokens"),
    *("failed_raised", "failed_memory", "failed_logits", "failed_grammar"),
)
"""Fields of EngineStats that only grow; the others are of the moment."""


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """All rows of one step, as columns of equal length: `ids`, `indices`, `tokens`, `finishes`.

    A row brings a token, an end, or both. `tokens` is -1 where a row only ends. A sequence whose draft was right has
    several rows, in order; so has every beam of a search that is over.
    """

    ids: list[int] = []
    indices: list[int] = []
    tokens: list[int] = []
    finishes: list[int] = []
    logprobs: dict[int, Logprob] = {}
    """By row number, only where asked for, and of every token of a search."""
    started: list[Started] = []
    prompt_logprobs: list[PromptLogprobs] = []
    pooled: list[Pooled] = []
    errors: list[RowError] = []
    stats: EngineStats
    now: float
    """When the step ended."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """One line per stage of the start."""

    stage: str
    detail: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine serves. What the front end needs to know of it."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    """Usable blocks, without the null block."""
    block_size: int
    kv_bytes_per_token: int
    kv_bytes: int
    device: str
    dtype: str
    kv_cache_dtype: str
    attention: str
    """Name of the attention backend."""
    weight_bytes: int
    load_seconds: float
    embedding: EmbeddingConfig
    kv_divergence: float | None = None
    """Of a pool of codes from one of 16 bits, in nats (`model.gate`); None: it holds plain numbers."""
    kv_agreement: float | None = None
    windows: tuple[int | None, ...] = (None,)
    """Of the pool's groups of layers (`kvpool.groups`)."""
    max_num_batched_tokens: int = 1
    """Of one step."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not start, for a reason the user can mend: one line."""

    message: str


ToEngine = Submit | Abort
FromEngine = Progress | Ready | Failed | StepOutput
