"""The process that tries a grammar before anybody's tokens depend on it: `python -m server.structured.checker`.

    stdin:   Vocabulary, then Job, Job, …          stdout: a Verdict for each Job

A grammar may be made to take hours or gigabytes, and no thread can be stopped; a process can. It ends itself by a timer
where a job takes too long, it may have so much memory and no more, and it ends when its parent hangs up. What passes
here is compiled, and followed for some tokens: the engine then does the same again, at a cost that is known.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from typing import IO

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from model.grammar import Vocabulary, compile_grammar, reason
from server.structured.structure import GrammarError, Structure, serialise

SECONDS, PATIENCE = 1.25, 2.0
"""For one job: of processor time, and by the clock, since its client waits. Whom the clock stops (SIGALRM) was starved,
which says nothing of the grammar."""
COMPILE_SECONDS = 1.0
"""Of processor time, to compile: the engine's thread will take it again."""
TRIAL_TOKENS, TRIAL_SECONDS = 24, 0.12
"""How far a grammar is followed, at random, and what its masks may take for that in all: 5 ms each."""
MEMORY_BYTES = 512 * 2**20
"""Beyond what the process has at its start."""
HEADER_BYTES = 4


class Verdict(msgspec.Struct, frozen=True):
    """One of the two."""

    grammar: str | None = None
    """llguidance's serialised form, fit for the engine."""
    fault: str | None = None
    """Why it is refused, in one line for the client."""


def read_frame(stream: IO[bytes]) -> bytes | None:
    """A frame of the pipes, 4 bytes of length first; None at the end of the stream."""
    header = stream.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    length = int.from_bytes(header, "big")
    data = stream.read(length)
    return data if len(data) == length else None


def write_frame(stream: IO[bytes], data: bytes) -> None:
    stream.write(len(data).to_bytes(HEADER_BYTES, "big") + data)
    stream.flush()


def examine(trie: LLTokenizer, structure: Structure) -> Verdict:
    """Whether the engine may have this."""
    try:
        grammar = serialise(structure)
        began = time.process_time()
        matcher = compile_grammar(trie, grammar)
        seconds = time.process_time() - began
        if seconds > COMPILE_SECONDS:
            raise GrammarError(f"too complex: it takes {seconds:.1f} s to compile, and may take {COMPILE_SECONDS:g} s")
        follow(matcher, trie.vocab_size)
    except (ValueError, RecursionError, MemoryError) as error:
        return Verdict(fault=str(error) or "too complex")
    return Verdict(grammar=grammar)


def follow(matcher: LLMatcher, vocab_size: int) -> None:
    """Draw some tokens at random. Raises GrammarError where that takes long, or exceeds the limits of a step."""
    rng = random.Random(0)
    began = time.process_time()
    for _ in range(TRIAL_TOKENS):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), count=vocab_size, bitorder="little")
        allowed = np.flatnonzero(bits)
        if not len(allowed) or not matcher.consume_token(int(rng.choice(allowed))) or matcher.is_stopped():
            break
    if matcher.is_error():
        raise GrammarError(f"too complex: {reason(matcher)}")
    seconds = time.process_time() - began
    if seconds > TRIAL_SECONDS:
        raise GrammarError(f"too complex: it takes {seconds:.2f} s to follow for {TRIAL_TOKENS} tokens")


def main() -> None:
    jobs, verdicts = sys.stdin.buffer, sys.stdout.buffer
    first = read_frame(jobs)
    if first is None:
        return
    trie = msgspec.msgpack.decode(first, type=Vocabulary).trie()
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)  # Ends the process, whatever code is running.
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(5)  # Streams go before.
    write_frame(verdicts, b"")
    while (job := read_frame(jobs)) is not None:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        verdict = examine(trie, msgspec.msgpack.decode(job, type=Structure))
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(verdicts, msgspec.msgpack.encode(verdict))


if __name__ == "__main__":
    main()
