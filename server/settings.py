"""Every knob of `octavo serve`: flag, else OCTAVO_* in the environment, else a key of --config FILE, else default."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    FilePath,
    JsonValue,
    SecretStr,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from scheduler.config import EngineConfig

ENV_PREFIX = "OCTAVO_"
OTHER_VARIABLES = frozenset({"OCTAVO_CONFIG", "OCTAVO_KERNEL_CACHE", "OCTAVO_KERNEL_FLAGS", "OCTAVO_PUBLISH"})
"""No settings: --config, where compiled kernels are kept and with what they are compiled, the port that Compose
publishes."""


class BadSettings(Exception):
    """A flag, a variable or the file is wrong: one line that names it."""


def flag(default: Any, group: str, description: str, metavar: str | None = None, **limits: Any) -> Any:
    """A field of Settings that `server.cli` shows as a flag."""
    extra: dict[str, JsonValue] = {"group": group, "metavar": metavar}
    if isinstance(default, list):
        return Field(default_factory=list, description=description, json_schema_extra=extra, **limits)
    return Field(default, description=description, json_schema_extra=extra, **limits)


def _bytes(value: object) -> object:
    from kvpool.budget import parse_bytes

    return parse_bytes(value) if isinstance(value, str) else value


def _url(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError("must begin with http:// or https://")
    return value


def _number(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _commas(value: object) -> object:
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
        return [part.strip() for entry in value for part in str(entry).split(",")]
    return value


Name = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[^\x00-\x20\x7f]+$")]


class Settings(BaseSettings):
    """Validated once, at start; frozen from then on."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    model: str | None = flag(
        None, "Model", "hub id, folder, or GGUF file; without it the built-in SmolLM2-135M-Instruct", "MODEL"
    )
    served_model_name: Annotated[list[Name], NoDecode, BeforeValidator(_commas)] = flag(
        [], "Model", "name in /v1/models; more names, each its own flag or after a comma, are aliases", "NAME"
    )
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "Model", "where the model runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag(
        "auto",
        "Model",
        "type of the weights; auto: bfloat16, but float32 on a CPU without kernels and without bfloat16",
    )
    quantization: Literal["int8", "int4"] | None = flag(
        None,
        "Model",
        "int8 or int4: quantise the matrices as they are loaded, on a CPU; by default not; int4 keeps what a GGUF file "
        "has in Q4_0 or Q4_1",
    )
    tensor_parallel_size: int = flag(
        1, "Model", "processes that each hold a part of every layer, on a GPU each", "N", ge=1, le=64
    )
    max_model_len: int | None = flag(
        None, "Model", "context length in tokens; by default the model's own", "TOKENS", ge=16, le=2**24
    )
    chat_template: FilePath | None = flag(None, "Model", "Jinja file to use instead of the model's template", "FILE")
    tool_call_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral", "granite", "pythonic"] = flag(
        "auto", "Model", "format of tool calls; auto: what the chat template names; none: calls stay text"
    )
    reasoning_parser: Literal["auto", "none", "think", "mistral", "thinking", "thought", "reasoning", "granite"] = flag(
        "auto", "Model", "markers of reasoning; auto: what the chat template names; none: reasoning stays text"
    )
    reasoning_field: Literal["both", "reasoning_content", "reasoning"] = flag(
        "both", "Model", "field of chat answers that holds reasoning: reasoning_content, reasoning, or both"
    )
    generation_config: Literal["auto", "none"] = flag(
        "auto", "Model", "default sampling values: auto, the model's generation_config; none, OpenAI's"
    )
    seed: int | None = flag(
        None, "Model", "seeds of requests that bring none are drawn from it; by default at random", "N", ge=0, lt=2**63
    )
    trust_request_chat_template: bool = flag(
        False, "Model", "let requests bring a chat_template of their own; it runs in the sandbox, within its limits"
    )
    allow_special_tokens_in_content: bool = flag(
        False, "Model", "let special tokens written out in a message's content become special tokens"
    )

    kv_cache_memory: Annotated[int, BeforeValidator(_bytes)] | None = flag(
        None, "Memory", "bytes of the KV pool, e.g. 4GiB; by default from what is free", "BYTES", ge=1, le=2**50
    )
    gpu_memory_utilization: float = flag(
        0.9, "Memory", "share of a GPU's memory to use, where --kv-cache-memory is not given", "0..1", gt=0, le=1
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "k8v4", "tq4"] = flag(
        "auto",
        "Memory",
        "type of keys and values; int8, k8v4 and tq4 hold 1.9, 2.5 and 3.7 times the tokens of 16 bits",
    )
    force_kv_cache_dtype: bool = flag(
        False, "Memory", "serve a --kv-cache-dtype even where the start finds that it moves the model too far"
    )
    block_size: Annotated[Literal[16, 32, 64], BeforeValidator(_number)] = flag(
        16, "Memory", "tokens in a block of the pool: 16, 32 or 64", "TOKENS"
    )
    enable_prefix_caching: bool = flag(True, "Memory", "reuse the keys and values of a prefix seen before")
    kv_disk: Annotated[str, StringConstraints(min_length=1)] | None = flag(
        None, "Memory", "file that keeps prefixes the pool has no room for, also over a restart", "FILE"
    )
    kv_disk_size: Annotated[int, BeforeValidator(_bytes)] | None = flag(
        None, "Memory", "bytes of that file, taken at once", "BYTES", ge=1, le=2**50
    )
    kv_host_memory: Annotated[int, BeforeValidator(_bytes)] | None = flag(
        None, "Memory", "bytes of host memory that keep such prefixes instead, beside a GPU", "BYTES", ge=1, le=2**50
    )

    max_num_seqs: int = flag(64, "Scheduling", "sequences that run at once", "N", ge=1, le=65536)
    max_num_batched_tokens: int | None = flag(
        None,
        "Scheduling",
        "tokens computed in one step; by default 512 on a CPU, 8192 on a GPU",
        "TOKENS",
        ge=1,
        le=2**24,
    )
    target_step_time: float = flag(
        0.1,
        "Scheduling",
        "on a CPU: length in seconds that a step with part of a prompt should have",
        "SECONDS",
        gt=0,
        le=60,
    )
    num_speculative_tokens: int = flag(
        8, "Scheduling", "tokens guessed at most from earlier text, where that pays; 0: none", "N", ge=0, le=64
    )
    async_scheduling: bool | None = flag(
        None, "Scheduling", "plan and launch a step while the one before it runs; by default on a GPU, not on a CPU"
    )
    max_queued_requests: int = flag(
        2048, "Scheduling", "sequences that may wait beyond --max-num-seqs; more are refused with 429", "N", ge=0
    )
    max_queued_tokens: int = flag(
        1_048_576, "Scheduling", "prompt tokens that may wait; more are refused with 429", "TOKENS", ge=1
    )
    queue_timeout: float = flag(
        0, "Scheduling", "seconds that a request may wait for its first step; 0: any time", "SECONDS", ge=0
    )
    request_timeout: float = flag(
        0, "Scheduling", "seconds that a request may take in all; 0: any time", "SECONDS", ge=0
    )

    host: str = flag("127.0.0.1", "Server", "address to listen on", "ADDRESS")
    port: int = flag(8000, "Server", "port to listen on; 0: any free one", "PORT", ge=0, le=65535)
    api_key: Annotated[list[SecretStr], NoDecode, BeforeValidator(_commas)] = flag(
        [], "Server", "key that clients must send; more keys, each its own flag or after a comma", "KEY"
    )
    api_keys_file: FilePath | None = flag(
        None,
        "Server",
        "keys with names, limits and weights, as .yaml, .toml or .json; read again at SIGHUP",
        "FILE",
    )
    strict_fields: bool = flag(False, "Server", "refuse unknown fields of a request with 400 instead of ignoring them")
    protect_metrics: bool = flag(False, "Server", "ask for the key on /metrics too")
    max_connections: int = flag(
        4096,
        "Server",
        "open connections; at the limit the one that has asked for nothing for longest is closed",
        "N",
        ge=1,
        le=65536,
    )
    send_timeout: float = flag(
        60, "Server", "seconds that a client may read nothing of what waits for it", "SECONDS", gt=0, le=86400
    )
    drain_timeout: float = flag(
        30, "Server", "seconds that running requests get to finish after SIGTERM", "SECONDS", ge=0, le=86400
    )
    watchdog_timeout: float = flag(
        30,
        "Server",
        "seconds of silence, with work pending, after which the engine is restarted",
        "SECONDS",
        ge=1,
        le=86400,
    )
    max_engine_restarts: int = flag(
        5,
        "Server",
        "restarts of the engine in a row that bring no token; then the server ends; 0: none",
        "N",
        ge=0,
        le=1000,
    )
    enable_sleep_mode: bool = flag(
        False, "Server", "let POST /sleep end the engine and free its memory, until POST /wake_up starts another"
    )
    wake_on_request: bool = flag(
        False, "Server", "let a request wake a server that sleeps, and wait for it, instead of getting 503"
    )
    metrics_alias: Literal["vllm", "none"] = flag(
        "vllm", "Server", "names on /metrics beside octavo_*: vllm, what dashboards for vLLM read"
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "Server", "least severe line that is logged")
    log_format: Literal["text", "json"] = flag("text", "Server", "one line of text, or one JSON object a line")
    log_requests: bool = flag(
        False, "Server", "log the first 4 KiB of every request body, prompts included; by default no prompt is logged"
    )
    otlp_traces_endpoint: Annotated[str, AfterValidator(_url)] | None = flag(
        None, "Server", "URL that OpenTelemetry spans are sent to, e.g. http://127.0.0.1:4318/v1/traces", "URL"
    )

    @field_validator("api_key")
    @classmethod
    def _keys(cls, keys: list[SecretStr]) -> list[SecretStr]:
        if any(not key.get_secret_value().isascii() or not key.get_secret_value().isprintable() for key in keys):
            raise ValueError("a key must be printable ASCII")
        if any(not key.get_secret_value() for key in keys):
            raise ValueError("a key must not be empty")
        return keys

    @field_validator("api_keys_file")
    @classmethod
    def _keys_file(cls, file: Path | None) -> Path | None:
        from server.key_file import read_keys

        if file is not None:
            read_keys(file)
        return file

    @model_validator(mode="after")
    def _tier(self) -> Settings:
        if (self.kv_disk is None) != (self.kv_disk_size is None):
            raise ValueError("--kv-disk and --kv-disk-size go together")
        tiers = [name for name in ("kv_disk", "kv_host_memory") if getattr(self, name) is not None]
        if len(tiers) == 2:
            raise ValueError("--kv-disk and --kv-host-memory: there is one tier behind the pool, so name one of them")
        if tiers and not self.enable_prefix_caching:
            raise ValueError(f"--{tiers[0].replace('_', '-')} keeps cached prefixes: it needs --enable-prefix-caching")
        if tiers and self.tensor_parallel_size > 1:
            raise ValueError(f"--{tiers[0].replace('_', '-')} and --tensor-parallel-size: a split pool has no tier")
        return self

    @model_validator(mode="after")
    def _ranks(self) -> Settings:
        if self.async_scheduling and self.tensor_parallel_size > 1:
            raise ValueError("--async-scheduling and --tensor-parallel-size: of several ranks only the first draws")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        assert isinstance(init_settings, InitSettingsSource)
        flags = dict(init_settings.init_kwargs)
        file = flags.pop("_file", {})
        return (
            InitSettingsSource(settings_cls, init_kwargs=flags),
            env_settings,
            InitSettingsSource(settings_cls, init_kwargs=file),
        )

    def engine(self) -> EngineConfig:
        """What the engine process is told."""
        return EngineConfig(
            **{name: getattr(self, name) for name in EngineConfig.__struct_fields__ if hasattr(self, name)}
        )


def read_file(path: Path, flag: str = "--config") -> dict[str, Any]:
    """The mapping in a YAML, TOML or JSON file, told apart by its suffix; keys with dashes or underscores.

    `flag` named it. Raises BadSettings.
    """
    readers: dict[str, Callable[[str], Any]] = {
        ".yaml": yaml.safe_load,
        ".yml": yaml.safe_load,
        ".toml": tomllib.loads,
        ".json": json.loads,
    }
    reader = readers.get(path.suffix)
    if reader is None:
        raise BadSettings(f"{flag} {path}: must end in .yaml, .yml, .toml or .json")
    try:
        content = reader(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadSettings(f"{flag} {path}: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        # YAML's own message quotes the line, and there may be a key in it.
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: not valid YAML" if mark is not None else str(error)
        raise BadSettings(f"{flag} {path}: {' '.join(place.split())}") from None
    if not isinstance(content, dict):
        raise BadSettings(f"{flag} {path}: must hold a mapping of settings")
    return {str(key).replace("-", "_"): value for key, value in content.items() if value is not None}


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Variables with our prefix that nobody reads: most often a flag's name with a slip of the pen."""
    known = {f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields} | OTHER_VARIABLES
    return sorted(name for name in environment if name.upper().startswith(ENV_PREFIX) and name.upper() not in known)


def load_settings(flags: dict[str, Any], file: Path | None = None) -> Settings:
    """Settings from the flags that were given, the environment and the file. Raises BadSettings."""
    content = read_file(file) if file is not None else {}
    for name in content.keys() - Settings.model_fields.keys():
        raise BadSettings(f"--config {file}: unknown setting {name!r}")
    try:
        return Settings(**{**flags, "_file": content})
    except SettingsError as error:
        raise BadSettings(" ".join(str(error).split())) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        if not first["loc"]:  # of several settings together
            raise BadSettings(first["msg"].removeprefix("Value error, ")) from None
        name = str(first["loc"][0])
        origin = "--" + name.replace("_", "-")
        if name not in flags:
            origin = f"{ENV_PREFIX}{name.upper()}" if name not in content else f"--config {file}: {name}"
        given = repr(first["input"])
        got = "" if name == "api_key" or given in first["msg"] else f", not {given}"
        message = first["msg"].removeprefix("Value error, ")
        raise BadSettings(f"{origin}: {message[0].lower()}{message[1:]}{got}") from None
