"""One run against a server: find out what it serves, make the prompts, warm up, measure."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Never

import numpy as np
from tqdm import tqdm

from loadtest.arrivals import RampUp, send_offsets
from loadtest.client import Client, NoModel, Served, Target, clock, texts_instead_of_tokens
from loadtest.interference import Interference, interfere
from loadtest.outcome import Outcome
from loadtest.traffic import closed_loop, open_loop
from loadtest.workloads import (
    BadWorkload,
    Prompt,
    TokenRange,
    Turn,
    conversation_like_prompts,
    random_prompts,
    read_sharegpt,
    shared_prefix_prompts,
    turn_prompt,
)

BYTES_PER_TOKEN = 4
"""Where the server can't count a text's tokens."""


def make_client(args: argparse.Namespace) -> Client:
    headers = dict(args.header)
    if key := args.api_key or os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    return Client(Target(args.base_url, args.endpoint, headers, args.request_timeout))


async def measure_interference(args: argparse.Namespace) -> tuple[str, list[Outcome], float, Interference]:
    """As measure_server, for one long prompt beside streams."""
    async with make_client(args) as client:
        served = await _served(client, args.model)
        model = args.model or served.model
        tokens = TokenRange.of_vocabulary(args.vocab_size or served.vocab_size)
        lengths = (args.random_input_len, args.random_output_len, 0.0)
        streams = random_prompts(args.max_concurrency or 8, *lengths, tokens, args.seed)
        (long,) = random_prompts(1, args.long_prompt_len, 1, 0.0, tokens, args.seed + 1)
        options = {"return_token_ids": True, **request_options(args, model)}

        async def send(prompt: Prompt, scheduled: float) -> Outcome:
            return await client.send(prompt, options, scheduled)

        began = clock()
        outcomes, found = await interfere(send, streams, long)
        return model, outcomes, clock() - began, found


async def measure_server(args: argparse.Namespace) -> tuple[str, list[Outcome], float]:
    """The model's name, what became of each request, and how many seconds they took together.

    Raises Unreachable, NoModel or BadWorkload.
    """
    async with make_client(args) as client:
        served = await _served(client, args.model)
        model = args.model or served.model
        # Warm-ups get prompts of their own: the measured ones must not be in the server's cache.
        prompts = await _prompts(client, args, model, args.vocab_size or served.vocab_size)
        spare = len(prompts) - args.num_warmups
        if spare < 1:
            raise BadWorkload(f"only {len(prompts)} prompts for --num-warmups {args.num_warmups} and the run itself")
        options = request_options(args, model)

        async def send(prompt: Prompt, scheduled: float) -> Outcome:
            return await client.send(prompt, options, scheduled)

        if args.num_warmups:
            await closed_loop(send, prompts[spare:], args.max_concurrency or args.num_warmups, lambda outcome: None)
        prompts = prompts[:spare]
        with progress(args, len(prompts)) as bar:
            began = clock()
            if math.isinf(args.request_rate) and args.ramp_up_strategy is None:
                concurrency = args.max_concurrency or len(prompts)
                outcomes = await closed_loop(send, prompts, concurrency, lambda outcome: bar.update())
            else:
                offsets = _offsets(args, len(prompts))
                outcomes = await open_loop(send, prompts, offsets, args.max_concurrency, lambda outcome: bar.update())
            return model, outcomes, clock() - began


def progress(args: argparse.Namespace, total: int) -> tqdm[Never]:
    """A bar on stderr; none where that is no terminal."""
    return tqdm(total=total, unit="req", disable=args.disable_tqdm or not sys.stderr.isatty())


def request_options(args: argparse.Namespace, model: str) -> dict[str, object]:
    """Fields of every request's body."""
    # A recorded answer ended where it ended; a random prompt's answer has no such place.
    ignore_eos = args.ignore_eos if args.ignore_eos is not None else args.dataset_path is None
    sampling = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    options: dict[str, object] = {name: value for name, value in sampling.items() if value is not None}
    if ignore_eos:
        options["ignore_eos"] = True
    return {"model": model, **options, **(args.extra_body or {})}


def token_prompts(args: argparse.Namespace, vocab_size: int | None) -> list[Prompt]:
    """Prompts of the run, then those of the warm-up."""
    tokens = TokenRange.of_vocabulary(vocab_size)
    count = args.num_prompts + args.num_warmups
    if args.dataset_name == "random":
        lengths = (args.random_input_len, args.random_output_len, args.random_range_ratio)
        return random_prompts(count, *lengths, tokens, args.seed)
    if args.dataset_name == "sharegpt":
        return conversation_like_prompts(count, args.sharegpt_output_len, tokens, args.seed)
    return shared_prefix_prompts(
        count,
        args.prefix_repetition_num_prefixes,
        args.prefix_repetition_prefix_len,
        args.prefix_repetition_suffix_len,
        args.prefix_repetition_output_len,
        tokens,
        args.seed,
    )


async def _served(client: Client, model: str | None) -> Served:
    try:
        return await client.served()
    except NoModel:
        if model is None:
            raise
        return Served(model, None)


async def _prompts(client: Client, args: argparse.Namespace, model: str, vocab_size: int | None) -> list[Prompt]:
    if args.dataset_path is not None:
        turns = read_sharegpt(Path(args.dataset_path), args.seed)
        count = args.num_prompts + args.num_warmups
        prompts = await recorded_prompts(client, model, turns, count, args.sharegpt_output_len)
        if len(prompts) < count:
            sys.stderr.write(f"{args.dataset_path} has {len(prompts)} conversations of a fitting length, not {count}\n")
        return prompts
    prompts = token_prompts(args, vocab_size)
    if not args.endpoint.rstrip("/").endswith("/chat/completions"):
        return prompts
    texts = await texts_instead_of_tokens(client, model, prompts)
    if texts is None:
        missing = "--dataset-path is missing: " if args.dataset_name == "sharegpt" else ""
        raise BadWorkload(
            f"{missing}{args.endpoint} takes no tokens, and the server has no /detokenize to make texts of them: "
            "use --endpoint /v1/completions, or --dataset-name sharegpt with a --dataset-path"
        )
    return texts


async def recorded_prompts(
    client: Client, model: str, turns: Iterator[Turn], count: int, output_len: int | None
) -> list[Prompt]:
    """The first `count` turns of a fitting length, measured by the server's tokenizer where it offers one."""

    async def length(text: str) -> int:
        counted = await client.count_tokens(model, text)
        return counted if counted is not None else math.ceil(len(text.encode()) / BYTES_PER_TOKEN)

    prompts: list[Prompt] = []
    while len(prompts) < count and (batch := list(itertools.islice(turns, 16))):
        lengths = await asyncio.gather(*(length(text) for turn in batch for text in (turn.question, turn.answer)))
        for number, turn in enumerate(batch):
            prompt = turn_prompt(turn, lengths[2 * number], lengths[2 * number + 1], output_len)
            if prompt is not None:
                prompts.append(prompt)
    return prompts[:count]


def _offsets(args: argparse.Namespace, count: int) -> list[float]:
    ramp_up = None
    if args.ramp_up_strategy is not None:
        ramp_up = RampUp(args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)
    return send_offsets(count, args.request_rate, args.burstiness, np.random.default_rng(args.seed), ramp_up)
