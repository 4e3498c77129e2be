"""LiteLLM and the `llm` command complete a chat, streamed and not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """It fetches a price list from elsewhere as it is imported, unless it is told not to."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    return litellm


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_litellm_chats(litellm: Any, url: str, provider: str) -> None:
    fields: Any = {
        "model": f"{provider}/{MODEL}",
        "api_base": url if provider == "anthropic" else f"{url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = litellm.completion(**fields)
    text = whole.choices[0].message.content
    assert "Paris" in text
    assert whole.usage.completion_tokens > 0
    chunks = list(litellm.completion(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == whole.usage.completion_tokens


def test_litellm_calls_tools_and_embeds(litellm: Any, url: str) -> None:
    place: Any = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
    parameters = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    reply = litellm.completion(
        **place,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}],
        tool_choice="required",
        temperature=0,
    )
    (call,) = reply.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    vectors = litellm.embedding(**place, input=["one", "two"]).data
    assert [len(vector["embedding"]) for vector in vectors] == [576, 576]


def test_the_llm_command(url: str, tmp_path: Path) -> None:
    """Its models of other servers come from a file. A conversation goes on with -c."""
    about = f"- model_id: octavo\n  model_name: {MODEL}\n  api_base: {url}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(about)

    def llm(*words: str) -> str:
        command = [sys.executable, "-m", "llm", "prompt", *words, "-o", "temperature", "0", "-o", "max_tokens", "24"]
        environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    streamed = llm("-m", "octavo", QUESTION)
    assert "Paris" in streamed
    assert llm("-m", "octavo", "--no-stream", QUESTION) == streamed
    assert llm("-c", "And of Italy?").strip()
