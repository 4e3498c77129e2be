"""The flags of `octavo bench`, named as `vllm bench serve` names them."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from kvpool.budget import parse_bytes
from loadtest.report import METRICS

GOODPUT = ("ttft", "tpot", "e2el")
N = TypeVar("N", int, float)
DATASETS = ("random", "sharegpt", "shared-prefix", "prefix_repetition")


class Flags(argparse.ArgumentParser):
    """Says what is wrong in one line. A part of a flag's name is no flag."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that there are, as they would be written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, [], False, ""):
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return super()._get_help_string(action)


def make_parser() -> argparse.ArgumentParser:
    parser = Flags(
        "octavo bench",
        description="Measure an OpenAI-compatible server, or with --engine the engine alone, in this process.",
        epilog="octavo bench compare: this server and others in turn. octavo bench export: a GGUF model for others. "
        "octavo bench perplexity: what number types cost. octavo bench kv: what "
        "formats of keys and values hold, cost and take. octavo bench growth: what a step and the queue cost. "
        "octavo bench fairness: what a tenant feels of a greedy one. octavo bench turns: how soon a conversation goes "
        "on, before and after a restart. octavo bench sharing: what priorities and cores of a server's processes "
        "bring. octavo bench soak: whether anything is lost under faults.",
        formatter_class=Help,
        argument_default=None,
    )
    add = parser.add_argument
    add(
        "--engine", nargs="?", const="", metavar="MODEL", help="drive the engine without HTTP; no MODEL: the demo model"
    )
    add("--base-url", default="http://127.0.0.1:8000", type=base_url, help="the server, without the endpoint")
    add("--endpoint", default="/v1/completions", help="/v1/completions or /v1/chat/completions")
    add("--model", help="its name in requests; without it the first of /v1/models")
    add("--api-key", help="without it, OPENAI_API_KEY from the environment")
    add("--header", action="append", default=[], type=_pair, metavar="KEY=VALUE", help="a header more; repeatable")
    add("--extra-body", type=_json_object, metavar="JSON", help="more fields of every request's body")
    add("--request-timeout", type=positive(float), default=6 * 3600.0, help="seconds for one whole answer")

    load = parser.add_argument_group("load").add_argument
    load("--num-prompts", type=positive(int), default=1000, help="requests to send")
    load("--max-concurrency", type=positive(int), help="requests in flight at most; closed loop without --request-rate")
    load("--request-rate", type=positive(float), default=math.inf, help="requests a second, in open loop")
    load("--burstiness", type=positive(float), default=1.0, help="shape of the gaps; 1: Poisson, less: burstier")
    load("--ramp-up-strategy", choices=["linear", "exponential"], help="let the rate grow, instead of --request-rate")
    load("--ramp-up-start-rps", type=positive(float), help="rate of the first request")
    load("--ramp-up-end-rps", type=positive(float), help="rate of the last request")
    load(
        "--long-prompt-len",
        type=positive(int),
        help="instead: --max-concurrency streams, and how their gaps change while one prompt of so many tokens arrives",
    )
    load("--num-warmups", type=natural, default=0, help="requests before the measured ones, with prompts of their own")
    load("--seed", type=int, default=0, help="of prompts and gaps; a prompt sent again may come from a cache")

    data = parser.add_argument_group("workload").add_argument
    data("--dataset-name", choices=DATASETS, default="random", help="what is asked")
    data("--dataset-path", help="the ShareGPT file; without it, random tokens with lengths like ShareGPT's")
    data("--random-input-len", type=positive(int), default=1024, help="tokens of a random prompt")
    data("--random-output-len", type=positive(int), default=128, help="tokens of its answer")
    data("--random-range-ratio", type=_share, default=0.0, help="lengths vary by this share, both ways")
    data("--prefix-repetition-prefix-len", type=positive(int), default=256, help="tokens of each shared beginning")
    data("--prefix-repetition-suffix-len", type=positive(int), default=256, help="tokens of each own end")
    data("--prefix-repetition-num-prefixes", type=positive(int), default=10, help="different beginnings")
    data("--prefix-repetition-output-len", type=positive(int), default=128, help="tokens of each answer")
    data("--sharegpt-output-len", type=positive(int), help="instead of the recorded answers' lengths")
    data("--vocab-size", type=positive(int), help="without it, asked from the server, else 32000")

    sampling = parser.add_argument_group("sampling").add_argument
    sampling("--temperature", type=float, default=0.0, help="0: greedy")
    sampling("--top-p", type=float, help="of every request")
    sampling("--top-k", type=int, help="of every request")
    sampling("--min-p", type=float, help="of every request")
    sampling("--ignore-eos", action=argparse.BooleanOptionalAction, help="default: on, but off for a ShareGPT file")

    out = parser.add_argument_group("report").add_argument
    out("--percentile-metrics", type=_metrics, default=list(METRICS), help="of ttft,tpot,itl,e2el")
    out("--metric-percentiles", type=_percentiles, default=[99.0], help="e.g. 50,90,99")
    out("--goodput", nargs="+", type=_limit, default=[], metavar="METRIC:MS", help="e.g. ttft:500 tpot:50 e2el:9000")
    out("--save-result", action="store_true", help="write the figures as JSON")
    out("--save-detailed", action="store_true", help="with one entry per request")
    out("--result-dir", default=".", help="folder of the JSON file")
    out("--result-filename", help="its name")
    out("--label", help="part of its name, and a field in it")
    out("--metadata", nargs="+", default=[], type=_pair, metavar="KEY=VALUE", help="more fields in it")
    out("--disable-tqdm", action="store_true", help="no progress bar, even on a terminal")

    engine = parser.add_argument_group("engine, with --engine only").add_argument
    engine("--device", default="auto", choices=["auto", "cpu", "cuda"], help="where it runs")
    engine("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="of the weights")
    engine("--quantization", default=None, choices=["int8", "int4"], help="of the weights; by default none")
    engine("--kv-cache-dtype", default="auto", help="of keys and values")
    engine("--kv-cache-memory", type=byte_count, metavar="BYTES", help="of the pool, e.g. 4GiB")
    engine("--block-size", type=positive(int), default=16, help="tokens of a block")
    engine("--max-model-len", type=positive(int), help="longest sequence")
    engine("--max-num-seqs", type=positive(int), default=64, help="rows of a step at most")
    engine("--max-num-batched-tokens", type=positive(int), help="tokens of a step at most")
    engine("--target-step-time", type=positive(float), default=0.1, help="seconds of a step with a chunk, on a CPU")
    engine("--num-speculative-tokens", type=natural, default=8, help="tokens guessed at most; 0: no speculation")
    engine("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="share prefixes")
    engine("--profile", action="store_true", help="print where the microseconds of a step go")
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse flags that contradict each other; exits with status 2."""
    ramp = (args.ramp_up_start_rps, args.ramp_up_end_rps)
    if args.ramp_up_strategy is None and any(ramp):
        parser.error("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
    if args.ramp_up_strategy is not None and (None in ramp or args.request_rate != math.inf):
        parser.error("--ramp-up-strategy takes --ramp-up-start-rps and --ramp-up-end-rps, and no --request-rate")
    if args.long_prompt_len is not None and (args.engine is not None or args.dataset_name != "random"):
        parser.error("--long-prompt-len needs a server and random prompts: no --engine, no --dataset-name")
    if args.dataset_path is not None and args.dataset_name != "sharegpt":
        parser.error("--dataset-path goes with --dataset-name sharegpt")
    if args.engine is not None and (args.request_rate != math.inf or args.ramp_up_strategy is not None):
        parser.error("--engine runs a closed loop: --max-concurrency, not --request-rate")
    if args.profile and args.engine is None:
        parser.error("--profile looks into the engine: it needs --engine")
    if args.engine is not None and args.dataset_path is not None:
        parser.error("--engine takes token prompts only, so no --dataset-path")
    if args.engine is not None and args.ignore_eos is False:
        parser.error("--engine always generates to the full length")


def positive(kind: Callable[[str], N]) -> Callable[[str], N]:
    """An argparse type: a number above 0."""

    def parse(text: str) -> N:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    parse.__name__ = "number"
    return parse


def shell_words(text: str) -> list[str]:
    """An argparse type: what a shell makes of a line."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def natural(text: str) -> int:
    """An argparse type: a whole number from 0 on."""
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _share(text: str) -> float:
    if not 0 <= (value := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return value


def base_url(text: str) -> str:
    """An argparse type: a server's address without the endpoint."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} does not begin with http:// or https://")
    return text.rstrip("/").removesuffix("/v1")


def byte_count(text: str) -> int:
    """An argument such as 4GiB."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key.strip(), value.strip()


def _json_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def _metrics(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in METRICS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if any(not 0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} has a value outside 0 to 100")
    return values


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in GOODPUT:
        raise argparse.ArgumentTypeError(f"{text!r} does not begin with {', '.join(GOODPUT)} and a colon")
    return name, positive(float)(value)
