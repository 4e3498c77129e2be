from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from server.cli import add_serve_arguments
from server.settings import BadSettings, Settings, load_settings, unknown_variables


def parsed(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return vars(parser.parse_args(arguments))


def test_flag_over_environment_over_file_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text("port: 1\nmax-num-seqs: 2\nblock_size: 32\nhost: null\n")
    monkeypatch.setenv("OCTAVO_PORT", "3")
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "4")
    settings = load_settings(parsed("--port", "5"), file)
    assert (settings.port, settings.max_num_seqs, settings.block_size, settings.host) == (5, 4, 32, "127.0.0.1")


@pytest.mark.parametrize("suffix", ["yaml", "toml", "json"])
def test_kinds_of_files(tmp_path: Path, suffix: str) -> None:
    text = {"yaml": "kv-cache-memory: 2MiB", "toml": 'kv-cache-memory = "2MiB"', "json": '{"kv_cache_memory": "2MiB"}'}
    file = tmp_path / f"octavo.{suffix}"
    file.write_text(text[suffix])
    assert load_settings({}, file).kv_cache_memory == 2 * 2**20


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs: .* not '0'"),
        (["--port", "70000"], "--port"),
        (["--dtype", "int3"], "--dtype"),
        (["--block-size", "17"], "--block-size"),
        (["--kv-cache-memory", "lots"], "--kv-cache-memory: 'lots' is not a size"),
        (["--chat-template", "/nowhere.jinja"], "--chat-template"),
        (["--kv-cache-memory", "4QiB"], "^--kv-cache-memory: '4QiB' is not a size: [^']*$"),
        (["--gpu-memory-utilization", "nan"], "--gpu-memory-utilization: .* finite number, not 'nan'"),
        (["--target-step-time", "nan"], "--target-step-time: .* finite number, not 'nan'"),
        (["--queue-timeout", "inf"], "--queue-timeout: .* finite number"),
        (["--drain-timeout", "-1"], "--drain-timeout"),
        (["--served-model-name", "a b"], "--served-model-name"),
        (["--kv-disk", "f"], "^--kv-disk and --kv-disk-size go together$"),
        (["--kv-disk-size", "1GiB"], "^--kv-disk and --kv-disk-size go together$"),
        (["--kv-disk-size", "1QiB", "--kv-disk", "f"], "--kv-disk-size: '1QiB' is not a size"),
        (
            ["--kv-disk", "f", "--kv-disk-size", "1GiB", "--kv-host-memory", "1GiB"],
            "--kv-host-memory: there is one tier",
        ),
        (["--kv-host-memory", "1GiB", "--no-enable-prefix-caching"], "it needs --enable-prefix-caching"),
        (["--otlp-traces-endpoint", "x:4318"], "^--otlp-traces-endpoint: must begin with http:// or https://, not 'x"),
    ],
)
def test_a_bad_flag_is_one_line(arguments: list[str], words: str) -> None:
    with pytest.raises(BadSettings, match=words) as caught:
        load_settings(parsed(*arguments))
    assert "\n" not in str(caught.value)


def test_where_a_bad_value_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_PORT", "x")
    with pytest.raises(BadSettings, match=r"^OCTAVO_PORT: "):
        load_settings({})
    monkeypatch.delenv("OCTAVO_PORT")
    file = tmp_path / "octavo.json"
    for content, words in (
        (json.dumps({"port": -1}), "octavo.json: port: "),
        (json.dumps({"quantisation": "int8"}), "unknown setting 'quantisation'"),
        ("[]", "mapping"),
        ("{", "octavo.json"),
    ):
        file.write_text(content)
        with pytest.raises(BadSettings, match=words):
            load_settings({}, file)
    with pytest.raises(BadSettings, match="must end in"):
        load_settings({}, tmp_path / "octavo.ini")
    with pytest.raises(BadSettings, match="No such file"):
        load_settings({}, tmp_path / "none.yaml")


def test_keys_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "one, two")
    settings = load_settings({})
    assert [key.get_secret_value() for key in settings.api_key] == ["one", "two"]
    assert "two" not in repr(settings)
    for keys in (["sécret"], ["secret,"], [""]):
        with pytest.raises(BadSettings, match=r"^--api-key: ") as caught:
            load_settings({"api_key": keys})
        assert "cret" not in str(caught.value)


def test_repeated_flags_and_commas() -> None:
    settings = load_settings(parsed("--served-model-name", "a,b", "--served-model-name", "c", "some/model"))
    assert settings.served_model_name == ["a", "b", "c"]
    assert settings.model == "some/model"


def test_every_field_is_a_flag_with_help_and_a_group() -> None:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    text = parser.format_help()
    for name, field in Settings.model_fields.items():
        assert name == "model" or f"--{name.replace('_', '-')}" in text
        assert field.description
    for title in ("Model:", "Memory:", "Scheduling:", "Server:"):
        assert title in text


def test_choices_are_shown_also_where_none_is_the_default() -> None:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    text = parser.format_help()
    assert "--quantization {int8,int4}" in text
    assert "--device {auto,cpu,cuda}" in text


def test_variables_that_nobody_reads() -> None:
    known = {f"OCTAVO_{name.upper()}": "1" for name in Settings.model_fields}
    given = {**known, "OCTAVO_KERNEL_CACHE": "/tmp", "octavo_port": "1", "OCTAVO_PROT": "1", "PORT": "1"}
    assert unknown_variables(given) == ["OCTAVO_PROT"]


def test_the_engine_gets_its_part() -> None:
    settings = load_settings(parsed("--no-enable-prefix-caching", "--kv-cache-memory", "1GiB", "--max-model-len", "99"))
    engine = settings.engine()
    assert (engine.enable_prefix_caching, engine.kv_cache_memory, engine.max_model_len) == (False, 2**30, 99)


@pytest.mark.parametrize(
    ("words", "value"), [([], None), (["--async-scheduling"], True), (["--no-async-scheduling"], False)]
)
def test_a_switch_that_the_device_decides_about(words: list[str], value: bool | None) -> None:
    assert load_settings(parsed(*words)).engine().async_scheduling is value
