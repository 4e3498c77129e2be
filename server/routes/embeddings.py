"""POST /v1/embeddings: the prompt's hidden states, pooled as the model wants it, as one vector per input."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response

from model.embedding import EmbeddingConfig, Pooling
from model.params import SamplingParams
from server.answer import respond
from server.body import read_object, validate
from server.errors import InvalidRequest, Unsupported
from server.generation import Generation, Job
from server.prompts import Prompt
from server.protocol.embeddings import EmbeddingRequest
from server.service import Service, service_of
from server.streams import StreamOptions

router = APIRouter()
MAX_TOKENS = 300_000
"""Of all inputs of a request, as at OpenAI."""
MAX_NUMBERS = 2**22
"""Of all vectors of an answer."""


@router.post("/v1/embeddings")
async def create_embeddings(http: Request) -> Response:
    """Vectors of texts."""
    service = service_of(http)
    arrival = service.clock()
    body = await read_object(http, service, lambda value: validate(EmbeddingRequest, value))
    model = service.check_model(body.model)
    pooling = _pooling(body, service.require().ready.embedding)
    # A request may have more inputs than there are slots; it takes them in turn.
    caller = service.caller(http, body.cache_salt, body.user)
    most = service.admission.max_running
    width = min(len(body.input), most, caller.lease.max_sequences or most)
    generation = Generation(service, "embeddings", width, arrival, caller)
    return await respond(http, EmbeddingAnswer(service, generation, body, pooling, model, width), False)


def _pooling(body: EmbeddingRequest, config: EmbeddingConfig) -> Pooling:
    """What to ask of the engine. Raises Unsupported where the model cannot give it."""
    if config.refusal is not None:
        raise Unsupported(f"model: it gives no embeddings: {config.refusal}", param="model", code="unsupported_value")
    size = config.hidden_size if body.dimensions is None else body.dimensions
    if not config.allows(size):
        known = "" if not config.sizes else f" or {', '.join(map(str, config.sizes))}"
        less = " or less" if config.sizes == () else ""
        raise Unsupported(
            f"dimensions: this model's vectors have {config.hidden_size}{less}{known}, not {size}",
            param="dimensions",
            code="unsupported_value",
        )
    if len(body.input) * size > MAX_NUMBERS:
        raise InvalidRequest(
            f"input: {len(body.input)} vectors of {size} numbers are more than {MAX_NUMBERS} in one answer",
            param="input",
        )
    return Pooling(kind=config.kind, size=size, normalize=body.normalize)


class EmbeddingAnswer:
    def __init__(
        self,
        service: Service,
        generation: Generation,
        body: EmbeddingRequest,
        pooling: Pooling,
        model: str,
        width: int,
    ) -> None:
        """`width`: inputs that are in flight together."""
        self.generation = generation
        self._service = service
        self._body = body
        self._params = SamplingParams(max_tokens=0, seed=0, pooling=pooling)
        self._model = model
        self._width = width
        self._waves: Iterator[list[Prompt]] = iter(())

    async def start(self) -> None:
        self._waves = self._cut(await self._built())
        self._submit(next(self._waves))

    def frames(self) -> AsyncGenerator[bytes, None]:
        raise NotImplementedError("embeddings are not streamed")

    async def whole(self) -> bytes:
        await self.generation.collect()
        for wave in self._waves:
            self._submit(wave)
            await self.generation.collect()
        return await self.generation.loaded.prompts.threaded(self._json)

    def _submit(self, wave: Sequence[Prompt]) -> None:
        jobs = [Job(prompt.ids, self._params, 1, self._body.priority) for prompt in wave]
        self.generation.submit(jobs, StreamOptions())

    def _cut(self, built: Sequence[Prompt]) -> Iterator[list[Prompt]]:
        """Parts that have a slot for each input, and no more tokens than may wait (or one input)."""
        most = self._service.admission.max_queued_tokens
        wave: list[Prompt] = []
        tokens = 0
        for prompt in built:
            if wave and (len(wave) == self._width or tokens + len(prompt.ids) > most):
                yield wave
                wave, tokens = [], 0
            wave.append(prompt)
            tokens += len(prompt.ids)
        yield wave

    async def _built(self) -> list[Prompt]:
        body, prompts = self._body, self.generation.loaded.prompts
        inputs = body.input
        if body.truncate_prompt_tokens is not None:
            inputs = [await self._truncated(entry, body.truncate_prompt_tokens) for entry in inputs]
        return await prompts.completion(
            inputs, add_special_tokens=body.add_special_tokens, limit=MAX_TOKENS, param="input"
        )

    async def _truncated(self, entry: str | list[int], keep: int) -> list[int]:
        """The first (or last) so many tokens; -1: as many as the context has."""
        prompts = self.generation.loaded.prompts
        ids = entry
        if isinstance(ids, str):
            ids = await prompts.encode(ids, add_special_tokens=self._body.add_special_tokens, param="input")
        most = prompts.limits.max_model_len
        keep = most if keep < 0 else keep
        return ids[:keep] if self._body.truncation_side == "right" else ids[max(0, len(ids) - keep) :]

    def _json(self) -> bytes:
        streams = self.generation.streams
        tokens = sum(stream.usage.prompt_tokens for stream in streams)
        data = [
            {"object": "embedding", "index": number, "embedding": self._encoded(stream.vector or b"")}
            for number, stream in enumerate(streams)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        whole = {"object": "list", "data": data, "model": self._model, "usage": usage}
        return orjson.dumps(whole, option=orjson.OPT_SERIALIZE_NUMPY)

    def _encoded(self, vector: bytes) -> Any:
        if self._body.encoding_format == "base64":
            return base64.b64encode(vector).decode()
        return np.frombuffer(vector, "<f4").astype(np.float64)  # the very values of the other encoding
