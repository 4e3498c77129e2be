"""Choice: one sequence's tokens turned into text events, with stop strings and aligned logprobs."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from model.params import Logprob
from scheduler.messages import FinishReason
from server.detokenizer import Detokenizer, Vocabulary
from server.logprobs import TokenEntry, token_entry
from server.parsing.reasoning import ReasoningFormat, ReasoningSplitter
from server.stops import StopMatcher, StopStrings


class TextEvent(msgspec.Struct, frozen=True):
    """What one sequence got since its last event: text, tokens, logprobs, and its end where it ended."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    """Generated tokens, the stop token included; they may run ahead of text that is held back."""
    logprobs: tuple[TokenEntry, ...] | None = None
    """None where none were asked for. A token comes with the event that carries the last of its text."""
    finish_reason: str | None = None
    """stop or length; exactly one event per index has it, its last."""
    stop_reason: str | int | None = None
    """The stop string or the stop token id that ended the sequence; None for an end-of-sequence token, and where the
    request's masks left no token to draw."""


@dataclass(slots=True, frozen=True)
class StreamOptions:
    """How a request's tokens become text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    """The stop string, or a stop token's text, belongs to the text."""
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """Stop strings count only where they end after so many tokens."""
    token_ids: bool = False
    """Send events for tokens that bring no text yet."""
    interval: int = 1
    """Tokens of an event at least; the first and the last one come at once."""
    shown: frozenset[int] = frozenset()
    """Special tokens that belong to the text in any case: markers of calls and of reasoning."""
    reasoning: ReasoningFormat | None = None
    """Where the text begins with reasoning, stop strings count only behind it, and its tokens are counted."""
    inside: bool = False
    """The prompt ended with the marker that opens reasoning."""
    new_text: bool = False
    """The output is a text of its own (chat): SentencePiece's leading space goes. Else it continues the prompt."""


class Choice:
    """The text of one sequence. Positions are code points of the choice's text, echoed prompt included.

    text of all tokens   T h e   e n d   E N
    sent                 └───────────┘
    entries wait for their last character: [" E", "N"]
    """

    __slots__ = (
        "_detokenizer",
        "_entries",
        "_event_entries",
        "_event_ids",
        "_event_text",
        "_length",
        "_matcher",
        "_options",
        "_scored",
        "_sent",
        "_splitter",
        "_spoken",
        "_vocabulary",
        "finish_reason",
        "index",
        "logprob_sum",
        "pending_chars",
        "reasoning_tokens",
        "stop_reason",
        "tokens",
    )

    def __init__(
        self,
        index: int,
        vocabulary: Vocabulary,
        options: StreamOptions,
        stops: StopStrings,
        scored: bool,
    ) -> None:
        """`scored`: events carry logprobs."""
        self.index = index
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.pending_chars = 0
        self.logprob_sum = 0.0
        """Of all tokens, the one that ended it included; 0 where no logprobs are asked for."""
        self._spoken = False
        """The first event with generated text is gone."""
        self._vocabulary = vocabulary
        self._options = options
        self.reasoning_tokens = 0
        """Tokens up to the end of the reasoning, its markers included."""
        self._detokenizer = Detokenizer(vocabulary, options.skip_special_tokens, options.new_text, options.shown)
        self._splitter = None if options.reasoning is None else ReasoningSplitter(options.reasoning, options.inside)
        self._matcher = StopMatcher(stops) if stops.strings else None
        self._scored = scored
        self._entries: deque[TokenEntry] = deque()
        self._length = 0
        self._sent = 0
        self._event_text: list[str] = []
        self._event_ids: list[int] = []
        self._event_entries: list[TokenEntry] = []

    def begin(self, text: str, entries: Sequence[TokenEntry], detokenizer: Detokenizer) -> None:
        """The echoed prompt, before any token. Stop strings are not looked for in it. `detokenizer` ran through it."""
        self._detokenizer = detokenizer
        self._length = len(text)
        # Of perhaps a hundred thousand entries only the last ones may have to wait, and so be looked at one by one.
        complete = bisect_right(entries, len(text), key=lambda entry: entry.offset + (len(entry.text) or 1))
        sure = max(0, complete - 1)
        self._event_entries += entries[:sure]
        self._entries.extend(entries[sure:])
        self._send(text)

    def feed(self, token: int, finish: int, logprob: Logprob | None) -> None:
        """A generated token, or -1 for none, and whether it ended the sequence (STOP or LENGTH)."""
        stopped = finish == FinishReason.STOP
        if token >= 0:
            self.tokens.append(token)
            self._event_ids.append(token)
            if logprob is not None:
                self.logprob_sum += logprob.logprob
            if not stopped or self._options.include_stop:
                self._add(token, logprob)
        if finish and self.finish_reason is None:
            self._end(stopped, token)

    def _add(self, token: int, logprob: Logprob | None) -> None:
        text = self._detokenizer.push(token)
        if self._scored:
            options = self._options
            shown = not options.skip_special_tokens or token in options.shown or not self._vocabulary.is_special(token)
            self._entries.append(token_entry(self._vocabulary, token, text, self._length, logprob, shown))
        self._push(text)

    def _push(self, text: str) -> None:
        self._length += len(text)
        if self._splitter is not None:
            text = self._behind_reasoning(self._splitter, text)
        self._match(text)

    def _behind_reasoning(self, splitter: ReasoningSplitter, text: str) -> str:
        """What stop strings are looked for in; the reasoning is sent."""
        open_before = splitter.inside or splitter.undecided
        block, _, rest = splitter.push(text)
        if open_before and splitter.opened:
            self.reasoning_tokens = len(self.tokens)
        self._send(block)
        return rest

    def _match(self, text: str) -> None:
        if self._matcher is None:
            self._send(text)
            return
        self._send(self._matcher.push(text, len(self.tokens) > self._options.min_tokens))
        if self._matcher.matched is not None:
            self._cut()
            self.finish_reason, self.stop_reason = "stop", self._matcher.matched

    def _end(self, stopped: bool, token: int) -> None:
        tail = self._detokenizer.finish()
        if tail:
            if self._entries:
                last = self._entries.pop()
                self._entries.append(replace(last, text=last.text + tail))
            self._push(tail)
            if self.finish_reason is not None:
                return
        if self._splitter is not None:
            if self._splitter.inside:
                self.reasoning_tokens = len(self.tokens)
            self._match(self._splitter.finish()[2])
            if self.finish_reason is not None:
                return
        self.finish_reason = "stop" if stopped else "length"
        if stopped and token >= 0 and token not in self._vocabulary.eos_ids:
            self.stop_reason = token
        if self._matcher is not None:
            self._send(self._matcher.flush())
        self._event_entries.extend(self._entries)
        self._entries.clear()

    def _send(self, text: str) -> None:
        if text:
            self._event_text.append(text)
            self.pending_chars += len(text)
            self._sent += len(text)
        entries = self._entries
        # A token that added nothing yet waits for text behind it: a stop string may still cut before that.
        while entries and entries[0].offset + (len(entries[0].text) or 1) <= self._sent:
            # The last one also waits while a character is incomplete: an end would make U+FFFD of it.
            if len(entries) == 1 and self._detokenizer.incomplete:
                break
            self._event_entries.append(entries.popleft())

    def _cut(self) -> None:
        """A stop string ended the text: tokens behind its end go, the one across it keeps the part before it."""
        for entry in self._entries:
            if entry.offset < self._sent:
                self._event_entries.append(replace(entry, text=entry.text[: self._sent - entry.offset]))
        self._entries.clear()

    @property
    def ready(self) -> bool:
        """Whether it is time for an event."""
        if self.finish_reason is not None:
            return True
        return self.pending and (not self._spoken or len(self._event_ids) >= self._options.interval)

    @property
    def pending(self) -> bool:
        """Whether there is something for the reader."""
        return bool(self._event_text or self._event_entries or (self._event_ids and self._options.token_ids))

    def take(self) -> TextEvent:
        """Everything since the last time, as one event."""
        text, ids = self._event_text, self._event_ids
        self._spoken = self._spoken or bool(text and ids)
        event = TextEvent(
            self.index,
            text[0] if len(text) == 1 else "".join(text),
            tuple(ids),
            tuple(self._event_entries) if self._scored else None,
            self.finish_reason,
            self.stop_reason,
        )
        text.clear()
        ids.clear()
        self._event_entries.clear()
        self.pending_chars = 0
        return event
