"""Compiling: requests whose grammar is not compiled yet wait here, with every message that is for them.

    inbox ──▶ ready() ──▶ Engine      a plain request passes at once; a constrained one once its grammar is there

A compilation takes a millisecond as a rule and a second at worst, so it has a thread, and no step waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from llguidance import LLMatcher

from model.grammar import Grammars
from scheduler.messages import Abort, Submit, ToEngine
from scheduler.sequence import Phase, Request

IDLE_SECONDS = 0.005
"""How long an engine with nothing else to do waits for a compilation before it looks at its messages again."""


class Compiling:
    """Owned by the engine."""

    __slots__ = ("_compiled", "_grammars", "_waiting")

    def __init__(self, grammars: Grammars | None) -> None:
        """None: every request with a grammar is refused."""
        self._grammars = grammars
        self._waiting: dict[int, tuple[Future[LLMatcher], list[ToEngine]]] = {}
        self._compiled: dict[int, Future[LLMatcher]] = {}
        """Of requests that were handed out and not yet attached to."""

    def __len__(self) -> int:
        return len(self._waiting)

    def ready(self, inbox: Iterable[ToEngine], idle: bool) -> list[ToEngine]:
        """The messages that may be applied now, each request's in order. `idle`: nobody minds a short wait."""
        passed: list[ToEngine] = []
        for message in inbox:
            held = self._waiting.get(message.id)
            if held is not None:
                held[1].append(message)
                if isinstance(message, Abort) and message.index is None:
                    passed += self._release(message.id)
            elif isinstance(message, Submit) and message.params.grammar is not None and self._grammars is not None:
                self._waiting[message.id] = self._grammars.compile(message.params.grammar), [message]
            else:
                passed.append(message)
        if self._waiting:
            futures = [future for future, _ in self._waiting.values()]
            wait(futures, IDLE_SECONDS if idle and not passed else 0, FIRST_COMPLETED)
            for id in [id for id, (future, _) in self._waiting.items() if future.done()]:
                passed += self._release(id)
        return passed

    def attach(self, request: Request) -> str | None:
        """Give a new request's sequences their matchers, where it has a grammar; why that cannot be, in a line."""
        if request.params.grammar is None:
            return None
        compiled = self._compiled.pop(request.id, None)
        if self._grammars is None or compiled is None:
            return "grammar: this engine has no tokenizer to follow it with"
        if not compiled.done():
            return None  # Its abort comes next.
        error = compiled.exception()
        if error is not None:
            return f"grammar: {error}"
        for sequence in request.sequences:
            if sequence.phase is Phase.FINISHED:
                continue
            matcher = self._grammars.matcher(compiled.result(), request.prompt_len, request.params.stop_token_ids)
            matcher.follow(sequence.tokens)
            sequence.matcher = matcher
        return None

    def _release(self, id: int) -> list[ToEngine]:
        self._compiled[id], messages = self._waiting.pop(id)
        return messages
