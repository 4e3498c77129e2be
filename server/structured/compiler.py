"""Structures: from a request's Structure to a grammar that the engine may have, before anything is answered.

grammar() ── known? ─▶ at once
    └─ a free checker, or 429 ─▶ its process: verdict, or it has ended itself: 400
                                      ▲ killed when the client leaves; started anew when somebody needs it
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache

import msgspec

from model.grammar import Vocabulary
from scheduler.child import python_path
from server.errors import InvalidGrammar, Overloaded, Unavailable
from server.structured.checker import PATIENCE, SECONDS, Verdict, read_frame, write_frame
from server.structured.structure import Structure

CHECKERS = 2
"""Processes; started when they are first needed."""
START_SECONDS, WAIT_SECONDS = 10.0, 2.0
"""For the checkers to run at all, and for a free one. With a checker's own time it stays under five, whatever others
send."""
MAX_CHARS = 256 * 1024
"""Of one source."""
CACHED, CACHED_CHARS = 256, 2**23
"""Verdicts that are kept, and the characters of their sources together."""
log = logging.getLogger("octavo.structured")
COMMAND = (sys.executable, "-P", "-m", "server.structured.checker")


class Checker:
    """One process and what is said to it. All but `kill` is called by one thread at a time."""

    def __init__(self, vocabulary: Callable[[], bytes]) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, job: bytes) -> bytes | None:
        """Its answer; None where it ended instead.

        Raises TimeoutError where it was starved, OSError or RuntimeError where it does not start.
        """
        self.start()
        process = self._process
        assert process is not None
        try:
            answer = _exchange(process, job)
        except BrokenPipeError:
            answer = None
        if answer is None and self.close() == -signal.SIGALRM:
            raise TimeoutError
        return answer

    def kill(self) -> None:
        """From any thread: whoever waits for its answer gets None."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> int | None:
        """Ends the process, if there is one; its exit status, which is its own where it had ended already."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        process.communicate()
        return process.returncode

    def start(self) -> None:
        """Does nothing where it runs. Raises OSError or RuntimeError."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._process = process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C in a terminal reaches only this process, which drains first
            env={**os.environ, "PYTHONPATH": python_path()},
        )
        try:
            # It says when it is ready; no job's time runs until then.
            if _exchange(process, self._vocabulary()) is None:
                raise RuntimeError("the process that checks grammars does not start")
        except (OSError, RuntimeError):
            self.close()
            raise


def _exchange(process: subprocess.Popen[bytes], frame: bytes) -> bytes | None:
    """Its answer to a frame; None where it ended instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    write_frame(process.stdin, frame)
    return read_frame(process.stdout)


class Structures:
    """Used on the event loop's thread. `close` ends its processes."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """`vocabulary` is called in a thread, when the first grammar comes."""

        @cache
        def encoded() -> bytes:
            return msgspec.msgpack.encode(vocabulary())

        self._free = [Checker(encoded) for _ in range(CHECKERS)]
        self._all = tuple(self._free)
        self._turns = asyncio.Semaphore(CHECKERS)
        self._starting: asyncio.Future[list[None]] | None = None
        """Of all processes, once; who comes meanwhile waits for it, and only then for a turn."""
        self._threads = ThreadPoolExecutor(CHECKERS, "octavo-grammar")
        self._known: OrderedDict[Structure, Verdict] = OrderedDict()
        self._chars = 0

    async def grammar(self, structure: Structure | None) -> str | None:
        """What `SamplingParams.grammar` wants. Raises InvalidGrammar, or Overloaded where no checker gets free."""
        if structure is None:
            return None
        param = structure.param
        if len(structure.source) > MAX_CHARS:
            raise InvalidGrammar(f"{param}: {len(structure.source)} characters are more than {MAX_CHARS}", param=param)
        verdict = self._known.get(structure) or await self._examined(structure)
        if verdict.grammar is None:
            raise InvalidGrammar(f"{param}: {verdict.fault}"[:600], param=param)
        return verdict.grammar

    def close(self) -> None:
        for checker in self._all:
            checker.kill()
        self._threads.shutdown()
        for checker in self._all:
            checker.close()

    async def _examined(self, structure: Structure) -> Verdict:
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._started()
            async with asyncio.timeout(WAIT_SECONDS):
                await self._turns.acquire()
            try:
                verdict = self._known.get(structure)  # another request may have asked for the same
                return verdict or await self._asked(structure)
            finally:
                self._turns.release()
        except TimeoutError:
            text = "Too many grammars are waiting to be compiled, or the machine is too busy for any."
            raise Overloaded(text, retry_after=2, reason="grammar_checkers") from None
        except (OSError, RuntimeError):
            log.exception("the processes that check grammars do not start")
            raise Unavailable("Grammars cannot be checked at the moment.") from None

    async def _started(self) -> None:
        """Until every process has been started once. Raises OSError or RuntimeError; the next request tries again."""
        if self._starting is None:
            loop = asyncio.get_running_loop()
            starts = [loop.run_in_executor(self._threads, checker.start) for checker in self._all]
            self._starting = asyncio.gather(*starts)
        try:
            await asyncio.shield(self._starting)
        except (OSError, RuntimeError):
            self._starting = None
            raise

    async def _asked(self, structure: Structure) -> Verdict:
        checker = self._free.pop()
        try:
            job = asyncio.get_running_loop().run_in_executor(
                self._threads, checker.ask, msgspec.msgpack.encode(structure)
            )
            try:
                answer = await asyncio.shield(job)
            except asyncio.CancelledError:
                checker.kill()
                with suppress(OSError, RuntimeError):
                    await job
                raise
            except TimeoutError:
                # Not kept: it may be compiled when the machine is less busy.
                return Verdict(fault=f"too complex for a machine that is so busy: not compiled within {PATIENCE:g} s")
        finally:
            self._free.append(checker)
        if answer is None:
            verdict = Verdict(fault=f"too complex: it takes more than {SECONDS:g} s, or more memory than it may")
        else:
            verdict = msgspec.msgpack.decode(answer, type=Verdict)
        self._keep(structure, verdict)
        return verdict

    def _keep(self, structure: Structure, verdict: Verdict) -> None:
        if structure in self._known:
            return
        self._known[structure] = verdict
        self._chars += len(structure.source)
        while len(self._known) > CACHED or self._chars > CACHED_CHARS:
            oldest, _ = self._known.popitem(last=False)
            self._chars -= len(oldest.source)
