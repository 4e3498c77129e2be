"""An engine with faults: the real worker, whose runner fails on rows whose prompt begins with one of FAULTS' tokens.

`python -m tests.faults.worker --fd N`, in the place of `python -m scheduler.worker`; `server.py` puts it there.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch

from model.batch import BAD_LOGITS, Batch, Executor, Pending
from model.executor import Step
from scheduler import worker
from scheduler.config import EngineConfig
from scheduler.messages import Ready
from scheduler.worker import Factory, Report, Steps

DOWN = "TESTS_ENGINE_DOWN"
"""A variable with a path: while there is such a file, no engine starts."""
DOWN_STATUS = 3


class Escape(BaseException):
    """Nothing in the engine catches it."""


def _raise() -> None:
    raise ValueError("a row that cannot be computed")


def _allocate() -> None:
    torch.empty(1 << 50)


def _hang() -> None:
    time.sleep(3600)


def _escape() -> None:
    raise Escape


FAULTS: dict[str, tuple[int, Callable[[], None]]] = {
    "raise": (1001, _raise),
    "allocate": (1002, _allocate),
    "abort": (1003, os.abort),
    "hang": (1004, _hang),
    "escape": (1005, _escape),
}
"""By name: the first token of a prompt, and what happens to a step with such a row."""
_BY_TOKEN = dict(FAULTS.values())
NAN = 1006
"""The same token of a prompt whose logits are no numbers."""


class Faulty:
    """See `model.batch.Executor`."""

    def __init__(self, runner: Executor) -> None:
        self._runner = runner

    def execute(self, batch: Batch) -> Pending:
        for row in batch.rows:
            if fault := _BY_TOKEN.get(row.tokens[0]):
                fault()
        step = self._runner.execute(batch)
        if isinstance(step, Step) and (draws := step.draws) is not None:
            for number, place in draws.first.items():
                if batch.rows[number].tokens[0] == NAN:
                    with torch.inference_mode():
                        if draws.logits is not None:
                            draws.logits[place] = torch.nan
                        elif draws.ahead is not None:  # the head has met them, and drawn nothing from them
                            draws.ahead.tokens[place] = BAD_LOGITS
        return step


def _factory() -> Factory:
    if os.path.exists(os.environ.get(DOWN, "")):
        os._exit(DOWN_STATUS)
    from scheduler.assembly import assemble

    def factory(config: EngineConfig, report: Report) -> tuple[Steps, Ready]:
        engine, ready = assemble(config, report)
        engine._executor = Faulty(engine._executor)
        return engine, ready

    return factory


if __name__ == "__main__":
    worker._factory = _factory
    status = worker.main()
    sys.stderr.flush()
    os._exit(status)
