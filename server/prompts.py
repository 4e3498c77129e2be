"""PromptBuilder: what a client sent, as token ids that fit the model.

    event loop    ──▶ (await) ─────────────────────────────────────────────▶ exact lengths, max_tokens
    own threads       length bound, template, special tokens, encoding, id ranges

Tokenising takes milliseconds to seconds, so it has threads of its own. What is too long whatever the tokenizer makes of
it is refused before anything is done with it. A request has few jobs in the threads' queue at a time, and a job is one
prompt or several short ones: a list of a thousand texts delays its sender and nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from kvpool.groups import Paging, Windows
from model.tokenizer import Tokenizer
from server.detokenizer import decode
from server.errors import CapacityExceeded, ContextTooLong, InvalidRequest, TemplateError, Unsupported
from server.forgery import SpecialTokens, escaped, strings, unused
from server.parsing.formats import HERMES, ToolFormat
from server.protocol.base import count_values
from server.template import Chat, ChatTemplate
from server.toolless import described

T = TypeVar("T")
P = TypeVar("P", str, list[int], str | list[int])

MAX_ENCODED_CHARS = 2**20
"""Of a text that is only to be tokenised, not to be continued."""
MAX_PROMPT_VALUES = 2**20
"""Logprobs, ids and texts of prompt tokens in one answer, all its choices together."""
MAX_KWARGS_NODES = 10_000
"""Values in chat_template_kwargs, at any depth."""
TOOL_TEMPLATE = "tool_use"
"""Some models have a template of this name for conversations with tools."""
JOB_LENGTH = 64 * 1024
"""Characters or ids that are enough for one job."""


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What the engine can hold. Tokens and blocks."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    windows: Windows = (None,)
    """Of the pool's groups of layers (`kvpool.groups`)."""
    chunk: int = 1
    """Tokens that a step computes at most."""

    def blocks(self, tokens: int) -> int:
        """That a sequence of so many tokens takes."""
        return self._paging.pages(tokens, self.chunk)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the pool holds, and the context."""
        return self._paging.longest(self.num_blocks, self.chunk, self.max_model_len)

    @property
    def _paging(self) -> Paging:
        return Paging(self.block_size, self.windows)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a prompt that is too long is cut, where the client wants that."""

    keep: int
    """Tokens."""
    side: str
    """Which end is cut off: left or right."""

    def __call__(self, ids: list[int]) -> list[int]:
        return (ids[-self.keep :] if self.side == "left" else ids[: self.keep]) if self.keep else []


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    text: str | None = None
    """What was encoded; None where the client sent ids."""


class PromptBuilder:
    """Chats and completion prompts to token ids, and the checks of their lengths. Methods raise RequestError."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: PromptLimits,
        *,
        template: str | None = None,
        tool_format: ToolFormat = HERMES,
        allow_special_in_content: bool = False,
        trust_templates: bool = False,
        threads: int = 2,
    ) -> None:
        """`template`: Jinja source to use instead of the model's own. `tool_format`: how tools are explained where it
        knows none. `trust_templates`: a chat may bring its own. Raises TemplateError where it is no template."""
        self.limits = limits
        self._tokenizer = tokenizer
        source = template or tokenizer.chat_template
        self.template = ChatTemplate(source, tokenizer.special_tokens) if source else None
        own = None if template else tokenizer.chat_templates.get(TOOL_TEMPLATE)
        self._tool_template = ChatTemplate(own, tokenizer.special_tokens) if own else self.template
        self._tool_format = tool_format
        self._trust_templates = trust_templates
        self._special = None if allow_special_in_content else SpecialTokens(tokenizer)
        self._vocab_size = min(limits.vocab_size, tokenizer.vocab_size)
        self._token_bytes = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="octavo-text")

    async def chat(self, chat: Chat, *, add_special_tokens: bool = False, cut: Cut | None = None) -> Prompt:
        """A conversation as a prompt; `text` is what it was before the cut."""
        return await self.threaded(lambda: self._chat(chat, add_special_tokens, cut))

    def cut(self, tokens: int | None, side: str, max_tokens: int) -> Cut | None:
        """For `truncate_prompt_tokens`; -1 keeps what leaves room for `max_tokens`, and at least one token."""
        if tokens is None:
            return None
        room = self.limits.max_model_len - max(1, max_tokens)
        return Cut(max(1, room) if tokens == -1 else tokens, side)

    async def completion(
        self,
        prompts: Sequence[str | list[int]],
        *,
        add_special_tokens: bool = True,
        limit: int | None = None,
        param: str = "prompt",
    ) -> list[Prompt]:
        """Each prompt's ids. One BOS at most is put before text, also where the text itself begins with it.

        `limit`: tokens that several prompts may have together. `param`: the request's field.
        """
        total = 0

        def build(prompt: str | list[int]) -> Prompt:
            nonlocal total
            built = self._completion(prompt, add_special_tokens, param)
            total += len(built.ids)
            if limit is not None and total > limit and len(prompts) > 1:
                raise InvalidRequest(
                    f"{param}: the {len(prompts)} prompts have more than {limit} tokens together, and no more may wait",
                    param=param,
                )
            return built

        return await self.each(build, prompts)

    async def encode(
        self, text: str, *, add_special_tokens: bool, allow_special: bool = True, param: str = "prompt"
    ) -> list[int]:
        """A text's ids, as /tokenize shows them; the text need not fit the context."""

        def work() -> list[int]:
            _encodable(text, param)
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, allow_special=allow_special)

        _encoded(len(text), param)
        return await self.threaded(work)

    async def decode(self, ids: list[int], *, skip_special_tokens: bool = False, param: str = "tokens") -> str:
        """The text of token ids."""

        def work() -> str:
            self._check_ids(ids, param)
            return decode(self._tokenizer, ids, skip_special_tokens)

        return await self.threaded(work)

    def max_tokens(
        self,
        prompt_tokens: int,
        requested: int | None,
        *,
        param: str,
        default: int | None = None,
        field: str = "max_tokens",
    ) -> int:
        """How many tokens may be generated. Raises ContextTooLong or CapacityExceeded, both with the numbers.

        What the client `requested` has to fit; the `default` (None: all that is left) is cut to what fits. `param`:
        the prompt's field, messages or prompt; `field`: the one of the request. The latter is at fault where the prompt
        leaves room for one token.
        """
        context, pool = self.limits.max_model_len, self.limits.longest
        wanted = 1 if requested is None else requested
        wrong = field if requested is not None and prompt_tokens < min(context, pool) else param
        if prompt_tokens + wanted > context:
            raise ContextTooLong(
                f"{wrong}: the model's context is {context} tokens, but {prompt_tokens + wanted} were asked for "
                f"({prompt_tokens} in the prompt, {wanted} to generate)",
                param=wrong,
                numbers={"prompt_tokens": prompt_tokens, "max_tokens": wanted, "max_model_len": context},
            )
        if prompt_tokens + wanted > pool:
            self._no_room(prompt_tokens, wanted, wrong)
        if requested is not None:
            return requested
        rest = min(context, pool) - prompt_tokens
        return rest if default is None else min(default, rest)

    def close(self) -> None:
        """Ends the threads; what they have begun is finished."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def threaded(self, work: Callable[[], T]) -> T:
        """Run one job in the threads for text."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def each(self, work: Callable[[P], T], prompts: Sequence[P]) -> list[T]:
        """`work` of every prompt, in as many jobs as it takes, one after the other."""
        results: list[T] = []
        for job in _jobs(prompts):
            results += await self.threaded(partial(list, map(work, job)))
        return results

    def _template(self, chat: Chat) -> ChatTemplate | None:
        if chat.template is None:
            return self._tool_template if chat.tools else self.template
        if not self._trust_templates:
            raise Unsupported(
                "chat_template: this server takes no templates from requests; --trust-request-chat-template lets it",
                param="chat_template",
            )
        try:
            return ChatTemplate(chat.template, self._tokenizer.special_tokens)
        except TemplateError as error:
            error.param = "chat_template"
            raise

    def _chat(self, chat: Chat, add_special_tokens: bool, cut: Cut | None) -> Prompt:
        template = self._template(chat)
        if template is None:
            raise TemplateError(
                "messages: this model has no chat template; use /v1/completions, or start the server with one",
                param="messages",
            )
        kwargs = {**template.effort(chat.reasoning_effort), **chat.kwargs}
        # What the template would not read is not looked at either.
        chat = replace(chat, kwargs=template.accepted(kwargs))
        if count_values(chat.kwargs, MAX_KWARGS_NODES) > MAX_KWARGS_NODES:
            raise InvalidRequest(
                f"chat_template_kwargs: holds more than {MAX_KWARGS_NODES} values", param="chat_template_kwargs"
            )
        if chat.documents and "documents" not in template.variables:
            raise Unsupported("documents: the model's chat template does not read any", param="documents")
        if count_values(chat.documents, MAX_KWARGS_NODES) > MAX_KWARGS_NODES:
            raise InvalidRequest(f"documents: hold more than {MAX_KWARGS_NODES} values", param="documents")
        if not (template.knows_tools if chat.tools else template.knows_calls):
            chat = described(chat, self._tool_format)
        conversation = (chat.messages, chat.tools, chat.documents)
        # First of all: the search for special tokens holds the GIL, the longer the strings the longer.
        self._bound(sum(map(len, strings(conversation))), "messages", cut)
        self._bound(sum(map(len, strings(chat.kwargs))), "chat_template_kwargs")
        guard, tag = unused((conversation, chat.kwargs), 2, template.source)
        special = self._special
        mark = str if special is None else lambda text: special.guarded(text, guard)
        # Templates that print objects print a guard as its escape.
        text = template.render(chat, mark, tag).replace(escaped(guard), guard)
        _encodable(text, "messages")
        self._bound(len(text), "messages", cut)
        if special is None:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            ids = special.encode(text, guard, add_special_tokens)
            text = text.replace(guard, "")
        return Prompt(self._whole(ids if cut is None else cut(ids), add_special_tokens, "messages"), text)

    def _completion(self, prompt: str | list[int], add_special_tokens: bool, param: str) -> Prompt:
        if isinstance(prompt, str):
            self._bound(len(prompt), param)
            _encodable(prompt, param)
            ids = self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            return Prompt(self._whole(ids, add_special_tokens, param), prompt)
        ids = self._whole(prompt, False, param)
        self._check_ids(ids, param)
        return Prompt(ids)

    def _whole(self, ids: list[int], added: bool, param: str) -> list[int]:
        """Ids with no second BOS, where one was `added`, and at least a BOS. Raises where they do not fit."""
        bos = self._tokenizer.bos_id
        if added and len(ids) > 1 and ids[0] == ids[1] == bos:
            ids = ids[1:]
        if not ids:
            if bos is None:
                raise InvalidRequest(f"{param}: must not be empty, since this model has no BOS token", param=param)
            ids = [bos]
        if len(ids) > self.limits.max_model_len:
            self._too_long(len(ids), param)
        if self.limits.blocks(len(ids)) > self.limits.num_blocks:
            self._no_room(len(ids), 0, param)
        return ids

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        if any(type(token) is not int for token in ids):
            raise InvalidRequest(f"{param}: token ids must be integers", param=param)
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self._vocab_size)
            raise InvalidRequest(
                f"{param}: token id {wrong} is outside the vocabulary (0 to {self._vocab_size - 1})", param=param
            )

    def _bound(self, chars: int, param: str, cut: Cut | None = None) -> None:
        """Every character takes at least one byte, and no token has more than so many."""
        if cut is not None:
            _encoded(chars, param)
            return
        least = -(-chars // self._token_bytes)
        if least > self.limits.max_model_len:
            self._too_long(least, param, "at least ")

    def _too_long(self, tokens: int, param: str, least: str = "") -> None:
        context = self.limits.max_model_len
        raise ContextTooLong(
            f"{param}: the model's context is {context} tokens, but the prompt has {least}{tokens}",
            param=param,
            numbers={"prompt_tokens": tokens, "max_model_len": context},
        )

    def _no_room(self, prompt_tokens: int, max_tokens: int, param: str) -> None:
        need, have = self.limits.blocks(prompt_tokens + max_tokens), self.limits.num_blocks
        raise CapacityExceeded(
            f"{param}: {prompt_tokens} prompt tokens and {max_tokens} to generate need {need} blocks of "
            f"{self.limits.block_size} tokens, but the KV pool has {have}",
            param=param,
            numbers={"prompt_tokens": prompt_tokens, "max_tokens": max_tokens, "blocks": need, "num_blocks": have},
        )


def check_values(tokens: int, values: int, param: str) -> None:
    """Whether an answer may have so many values for every prompt token, all choices counted. Raises InvalidRequest."""
    if tokens * values > MAX_PROMPT_VALUES:
        raise InvalidRequest(
            f"{param}: {tokens} prompt tokens with {values} values each, over all choices, are more than "
            f"{MAX_PROMPT_VALUES} in one answer",
            param=param,
        )


def _jobs(prompts: Sequence[P]) -> Iterator[list[P]]:
    job: list[P] = []
    length = 0
    for prompt in prompts:
        job.append(prompt)
        length += len(prompt)
        if length >= JOB_LENGTH:
            yield job
            job, length = [], 0
    yield job


def _encoded(chars: int, param: str) -> None:
    if chars > MAX_ENCODED_CHARS:
        raise InvalidRequest(f"{param}: {chars} characters are more than {MAX_ENCODED_CHARS}", param=param)


def _encodable(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{param}: holds half of a surrogate pair, which is no character", param=param) from None
