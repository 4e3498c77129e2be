"""The fixed numbers that the policy obeys. Tokens, sequences, seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """ValueError where a number is out of range."""

    max_num_seqs: int
    """Sequences that run at once."""
    max_num_batched_tokens: int
    """Tokens of one step."""
    max_model_len: int
    """Tokens of one sequence, prompt and generated."""
    target_step_time: float | None = None
    """Seconds that a step with a prompt chunk in it should not exceed; None: no cost model, the token budget alone."""
    rope_switch: int | None = None
    """Longest sequence that uses a model's short rotary factors. One that grows past it is computed anew from its first
    token, and the two kinds share no prefix. None: there is one kind."""
    num_speculative_tokens: int = 0
    """Longest draft of a row. 0: no speculation."""
    min_chunk: int = 8
    """Prompt tokens that a step computes at least, whatever they cost and whoever decodes: progress."""
    look_ahead: int = 8
    """Waiting sequences that are tried in one step."""
    max_bypasses: int = 16
    """Sequences that may be admitted past a head that does not fit; then everybody waits for it."""
    max_preemptions: int = 3
    """A sequence that was preempted so often is protected: the others go first."""
    watermark: float = 0.01
    """Share of the pool that admission leaves free."""

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "min_chunk",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
