"""Ten minutes on a GPU: are the kernels right, and how far is a step from what memory allows? python -m loadtest.device

Needs no network, no files and no web framework. Models have known shapes and random weights; one table at the end.

    kernels    each against float64
    decode     a step of so many sequences with so much context, through the runner, by format of keys and values
    floor      the step's weights, keys and values at the bandwidth of a large copy on the same device
    engine     prompts and answers from the first step to the last, tokens drawn per second
    others     transformers' continuous batching with the same shapes
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvpool.formats import FORMATS
from kvpool.pool import KVPool
from kvpool.storage import KVStorage
from loadtest.kernel_checks import checks
from loadtest.random_model import CONFIGS, layout, random_decoder
from model.attention.triton import TritonAttention
from model.batch import Batch, Row
from model.decoder import Decoder
from model.executor import Runner
from model.precision import DTYPES
from scheduler.engine import Engine
from scheduler.limits import Limits
from scheduler.messages import FinishReason, SamplingParams, Submit

GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table."""

    model: str
    kv: str
    batch: int
    context: int
    seconds: float
    """A decode step, the median."""
    launch: float
    """Of that, until the host had enqueued it."""
    floor: float
    """Seconds that memory needs for it."""

    def line(self) -> str:
        share = 100 * self.floor / self.seconds
        return (
            f"{self.model:13} {self.kv:9} {self.batch:6} {self.context:8} {self.seconds * 1e3:9.3f} "
            f"{self.launch * 1e3:9.3f} {self.floor * 1e3:9.3f} {share:7.1f} {self.batch / self.seconds:10.0f}"
        )


HEAD = "model         pool       batch  context   step ms launch ms  floor ms % floor   tokens/s"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bandwidth(device: torch.device, nbytes: int) -> float:
    """Bytes a second of a copy, what is read and what is written."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        synchronize(device)

    return 2 * nbytes / min(_times(copy, 8))


def _times(call: Callable[[], object], count: int) -> list[float]:
    found = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return found


def decode(
    model: Decoder, name: str, kv: str, batch: int, context: int, steps: int, rate: float, device: torch.device
) -> Cell:
    """A step of `batch` rows that decode, over a pool in which anything lies."""
    shape = layout(model.config, kv, BLOCK)
    each = shape.blocks_for(context)
    storage = KVStorage(shape, 1 + batch * each, device)
    runner = Runner(model, storage, batch)
    tokens = [1] * context
    rows = [
        Row(tokens, context, context - 1, 1, list(range(1 + n * each, 1 + (n + 1) * each)), GREEDY)
        for n in range(batch)
    ]
    launches = []

    def step() -> None:
        began = time.perf_counter()
        pending = runner.execute(Batch(rows))
        launches.append(time.perf_counter() - began)
        pending.result()
        synchronize(device)

    for _ in range(3):  # kernels are compiled
        step()
    launches.clear()
    times = sorted(_times(step, steps))
    read = model.weight_bytes + batch * context * shape.bytes_per_token
    if not model.config.tie_word_embeddings:  # a few rows of it
        read -= model.embedding.nbytes
    launch = sorted(launches)[steps // 2]
    return Cell(name, kv, batch, context, times[steps // 2], launch, read / rate)


def engine_run(
    model: Decoder, kv: str, batch: int, prompt: int, answer: int, device: torch.device
) -> tuple[float, int]:
    """Tokens drawn a second by `batch` requests at once, and how many failed."""
    shape = layout(model.config, kv, BLOCK)
    blocks = 2 + batch * (1 + shape.blocks_for(prompt + answer))
    storage, pool = KVStorage(shape, blocks, device), KVPool(blocks, BLOCK)
    limits = Limits(max_num_seqs=batch, max_num_batched_tokens=8192, max_model_len=8192)
    engine = Engine(pool, Runner(model, storage, limits.max_num_batched_tokens), limits, time.monotonic)
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(max_tokens=answer, seed=0, temperature=0.0, ignore_eos=True)
    requests = [
        Submit(
            id=number,
            prompt_ids=torch.randint(3, model.config.vocab_size, (prompt,), generator=generator).tolist(),
            params=params,
        )
        for number in range(batch)
    ]
    drawn, failed, left = 0, 0, batch
    began = time.perf_counter()
    inbox: list[Submit] = requests
    while left:
        output = engine.step(inbox)
        inbox = []
        drawn += sum(token >= 0 for token in output.tokens)
        left -= sum(finish != FinishReason.RUNNING for finish in output.finishes)
        failed += sum(finish == FinishReason.ERROR for finish in output.finishes)
    return drawn / (time.perf_counter() - began), failed


def transformers_run(name: str, batch: int, prompt: int, answer: int, device: torch.device) -> float:
    """The same by transformers' continuous batching: a model of the same shapes, made on the device."""
    import transformers

    config = CONFIGS[name]
    kind = "Qwen3" if config.qk_norm == "head" else "Llama"
    described = getattr(transformers, f"{kind}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    with device:
        module = transformers.AutoModelForCausalLM.from_config(described, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(3, config.vocab_size, (batch, prompt), generator=generator).tolist()
    generation = transformers.GenerationConfig(max_new_tokens=answer, do_sample=False, eos_token_id=-1)
    module.eval().generate_batch(inputs[:1], generation_config=generation)
    began = time.perf_counter()
    found = module.generate_batch(inputs, generation_config=generation)
    drawn = sum(len(output.generated_tokens) for output in found.values())
    return drawn / (time.perf_counter() - began)


def _lines(args: argparse.Namespace, device: torch.device) -> Iterator[str]:
    """Of the table; the checks have been passed."""
    began = time.monotonic()
    rate = bandwidth(device, 1 << 30 if device.type == "cuda" else 1 << 20)
    yield f"a copy moves {rate / 1e9:.0f} GB/s"
    yield HEAD
    attention, dtype = TritonAttention(device), DTYPES[args.dtype]
    for name in args.model:
        model = random_decoder(name, dtype, attention, device, max(args.context) + args.answer + 1)
        ends = []
        for kv in args.kv:
            for batch in args.batch:
                for context in args.context:
                    if time.monotonic() - began > 60 * args.minutes:
                        yield "out of time"
                        return
                    try:
                        yield decode(model, name, kv, batch, context, args.steps, rate, device).line()
                    except torch.cuda.OutOfMemoryError:
                        yield f"{name:13} {kv:9} {batch:6} {context:8}  does not fit"
            found, failed = engine_run(model, kv, max(args.batch), min(args.context), args.answer, device)
            ends.append(f"{name:13} {kv:9} {max(args.batch):6} {min(args.context):8} engine: {found:.0f} tokens/s")
            if failed:
                ends[-1] += f", {failed} requests failed"
        yield from ends
        del model
        if args.transformers:
            others = transformers_run(name, max(args.batch), min(args.context), args.answer, device)
            yield f"{name:13} bfloat16  {max(args.batch):6} {min(args.context):8} transformers: {others:.0f} tokens/s"


def main(argv: Sequence[str]) -> int:
    """0; 1 where a kernel is wrong."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.device", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: with TRITON_INTERPRET=1 only")
    parser.add_argument("--model", nargs="+", default=["qwen3-0.6b", "llama-3.1-8b"], choices=list(CONFIGS))
    parser.add_argument("--kv", nargs="+", default=["bfloat16", "int8", "k8v4", "tq4"], choices=list(FORMATS))
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--context", nargs="+", type=int, default=[512, 1024], help="tokens, the last one included")
    parser.add_argument("--answer", type=int, default=32, help="tokens that each request of the engine's run draws")
    parser.add_argument("--steps", type=int, default=20, help="per line, behind three that are not timed")
    parser.add_argument("--minutes", type=float, default=8, help="no line is begun after so many")
    parser.add_argument("--no-transformers", dest="transformers", action="store_false")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    wrong = 0
    with torch.inference_mode():
        for check in checks(TritonAttention(device), DTYPES[args.dtype], device, small=args.device == "cpu"):
            wrong += not check.passed
            print(f"{'ok   ' if check.passed else 'WRONG'} {check.error:9.2e} of {check.allowed:.0e}  {check.name}")
    if wrong:
        print(f"{wrong} checks failed", file=sys.stderr)
        return 1
    for line in _lines(args, device):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
