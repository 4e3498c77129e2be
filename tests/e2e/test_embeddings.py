"""Vectors of the demo model: close texts are close, and a text's vector does not depend on what ran beside it."""

from __future__ import annotations

import numpy as np
import openai

from tests.e2e.daemon import MODEL, Daemon

TEXTS = [
    "The cat sat on the warm mat in front of the fireplace.",
    "A kitten lay on the rug by the hearth.",
    "Quarterly revenue rose by eight percent on strong sales abroad.",
    "Sales in other countries lifted the company's income this quarter.",
]


def vectors(client: openai.OpenAI, texts: list[str]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    reply = client.embeddings.create(model=MODEL, input=texts)
    return np.array([entry.embedding for entry in reply.data])


def test_embeddings(daemon: Daemon) -> None:
    long = "The history of the lighthouse is long, and its keepers were many. " * 60  # several steps' worth of chunks
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        together = vectors(client, [*TEXTS, long, *(f"{n}. Filler of another length{' more' * n}." for n in range(40))])
        alone = np.concatenate([vectors(client, [text]) for text in [*TEXTS, long]])
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, rtol=1e-6)
    assert np.array_equal(alone, together[: len(alone)])
    near, far = together[0] @ together[1], together[0] @ together[2]
    assert near > far
    assert together[2] @ together[3] > far
    daemon.wait(daemon.at_rest, 1, "blocks freed")
