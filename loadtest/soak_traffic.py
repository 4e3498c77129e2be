"""What the clients of a soak ask, and how they misbehave. Everything is drawn from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
WORDS = (
    *("river", "mill", "stone", "letter", "harbour", "winter", "engine", "garden", "market", "window"),
    *("quiet", "early", "broken", "golden", "narrow", "open", "walked", "carried", "found", "opened"),
)
PREFIXES = 6
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
CANARY = {"prompt": "The three primary colours are red,", "max_tokens": 48, "temperature": 0}
"""Asked again and again; its text never changes."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    kind: str
    path: str
    body: dict[str, Any] | bytes
    expect: frozenset[int] = field(default=frozenset({200}))
    """Statuses that are right."""

    @property
    def stream(self) -> bool:
        return isinstance(self.body, dict) and bool(self.body.get("stream"))


MALFORMED: list[tuple[str, dict[str, Any] | bytes]] = [
    (COMPLETIONS, b"{"),
    (COMPLETIONS, b'{"prompt": "x", "temperature": NaN}'),
    (COMPLETIONS, {"prompt": "x", "n": 10**9}),
    (COMPLETIONS, {"prompt": [5] * 5000}),
    (COMPLETIONS, {"prompt": "word " * 50_000}),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": "("}}),
    (COMPLETIONS, b'{"prompt":' + b"[" * 5000),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "ghost", "content": "x"}]}),
    (EMBEDDINGS, {"input": ""}),
]


class Traffic:
    """Draws requests."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._prefixes = [self._text(250) for _ in range(PREFIXES)]

    def share(self, part: float) -> bool:
        """True for that share of the draws."""
        return self._random.random() < part

    def seconds(self, mean: float) -> float:
        return self._random.expovariate(1 / mean)

    def draw(self) -> Ask:
        """A request that is right, of any kind."""
        make = self._random.choice(
            [self._canary, self._short, self._long, self._shared, self._several, self._form, self._embed, self._chat]
        )
        return make()

    def malformed(self) -> Ask:
        path, body = self._random.choice(MALFORMED)
        return Ask("malformed", path, body, frozenset({400, 413, 422}))

    def slow(self) -> Ask:
        """More than the system keeps for a client that does not read."""
        body = {"prompt": self._text(20), "max_tokens": 400, "ignore_eos": True, "logprobs": 5, "stream": True}
        return Ask("slow", COMPLETIONS, body)

    def short(self) -> Ask:
        return self._short()

    def _canary(self) -> Ask:
        return Ask("canary", COMPLETIONS, CANARY | {"stream": self.share(0.5)})

    def _short(self) -> Ask:
        return self._complete("short", self._text(8), 24)

    def _long(self) -> Ask:
        return self._complete("long", self._text(self._random.randint(150, 450)), 40)

    def _shared(self) -> Ask:
        return self._complete("shared", self._random.choice(self._prefixes) + self._text(10), 32)

    def _several(self) -> Ask:
        ask = self._complete("several", self._text(20), 24)
        assert isinstance(ask.body, dict)
        return Ask(ask.kind, ask.path, ask.body | {"n": self._random.randint(2, 4)})

    def _form(self) -> Ask:
        form = {"type": "json_schema", "json_schema": {"name": "item", "schema": SCHEMA}}
        return self._ask("form", self._text(6), 60, {"response_format": form})

    def _chat(self) -> Ask:
        return self._ask("chat", self._text(30), 40, {})

    def _embed(self) -> Ask:
        return Ask("embed", EMBEDDINGS, {"input": [self._text(20) for _ in range(self._random.randint(1, 4))]})

    def _complete(self, kind: str, prompt: str, tokens: int) -> Ask:
        return Ask(kind, COMPLETIONS, {"prompt": prompt, "max_tokens": tokens, **self._manner()})

    def _ask(self, kind: str, text: str, tokens: int, fields: dict[str, Any]) -> Ask:
        messages = [{"role": "user", "content": text}]
        return Ask(kind, CHAT, {"messages": messages, "max_tokens": tokens, **fields, **self._manner()})

    def _manner(self) -> dict[str, Any]:
        sampled = {"temperature": 0.8, "seed": self._random.randrange(2**31)}
        return {"stream": self.share(0.6), **({"temperature": 0} if self.share(0.5) else sampled)}

    def _text(self, words: int) -> str:
        return " ".join(self._random.choices(WORDS, k=words)) + " "
