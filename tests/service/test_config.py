from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from foreword.scheduler.errors import ConfigError
from foreword.service.config import ArgumentParser, ServerConfig, add_server_flags, read_server_config


def read(
    arguments: list[str] | None = None, environment: dict[str, str] | None = None, toml: Path | None = None
) -> ServerConfig:
    parser = ArgumentParser(prog="foreword serve")
    add_server_flags(parser)
    arguments = [*(arguments or []), *(["--config", str(toml)] if toml else [])]
    return read_server_config(vars(parser.parse_args(arguments)), environment or {})


def test_defaults_listen_on_loopback_only() -> None:
    config = read()
    assert config == ServerConfig()
    assert config.listen_address == "127.0.0.1:50051"


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "foreword.toml"
    file.write_text("[engine]\nthreads = 1\nblock_size = 32\nmax_num_sequences = 3\n")
    config = read(["--threads", "4"], {"FOREWORD_THREADS": "2", "FOREWORD_BLOCK_SIZE": "64"}, file)
    assert (config.threads, config.block_size, config.max_num_sequences) == (4, 64, 3)
    assert config.max_num_batched_tokens == ServerConfig().max_num_batched_tokens


def test_every_setting_can_be_given_in_every_source(tmp_path: Path) -> None:
    samples = {
        "listen_address": "localhost:7",
        "admin_listen_address": "localhost:8",
        "tenant_weights": "gold=4,free=1",
        "metrics_listen_address": "localhost:9",
        "kv_cache_memory": "64MiB",
        "device": "cpu",
        "dtype": "float32",
        "log_level": "debug",
        "speculation": "ngram",
        "max_draft_tokens": "16",
        "log_format": "console",
        "max_num_batched_tokens": "100",
        "block_size": "64",
    }
    for field in dataclasses.fields(ServerConfig):
        if field.name in ("tls_certificate", "tls_private_key"):
            continue  # only together
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            arguments, text, toml = [flag], "true", "true"
        else:
            text = samples.get(field.name, "100" if not isinstance(field.default, str) else "x")
            if field.name.endswith("_bytes"):
                text = "1MiB"
            arguments, toml = [flag, text], f'"{text}"'
        file = tmp_path / f"{field.name}.toml"
        file.write_text(f"[{field.metadata['table']}]\n{field.name} = {toml}\n")
        by_flag = read(arguments)
        assert by_flag == read(environment={f"FOREWORD_{field.name.upper()}": text}) == read(toml=file)
        assert getattr(by_flag, field.name) != field.default


@pytest.mark.parametrize(
    ("log_format", "is_terminal", "has_json_log"),
    [("auto", True, False), ("auto", False, True), ("json", True, True), ("console", False, False)],
)
def test_the_log_is_for_people_on_a_terminal_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, log_format: str, is_terminal: bool, has_json_log: bool
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    assert read(["--log-format", log_format]).has_json_log is has_json_log
    assert read().log_format == "auto"


def test_the_example_of_the_guide(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    [example] = re.findall(r"^```toml\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)
    file = tmp_path / "foreword.toml"
    file.write_text(example)
    config = read(toml=file)
    assert (config.max_model_len, config.kv_cache_memory, config.drain_grace_s) == (4096, 512 << 20, 10)
    assert config == read(toml=file, environment={"FOREWORD_MAX_MODEL_LEN": "4096"})
    assert config == read(["--max-model-len", "4096"], toml=file)


def test_config_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "foreword.toml"
    file.write_text("[engine]\nthreads = 7\n")
    assert read(environment={"FOREWORD_CONFIG": str(file)}).threads == 7


def test_auto_is_none_and_sizes_have_units() -> None:
    config = read(["--threads", "auto", "--kv-cache-memory", "2GiB", "--max-receive-message-bytes", "70000"])
    assert (config.threads, config.kv_cache_memory, config.max_receive_message_bytes) == (None, 2 << 30, 70000)


@pytest.mark.parametrize(
    ("arguments", "environment", "toml", "parts"),
    [
        (["--thread", "2"], {}, None, ["--thread", "--threads"]),
        (["--max-num-sequence=2"], {}, None, ["--max-num-sequence", "--max-num-sequences"]),
        (["stray"], {}, None, ["unknown argument stray"]),
        ([], {"FOREWORD_THREAD": "2"}, None, ["FOREWORD_THREAD", "FOREWORD_THREADS"]),
        ([], {}, "[engine]\nthread = 2\n", ["engine.thread", "threads"]),
        ([], {}, "[engin]\nthreads = 2\n", ["engin", "engine"]),
        ([], {}, "[server]\nthreads = 2\n", ["server.threads", "[engine]"]),
        ([], {}, "threads = 2\n", ["threads", "[engine]"]),
        ([], {}, "engine = 3\n", ["[engine]"]),
        ([], {}, "[engine\n", ["not valid TOML"]),
        (["--threads", "0"], {}, None, ["--threads", "'0'", "integer from 1", "auto"]),
        (["--threads", "two"], {}, None, ["--threads", "'two'"]),
        ([], {"FOREWORD_THREADS": "-1"}, None, ["FOREWORD_THREADS", "'-1'"]),
        ([], {}, "[engine]\nthreads = 1.5\n", ["engine.threads", "1.5"]),
        ([], {}, "[engine]\nthreads = true\n", ["engine.threads", "True"]),
        ([], {}, "[engine]\nthreads = [1]\n", ["engine.threads"]),
        (["--dtype", "float8"], {}, None, ["--dtype", "'float8'", "bfloat16, float16, float32, int8"]),
        (["--stall-budget-s", "nan"], {}, None, ["--stall-budget-s", "'nan'"]),
        (["--stall-budget-s", "inf"], {}, None, ["--stall-budget-s"]),
        (["--kv-cache-memory", "1KiB"], {}, None, ["--kv-cache-memory", "1MiB"]),
        (["--kv-cache-memory", "99999999GiB"], {}, None, ["--kv-cache-memory", "1024GiB"]),
        (["--max-receive-message-bytes", "2GiB"], {}, None, ["--max-receive-message-bytes", "2047MiB"]),
        (["--max-send-message-bytes", "3GiB"], {}, None, ["--max-send-message-bytes", "2047MiB"]),
        (["--max-generation-duration-s", "1e13"], {}, None, ["--max-generation-duration-s", "31536000"]),
        (["--threads", "1025"], {}, None, ["--threads", "from 1 to 1024"]),
        (["--block-size", "17"], {}, None, ["block_size", "multiple of 8", "17"]),
        ([], {}, f"[stream]\nstall_budget_s = 1{'0' * 400}\n", ["stream.stall_budget_s", "1000"]),
        ([], {}, f"[engine]\nthreads = {'9' * 5000}\n", ["not valid TOML"]),
        ([], {}, f"[engine]\nthreads = {'[' * 5000}\n", ["not valid TOML"]),
        ([], {"FOREWORD_THREADS": "9" * 5000}, None, ["FOREWORD_THREADS", "999…"]),
        (["--kv-cache-memory", "12parsecs"], {}, None, ["--kv-cache-memory", "512MiB"]),
        (["--listen-address", "50051"], {}, None, ["--listen-address", "HOST:PORT"]),
        (["--listen-address", "127.0.0.1:65536"], {}, None, ["65535"]),
        (["--listen-address", "0.0.0.0:1"], {}, None, ["listen_address", "--insecure", "--tls-certificate"]),
        (["--listen-address", "[::]:1"], {}, None, ["listen_address"]),
        (["--admin-listen-address", "0.0.0.0:1"], {}, None, ["admin_listen_address", "--insecure"]),
        (
            ["--metrics-listen-address", "0.0.0.0:1", "--tls-certificate", "c", "--tls-private-key", "k"],
            {},
            None,
            ["metrics_listen_address", "--insecure"],
        ),
        (["--listen-address", "example.org:1"], {}, None, ["listen_address"]),
        (["--tls-certificate", "x"], {}, None, ["tls_private_key"]),
        (["--tenant-weights", "gold"], {}, None, ["--tenant-weights", "'gold'", "NAME=N"]),
        (["--tenant-weights", "a=0"], {}, None, ["from 1 to 1000"]),
        (["--tenant-weights", "a=1001"], {}, None, ["from 1 to 1000"]),
        (["--tenant-weights", "a=1,a=2"], {}, None, ["'a=1,a=2'"]),
        (["--tenant-weights", "a b=1"], {}, None, ["A-Z a-z 0-9"]),
        (["--tenant-weights", "a=1=2"], {}, None, ["NAME=N"]),
        ([], {}, "[engine.tenant_weights]\na = 1.5\n", ["engine.tenant_weights", "1.5"]),
        (["--max-num-batched-tokens", "8"], {}, None, ["max_num_batched_tokens", "max_num_sequences"]),
        (["--threads"], {}, None, ["--threads"]),
        (["--insecure", "--no-such"], {}, None, ["--no-such"]),
        ([], {"FOREWORD_INSECURE": "perhaps"}, None, ["FOREWORD_INSECURE", "true or false"]),
    ],
)
def test_bad_settings_are_one_line_errors(
    arguments: list[str], environment: dict[str, str], toml: str | None, parts: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "foreword.toml"
    if toml is not None:
        file.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        read(arguments, environment, file if toml is not None else None)
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message
    assert len(message) < 300


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read(toml=tmp_path / "none.toml")


def test_tenant_weights_are_a_table_in_toml(tmp_path: Path) -> None:
    file = tmp_path / "foreword.toml"
    file.write_text("[engine]\ntenant_weights = { gold = 4, free = 1 }\n")
    assert read(toml=file).tenant_weights == read(["--tenant-weights", "gold=4,free=1"]).tenant_weights
    assert read(toml=file).tenant_weights == (("gold", 4), ("free", 1))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.8.8.8:1", "localhost:1", "[::1]:1"])
def test_loopback_needs_no_tls(address: str) -> None:
    assert read(["--listen-address", address]).listen_address == address


def test_other_addresses_need_tls_or_consent() -> None:
    assert read(["--listen-address", "0.0.0.0:1", "--insecure"]).insecure
    assert read(["--listen-address", "0.0.0.0:1", "--tls-certificate", "c", "--tls-private-key", "k"]).has_tls


@pytest.mark.parametrize(
    ("arguments", "is_shared"),
    [
        ([], True),
        (["--listen-address", "[::1]:1"], True),
        (["--listen-address", "0.0.0.0:1", "--insecure"], False),
        (["--listen-address", "0.0.0.0:1", "--tls-certificate", "c", "--tls-private-key", "k"], False),
        (["--admin-listen-address", "127.0.0.1:2"], False),
    ],
)
def test_operators_are_served_where_only_they_can_reach(arguments: list[str], is_shared: bool) -> None:
    assert read(arguments).has_shared_listener is is_shared


def test_help_names_every_flag_and_default() -> None:
    parser = ArgumentParser(prog="foreword serve")
    add_server_flags(parser)
    text = " ".join(parser.format_help().split())
    for field in dataclasses.fields(ServerConfig):
        assert "--" + field.name.replace("_", "-") in text
    assert "(default: 4MiB)" in text
    assert "(default: auto)" in text
