"""Requests that no engine of this size could ever finish are refused at once; none is parked."""

from __future__ import annotations

from scheduler.messages import Submit


def refusal(submit: Submit, max_model_len: int, num_blocks: int, block_size: int) -> str | None:
    """One line that says why, or None. `num_blocks`: usable ones."""
    if not submit.prompt_ids:
        return "prompt: it is empty; at least one token is needed"
    if submit.n < 1:
        return f"n: must be at least 1, not {submit.n}"
    if submit.params.pooling is not None and (submit.n != 1 or submit.params.max_tokens or any(submit.generated)):
        return "pooling: only for one sequence that generates nothing"
    if len(submit.generated) not in (0, submit.n):
        return f"generated: {len(submit.generated)} lists for n = {submit.n}"
    if submit.finished and not set(submit.finished) < set(range(submit.n)):
        return f"finished: {submit.finished} leaves none of n = {submit.n} sequences to run"
    # Room for the prompt and one generated token; none is generated where max_tokens is 0.
    tokens = len(submit.prompt_ids) + min(submit.params.max_tokens, 1)
    if tokens > max_model_len:
        return f"prompt: {len(submit.prompt_ids)} tokens, the context holds {max_model_len} with the generated ones"
    blocks = -(-tokens // block_size)
    if blocks > num_blocks:
        return f"prompt: needs {blocks} blocks of {block_size} tokens, the pool has {num_blocks}"
    return None
