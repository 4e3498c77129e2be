"""Closed and open loops over prompts.

closed  c senders, each with one request in flight; a slow server is asked more slowly
open    requests go out on schedule, whatever the server does; each is timed from when it was due, so that waiting
        for a busy server, or for this client, counts as latency
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from loadtest.client import clock
from loadtest.outcome import Outcome
from loadtest.workloads import Prompt

Send = Callable[[Prompt, float], Awaitable[Outcome]]
"""Takes the prompt and the time from which it counts."""


async def closed_loop(
    send: Send, prompts: Sequence[Prompt], concurrency: int, done: Callable[[Outcome], object]
) -> list[Outcome]:
    """Outcomes in the order of the prompts; `done` is told each as it ends."""
    outcomes: dict[int, Outcome] = {}
    numbered = iter(enumerate(prompts))

    async def sender() -> None:
        for number, prompt in numbered:
            outcomes[number] = await send(prompt, clock())
            done(outcomes[number])

    await asyncio.gather(*(sender() for _ in range(min(concurrency, len(prompts)))))
    return [outcomes[number] for number in range(len(prompts))]


async def open_loop(
    send: Send,
    prompts: Sequence[Prompt],
    offsets: Sequence[float],
    concurrency: int | None,
    done: Callable[[Outcome], object],
) -> list[Outcome]:
    """Send prompt i at offsets[i] seconds from now. With `concurrency` no more are in flight; the others wait, late."""
    gate = asyncio.Semaphore(concurrency) if concurrency is not None else contextlib.nullcontext()
    start = clock()

    async def one(prompt: Prompt, due: float) -> Outcome:
        async with gate:
            outcome = await send(prompt, due)
        done(outcome)
        return outcome

    tasks = []
    async with asyncio.TaskGroup() as group:
        for prompt, offset in zip(prompts, offsets, strict=True):
            due = start + offset
            if (wait := due - clock()) > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(one(prompt, due)))
    return [task.result() for task in tasks]
