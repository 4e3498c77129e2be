"""One rank's part of a decoder: which heads, which of the MLP's channels, which tokens. Arithmetic only; no torch here.

    outputs split   q k v gate up, LM head, embedding     a rank has some rows of the matrix
    inputs split    o down                                a rank has some columns; the ranks' results are added up

Norms are whole on every rank. Where there are more ranks than key heads, neighbours have the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from model.config import ModelConfig
from model.errors import ModelError

FLAG = "--tensor-parallel-size"


@dataclass(frozen=True, slots=True)
class Span:
    """What a rank has of a dimension."""

    start: int
    stop: int
    whole: int
    """Of all ranks."""

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` of `size`. `full` must have passed `check_split`."""

    full: ModelConfig
    rank: int = 0
    size: int = 1

    @property
    def config(self) -> ModelConfig:
        """Of the decoder that this rank computes; the vocabulary stays whole in it."""
        full = self.full
        return replace(
            full,
            num_heads=full.num_heads // self.size,
            num_kv_heads=max(1, full.num_kv_heads // self.size),
            intermediate_size=full.intermediate_size // self.size,
        )

    @property
    def query(self) -> Span:
        """Rows of q_proj, columns of o_proj."""
        return self._equal(self.full.num_heads * self.full.head_dim)

    @property
    def key(self) -> Span:
        """Rows of k_proj and v_proj."""
        heads, dim = self.full.num_kv_heads, self.full.head_dim
        first = self.rank * heads // self.size
        return Span(first * dim, (first + max(1, heads // self.size)) * dim, heads * dim)

    @property
    def inner(self) -> Span:
        """Rows of gate_proj and up_proj, columns of down_proj."""
        return self._equal(self.full.intermediate_size)

    @property
    def vocab(self) -> Span:
        """Tokens. The last rank may have fewer."""
        whole, most = self.full.vocab_size, self.most_vocab
        return Span(self.rank * most, min((self.rank + 1) * most, whole), whole)

    @property
    def most_vocab(self) -> int:
        """Tokens of a rank, at most."""
        return -(-self.full.vocab_size // self.size)

    def _equal(self, whole: int) -> Span:
        part = whole // self.size
        return Span(self.rank * part, (self.rank + 1) * part, whole)


def check_split(config: ModelConfig, size: int) -> None:
    """Raises ModelError, one line, where a model cannot be split among so many ranks."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if not config.native:
        why = f"{config.architecture} runs through transformers' code, which is not split"
    elif heads % size:
        why = f"does not divide the model's {heads} attention heads"
    elif kv_heads % size and size % kv_heads:
        why = f"neither divides the model's {kv_heads} key heads nor is a multiple of them"
    elif config.intermediate_size % size:
        why = f"does not divide the model's intermediate size of {config.intermediate_size}"
    elif (size - 1) * -(-config.vocab_size // size) >= config.vocab_size:
        why = f"leaves ranks without any of the model's {config.vocab_size} tokens"
    else:
        return
    raise ModelError(f"{FLAG} {size}: {why}")
