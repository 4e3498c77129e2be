"""Requests that no engine of this size could ever finish are refused at once; none is parked."""

from __future__ import annotations

from kvpool.groups import Paging
from scheduler.beams import most_tokens
from scheduler.limits import Limits
from scheduler.messages import BeamSearch, Submit


def longest(submit: Submit, limits: Limits, paging: Paging, num_blocks: int) -> int:
    """Tokens that each of its sequences may hold, prompt included: all that the context and the pool have room for."""
    if submit.search is None:
        return paging.longest(num_blocks, limits.max_num_batched_tokens, limits.max_model_len)
    # Of the pool's blocks counted as columns of all groups: a beam may have each.
    columns = num_blocks // len(paging.windows)
    most = most_tokens(len(submit.prompt_ids), submit.search.width, columns, paging.block_size)
    return min(limits.max_model_len, most)


def refusal(submit: Submit, limits: Limits, paging: Paging, num_blocks: int) -> str | None:
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
    if tokens > limits.max_model_len:
        return (
            f"prompt: {len(submit.prompt_ids)} tokens, the context holds {limits.max_model_len} with the generated ones"
        )
    blocks = paging.pages(tokens, limits.max_num_batched_tokens)
    if blocks > num_blocks:
        return f"prompt: needs {blocks} blocks of {paging.block_size} tokens, the pool has {num_blocks}"
    if submit.search is not None:
        return _search_refusal(submit, submit.search, limits, paging, num_blocks)
    return None


def _search_refusal(submit: Submit, search: BeamSearch, limits: Limits, paging: Paging, num_blocks: int) -> str | None:
    if submit.params.grammar is not None or submit.params.pooling is not None:
        return "beam_width: a search takes neither a grammar nor pooling"
    if any(submit.generated) or submit.finished:
        return "generated: a search begins anew"
    if not submit.n <= search.width <= limits.max_num_seqs:
        return f"beam_width: must be between n = {submit.n} and the {limits.max_num_seqs} sequences that run at once"
    if longest(submit, limits, paging, num_blocks) <= len(submit.prompt_ids):
        return f"beam_width: {search.width} beams of {len(submit.prompt_ids)} tokens need more than {num_blocks} blocks"
    return None
