"""What a user sees first: a chat that streams, and 32 of them at once."""

from __future__ import annotations

import asyncio
import json
import subprocess

import openai

from tests.e2e.daemon import MODEL, Daemon, serve

REGISTER = "A register of names and codes. Every code is copied exactly.\n"
BLOCK = 16
SAMPLES = 20


def copy_prompt(code: str) -> str:
    """A prompt whose continuation is its own code; its beginning is common to all."""
    return REGISTER + f"Name: Agent\nCode: {code}\n" * 3 + "Name: Agent\nCode:"


def test_a_streamed_chat_with_curl_is_sensible_english(daemon: Daemon) -> None:
    body = {
        "model": MODEL,
        "stream": True,
        "temperature": 0,
        "max_tokens": 40,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    command = ["curl", "-sN", f"{daemon.url}/v1/chat/completions", "-H", "content-type: application/json"]
    raw = subprocess.run([*command, "-d", json.dumps(body)], capture_output=True, check=True, timeout=60).stdout
    frames = [frame for frame in raw.decode().strip().split("\n\n") if not frame.startswith(":")]
    assert frames[-1] == "data: [DONE]"
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert "Paris" in text, text
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")


def test_32_sdk_clients_stream_and_each_gets_its_own_answer(daemon: Daemon) -> None:
    codes = [str(10_007 + 2_719 * n) for n in range(32)]

    async def ask(client: openai.AsyncOpenAI, code: str) -> str:
        stream = await client.completions.create(
            model=MODEL, prompt=copy_prompt(code), max_tokens=8, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, code) for code in codes))

    answers = asyncio.run(ask_all())
    assert [answer.split()[0] for answer in answers] == codes
    daemon.wait(daemon.at_rest, 1, "blocks freed")


def test_kv_waste_of_32_streams_stays_under_4_percent() -> None:
    """Waste: slots of active blocks that hold no token. Only the last block of a sequence can have any, so lengths are
    spread evenly over a block, as traffic's are. No stream ends before all 32 have been seen to run together."""
    prompts = [[1000 + (97 * n + i) % 30_000 for i in range(224 + n % BLOCK)] for n in range(32)]
    wasted: list[float] = []

    async def ask(client: openai.AsyncOpenAI, prompt: list[int]) -> int:
        stream = await client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=2600, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        return len([chunk async for chunk in stream])

    async def run(daemon: Daemon) -> None:
        async with openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
            tasks = [asyncio.create_task(ask(client, prompt)) for prompt in prompts]
            while len(wasted) < SAMPLES:
                assert not any(task.done() for task in tasks)
                scrape = await asyncio.to_thread(daemon.metrics)
                slots = BLOCK * scrape["octavo_kv_blocks", ("state", "active")]
                if scrape["octavo_requests_running",] == 32:
                    wasted.append(1 - scrape["octavo_kv_active_tokens",] / slots)
                await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # Room for 32 whole answers, and one token a step: else the first would end while the last still wait.
    with serve("--max-num-seqs", "32", "--kv-cache-memory", "2.5GiB", "--num-speculative-tokens", "0") as daemon:
        asyncio.run(run(daemon))
    assert max(wasted) < 0.04
