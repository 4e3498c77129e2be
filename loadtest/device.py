"""Ten minutes on a GPU: are the kernels right, and how far is a step from what memory allows? python -m loadtest.device

Needs torch, triton, transformers, msgspec and llguidance; no network, no files, no web framework. Where the first three
are and nothing can be fetched, bring the others in a folder (for Python 3.12):

    pip install --no-deps --only-binary :all: --python-version 3.12 --target beside msgspec llguidance
    PYTHONPATH=beside python -m loadtest.device

Models have known shapes and random weights. Every line is printed as soon as it is known.

    checks     each kernel against float64
    ours       the engine, its steps overlapped, from prompts to answers: sequences, context, format of keys and values
    theirs     transformers' continuous batching: the same shapes, prompts and answers

    prefill    prompt tokens a second until all sequences decode
    step       milliseconds from one full decode step's launch to the next one's, the median
    launch     of these, those in which the host enqueued it
    idle       share of it in which the device had nothing of the step to do
    floor      milliseconds that its weights, keys and values take at the bandwidth of a large copy; its share of step
    tokens/s   drawn by full steps; and over all, the prompts' time included
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import triton

from kvpool.formats import FORMATS
from kvpool.pool import KVPool
from kvpool.storage import KVStorage
from loadtest.kernel_checks import checks, one_line
from loadtest.random_model import CONFIGS, layout, random_decoder, random_transformer
from model.attention.triton import TritonAttention
from model.batch import Batch, Executor, Pending
from model.decoder import Decoder
from model.errors import ModelError
from model.executor import Runner
from model.gpu.launch import INTERPRETED
from model.graphs import captured
from model.precision import DTYPES, choose_device
from model.runner import warm_up
from scheduler.engine import Engine
from scheduler.limits import Limits
from scheduler.messages import FinishReason, SamplingParams, Submit

BLOCK = 16
STEP_TOKENS = 8192
HEAD = (
    f"{'model':13} {'pool':12} {'batch':>5} {'context':>7} {'prefill/s':>9} {'step ms':>8} {'launch':>7} {'idle %':>6} "
    f"{'floor ms':>8} {'% floor':>7} {'tokens/s':>8} {'over all':>8}"
)


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    pool: str
    batch: int
    context: int
    """Of each sequence at its end."""

    def line(self) -> str:
        return f"{self.model:13} {self.pool:12} {self.batch:5} {self.context:7}"


@dataclass(frozen=True, slots=True)
class Cell:
    """What a case took. Seconds and tokens a second."""

    case: Case
    prefill: float
    step: float
    launch: float
    idle: float
    """Share of a step."""
    floor: float
    overall: float
    failed: int

    def line(self) -> str:
        return (
            f"{self.case.line()} {self.prefill:9.1f} {self.step * 1e3:8.3f} {self.launch * 1e3:7.3f} "
            f"{100 * self.idle:6.1f} {self.floor * 1e3:8.3f} {100 * self.floor / self.step:7.1f} "
            f"{self.case.batch / self.step:8.1f} {self.overall:8.1f}{f'  {self.failed} failed' if self.failed else ''}"
        )


@dataclass(slots=True)
class Noted:
    """A step's launch."""

    rows: int
    """0 for a step with prompts in it."""
    began: float
    launch: float
    marks: tuple[torch.cuda.Event, torch.cuda.Event] | None
    """On a GPU: before and behind all that was enqueued."""

    def idle(self, following: Noted) -> float:
        """Seconds between what this step enqueued and the next one."""
        if self.marks is None or following.marks is None:
            return following.began - self.began - self.launch
        return float(self.marks[1].elapsed_time(following.marks[0])) / 1e3


@dataclass(slots=True)
class Watch:
    """Between an engine and its runner: notes when steps are launched."""

    runner: Executor
    device: torch.device
    steps: list[Noted] = field(default_factory=list)

    def execute(self, batch: Batch) -> Pending:
        first, began = self._mark(), time.perf_counter()
        pending = self.runner.execute(batch)
        launch, last = time.perf_counter() - began, self._mark()
        rows = len(batch.rows) if all(row.count == 1 for row in batch.rows) else 0
        self.steps.append(Noted(rows, began, launch, (first, last) if first and last else None))
        return pending

    def _mark(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def bandwidth(device: torch.device, nbytes: int) -> float:
    """Bytes a second of a copy, what is read and what is written."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        began = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return 2 * nbytes / min(times)


def prompts(vocab: int, batch: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    found: list[list[int]] = torch.randint(3, vocab, (batch, length), generator=generator).tolist()
    return found


def ours(model: Decoder, case: Case, answer: int, rate: float, device: torch.device) -> Cell:
    """The engine, its pool just large enough, with one graph: that of a full step."""
    shape = layout(model.config, case.pool, BLOCK)
    each = shape.blocks_for(case.context + 1)
    blocks = 8 + case.batch * (each + 1) * 102 // 100
    storage = KVStorage(shape, blocks, device)
    steps = captured(model, storage, [case.batch], each, lambda stage, detail: _say(f"{stage}: {detail}"))
    runner = Runner(steps, storage, STEP_TOKENS)
    warm_up(runner, min(case.context, STEP_TOKENS))  # as long as a prompt: kernels for split contexts are compiled, too
    watch = Watch(runner, device)
    limits = Limits(max_num_seqs=case.batch, max_num_batched_tokens=STEP_TOKENS, max_model_len=case.context + 1)
    engine = Engine(KVPool(blocks, BLOCK), watch, limits, time.monotonic, depth=1)
    params = SamplingParams(max_tokens=answer, seed=0, temperature=0.0)
    length = case.context - answer
    inbox = [
        Submit(id=number, prompt_ids=ids, params=params)
        for number, ids in enumerate(prompts(model.config.vocab_size, case.batch, length))
    ]
    left, failed, drawn = case.batch, 0, 0
    began = time.perf_counter()
    while left:
        output = engine.step(inbox)
        inbox = []
        drawn += sum(token >= 0 for token in output.tokens)
        left -= sum(finish != FinishReason.RUNNING for finish in output.finishes)
        failed += sum(finish == FinishReason.ERROR for finish in output.finishes)
    seconds = time.perf_counter() - began
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # a surplus step may still run, and marks are read when the device is past them
    full = [(a, b) for a, b in pairwise(watch.steps) if a.rows == b.rows == case.batch]
    if not full:
        raise RuntimeError(f"no two steps with all {case.batch} sequences, {failed} of which failed")
    step = statistics.median(b.began - a.began for a, b in full)
    read = model.weight_bytes + case.batch * (length + answer // 2) * shape.bytes_per_token
    if not model.config.tie_word_embeddings:  # of the table a few rows
        read -= model.embedding.nbytes
    return Cell(
        case,
        prefill=case.batch * length / (full[0][0].began - began),
        step=step,
        launch=statistics.median(a.launch for a, _ in full),
        idle=statistics.median(a.idle(b) for a, b in full) / step,
        floor=read / rate,
        overall=drawn / seconds,
        failed=failed,
    )


def theirs(case: Case, answer: int, dtype: torch.dtype, device: torch.device) -> float:
    """Tokens drawn a second by transformers' continuous batching, from its first prompt's begin to its last answer.

    What comes before, its pool and its graphs, is not counted, nor is the end of its thread. RuntimeError where it does
    not answer every prompt.
    """
    import transformers

    module = random_transformer(case.model, dtype, device)
    inputs = prompts(CONFIGS[case.model].vocab_size, case.batch, case.context - answer)
    kind: Any = transformers.GenerationConfig
    generation = kind(max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0)
    module.generate_batch(inputs[:2], generation_config=generation)
    found = module.generate_batch(inputs, generation_config=generation).values()
    drawn = [len(output.generated_tokens) for output in found if output.error is None]
    if drawn != [answer] * case.batch:  # it logs what goes wrong, and returns what there is
        raise RuntimeError(f"{drawn.count(answer)} of {case.batch} prompts answered")
    began, ended = zip(*(output.lifespan for output in found), strict=True)
    return float(sum(drawn) / (max(ended) - min(began)))


def verdicts(cells: Sequence[Cell]) -> Iterator[str]:
    """What is wanted of the shape of 8 billion parameters."""
    found = {cell.case: cell for cell in cells if cell.case.model == "llama-3.1-8b"}
    for case, cell in found.items():
        share = {1: 0.7, 256: 0.6}.get(case.batch, 0.0) * (case.pool == "bfloat16")
        if share:
            yield _verdict(cell.floor / cell.step >= share, f"{share:.0%} of the floor: {case.line()}")
    pair = [found.get(Case("llama-3.1-8b", pool, 256, 1024)) for pool in ("tq4", "bfloat16")]
    if pair[0] and pair[1]:
        yield _verdict(pair[0].step < pair[1].step, "tq4 faster than bfloat16 at 256 sequences of 1024 tokens")
    if found:
        yield _verdict(max(cell.idle for cell in found.values()) < 0.05, "the device idle in less than 5% of a step")


def _verdict(reached: bool, words: str) -> str:
    return f"{'reached' if reached else 'MISSED '} {words}"


def _measure(args: argparse.Namespace, device: torch.device, end: float) -> int:
    """Print the table, the largest cases last, until the clock says `end`; how many of our cases raised."""
    rate = bandwidth(device, 1 << 30 if device.type == "cuda" else 1 << 20)
    _say(f"a copy moves {rate / 1e9:.0f} GB/s")
    _say(HEAD)
    attention, dtype = TritonAttention(device), DTYPES[args.dtype]
    cells, raised = list[Cell](), 0
    sizes = [(batch, context) for batch in args.batch for context in args.context]
    for name in args.model:
        if time.monotonic() > end:
            break
        try:
            model = random_decoder(name, dtype, attention, device, max(args.context) + 1)
        except torch.OutOfMemoryError:
            _say(f"{name:13} does not fit")
            continue
        for case in [Case(name, kv, *size) for size in sizes for kv in args.kv]:
            if time.monotonic() > end:
                break
            try:
                cells.append(ours(model, case, args.answer, rate, device))
                _say(cells[-1].line())
            except torch.OutOfMemoryError:
                _say(f"{case.line()}  does not fit")
            except Exception as error:  # the minutes that are left are for the others
                raised += 1
                _say(f"{case.line()}  {one_line(error)}")
                traceback.print_exc()
            _give_back(device)
        del model
        _give_back(device)
        for case in [Case(name, "transformers", *size) for size in sizes if args.transformers]:
            if time.monotonic() > end:
                break
            try:
                _say(f"{case.line()}{theirs(case, args.answer, dtype, device):68.1f}")
            except Exception as error:  # none of ours
                _say(f"{case.line()}  {one_line(error)}")
            _give_back(device)
    if time.monotonic() > end:
        _say("out of time")
    for line in verdicts(cells):
        _say(line)
    return raised


def _say(line: str) -> None:
    print(line, flush=True)


def _give_back(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main(argv: Sequence[str]) -> int:
    """0; 1 where a kernel is wrong, or a case of ours raised."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m loadtest.device", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: with TRITON_INTERPRET=1 only")
    parser.add_argument("--model", nargs="+", default=["qwen3-0.6b", "llama-3.1-8b"], choices=list(CONFIGS))
    parser.add_argument("--kv", nargs="+", default=["bfloat16", "int8", "k8v4", "tq4"], choices=list(FORMATS))
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--context", nargs="+", type=int, default=[512, 1024], help="tokens of prompt and answer")
    parser.add_argument("--answer", type=int, default=32, help="tokens that each sequence draws")
    parser.add_argument("--minutes", type=float, default=8, help="from the start, after which no case is begun")
    parser.add_argument("--no-checks", dest="checks", action="store_false", help="measure, even what is wrong")
    parser.add_argument("--no-transformers", dest="transformers", action="store_false")
    args = parser.parse_args(argv)
    try:
        _check(args)
        device = choose_device(args.device)
    except ModelError as error:
        parser.error(str(error))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreted"
    _say(f"{name}, torch {torch.__version__}, triton {triton.__version__}")
    torch.manual_seed(0)
    wrong = 0
    with torch.inference_mode():
        for check in checks(TritonAttention(device), DTYPES[args.dtype], device, INTERPRETED) if args.checks else ():
            wrong += not check.passed
            _say(f"{'ok   ' if check.passed else 'WRONG'} {check.error:9.2e} of {check.allowed:.0e}  {check.name}")
    if wrong:
        print(f"{wrong} checks failed", file=sys.stderr)
        return 1
    return int(_measure(args, device, begun + 60 * args.minutes) > 0)


def _check(args: argparse.Namespace) -> None:
    """Raises ModelError, one line, for what cannot be run."""
    if (args.device == "cpu") != INTERPRETED:
        raise ModelError(f"--device {args.device}: TRITON_INTERPRET=1 must be set for cpu, and not for cuda")
    if args.device == "cpu" and args.dtype != "float32":
        raise ModelError(f"--dtype {args.dtype}: must be float32 for cpu")
    if not 1 < args.answer < min(args.context):
        raise ModelError(f"--answer {args.answer}: must be at least 2 and less than every --context")
    for batch in args.batch:
        if not 1 <= batch <= STEP_TOKENS:
            raise ModelError(f"--batch {batch}: must be between 1 and {STEP_TOKENS}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
