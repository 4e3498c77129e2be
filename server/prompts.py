"""PromptBuilder: what a client sent, as token ids that fit the model.

    event loop    length bound ──▶ (await) ──────────────────────▶ exact lengths, max_tokens
    own threads                    template, encoding, id ranges

Tokenising takes milliseconds to seconds, so it has threads of its own. Content that is too long whatever the tokenizer
makes of it is refused before it gets there; a message's other strings are not yet measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from model.tokenizer import Tokenizer
from server.detokenizer import decode
from server.errors import CapacityExceeded, ContextTooLong, InvalidRequest, TemplateError
from server.forgery import SpecialTokens, escaped, unused
from server.template import Chat, ChatTemplate

T = TypeVar("T")

MAX_ENCODED_CHARS = 4 * 1024 * 1024
"""Of a text that is only to be tokenised, not to be continued."""


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What the engine can hold. Tokens and blocks."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


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
        allow_special_in_content: bool = False,
        threads: int = 2,
    ) -> None:
        """`template`: Jinja source to use instead of the model's own. Raises TemplateError where it is no template."""
        self.limits = limits
        self._tokenizer = tokenizer
        source = template or tokenizer.chat_template
        self.template = ChatTemplate(source, tokenizer.special_tokens) if source else None
        self._special = None if allow_special_in_content else SpecialTokens(tokenizer)
        self._vocab_size = min(limits.vocab_size, tokenizer.vocab_size)
        self._token_bytes = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="octavo-text")

    async def chat(self, chat: Chat, *, add_special_tokens: bool = False) -> Prompt:
        """A conversation as a prompt."""
        self._bound(sum(_length(message.get("content")) for message in chat.messages), "messages")
        prompt = await self._threaded(lambda: self._chat(chat, add_special_tokens))
        return self._fitting(prompt, "messages")

    async def completion(self, prompts: Sequence[str | list[int]], *, add_special_tokens: bool = True) -> list[Prompt]:
        """Each prompt's ids. One BOS at most is put before text, also where the text itself begins with it."""
        for prompt in prompts:
            if isinstance(prompt, str):
                self._bound(len(prompt), "prompt")
            elif len(prompt) > self.limits.max_model_len:
                self._too_long(len(prompt), "prompt")
        built = await self._threaded(lambda: [self._completion(prompt, add_special_tokens) for prompt in prompts])
        return [self._fitting(prompt, "prompt") for prompt in built]

    async def encode(self, text: str, *, add_special_tokens: bool, allow_special: bool = True) -> list[int]:
        """A text's ids, as /tokenize shows them; the text need not fit the context."""
        if len(text) > MAX_ENCODED_CHARS:
            raise InvalidRequest(f"prompt: {len(text)} characters are more than {MAX_ENCODED_CHARS}", param="prompt")
        _encodable(text, "prompt")
        return await self._threaded(
            lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens, allow_special=allow_special)
        )

    async def decode(self, ids: list[int], *, skip_special_tokens: bool = False, param: str = "tokens") -> str:
        """The text of token ids."""
        self._check_ids(ids, param)
        return await self._threaded(lambda: decode(self._tokenizer, ids, skip_special_tokens))

    def max_tokens(self, prompt_tokens: int, requested: int | None, *, param: str, default: int | None = None) -> int:
        """How many tokens may be generated. Raises ContextTooLong or CapacityExceeded, both with the numbers.

        What the client `requested` has to fit; the `default` (None: all that is left) is cut to what fits. `param`:
        the prompt's field, messages or prompt.
        """
        context, pool = self.limits.max_model_len, self.limits.num_blocks * self.limits.block_size
        wanted = 1 if requested is None else requested
        if prompt_tokens + wanted > context:
            raise ContextTooLong(
                f"max_tokens: the model's context is {context} tokens, but {prompt_tokens + wanted} were asked for "
                f"({prompt_tokens} in the {param}, {wanted} to generate)",
                param=param,
                numbers={"prompt_tokens": prompt_tokens, "max_tokens": wanted, "max_model_len": context},
            )
        if prompt_tokens + wanted > pool:
            self._no_room(prompt_tokens, wanted, param)
        if requested is not None:
            return requested
        rest = min(context, pool) - prompt_tokens
        return rest if default is None else min(default, rest)

    def close(self) -> None:
        """Ends the threads; what they have begun is finished."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _threaded(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _chat(self, chat: Chat, add_special_tokens: bool) -> Prompt:
        if self.template is None:
            raise TemplateError(
                "messages: this model has no chat template; use /v1/completions, or start the server with one",
                param="messages",
            )
        client = (chat.messages, chat.tools, chat.documents, chat.kwargs)
        guard, tag = unused(client, 2, self.template.source)
        special = self._special
        mark = str if special is None else lambda text: special.guarded(text, guard)
        # Templates that print objects print a guard as its escape.
        text = self.template.render(chat, mark, tag).replace(escaped(guard), guard)
        _encodable(text, "messages")
        self._bound(len(text), "messages")
        if special is None:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            ids = special.encode(text, guard, add_special_tokens)
            text = text.replace(guard, "")
        return Prompt(self._whole(ids, add_special_tokens, "messages"), text)

    def _completion(self, prompt: str | list[int], add_special_tokens: bool) -> Prompt:
        if isinstance(prompt, str):
            _encodable(prompt, "prompt")
            ids = self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            return Prompt(self._whole(ids, add_special_tokens, "prompt"), prompt)
        self._check_ids(prompt, "prompt")
        return Prompt(self._whole(list(prompt), False, "prompt"))

    def _whole(self, ids: list[int], added: bool, param: str) -> list[int]:
        """Ids with no second BOS, where one was `added`, and at least a BOS."""
        bos = self._tokenizer.bos_id
        if added and len(ids) > 1 and ids[0] == ids[1] == bos:
            return ids[1:]
        if ids:
            return ids
        if bos is None:
            raise InvalidRequest(f"{param}: must not be empty, since this model has no BOS token", param=param)
        return [bos]

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        if any(type(token) is not int for token in ids):
            raise InvalidRequest(f"{param}: token ids must be integers", param=param)
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self._vocab_size)
            raise InvalidRequest(
                f"{param}: token id {wrong} is outside the vocabulary (0 to {self._vocab_size - 1})", param=param
            )

    def _bound(self, chars: int, param: str) -> None:
        """Every character takes at least one byte, and no token has more than so many."""
        least = -(-chars // self._token_bytes)
        if least > self.limits.max_model_len:
            self._too_long(least, param, "at least ")

    def _fitting(self, prompt: Prompt, param: str) -> Prompt:
        if len(prompt.ids) > self.limits.max_model_len:
            self._too_long(len(prompt.ids), param)
        if self.limits.blocks(len(prompt.ids)) > self.limits.num_blocks:
            self._no_room(len(prompt.ids), 0, param)
        return prompt

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


def _length(content: Any) -> int:
    """Characters of a message's content."""
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, list) else []
    return sum(len(part.get("text") or "") for part in parts if isinstance(part, Mapping))


def _encodable(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{param}: holds half of a surrogate pair, which is no character", param=param) from None
