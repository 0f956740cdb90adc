"""The server's settings, and the only place that reads flags, environment variables and the settings file.

A setting is declared once, as a field of `ServerConfig`. Its flag (`--stall-budget-s`), environment variable
(`FOREWORD_STALL_BUDGET_S`), key in the TOML file (`stall_budget_s` in table `[stream]`) and help text derive from that
declaration. A flag wins over the environment, the environment over the file, the file over the default.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import ipaddress
import os
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from foreword.scheduler.config import MAX_TENANT_WEIGHT
from foreword.scheduler.errors import ConfigError
from foreword.service.tenants import TENANT_NAMES, is_tenant_name
from foreword.service.values import Address, Choice, Float, Integer, Kind, Size, Switch, Text, Weights

ENVIRONMENT_PREFIX = "FOREWORD_"
MIB = 1 << 20
TIB = 1 << 40
YEAR_S = 365 * 86_400.0
MAX_MESSAGE_BYTES = 2047 * MIB
"""gRPC counts bytes of a message in 32 bits with a sign."""
CPU_BLOCK_MULTIPLE = 8
"""Tokens that the CPU device handles at once."""


def _setting(table: str, kind: Kind, default: Any, help_text: str) -> Any:
    return dataclasses.field(default=default, metadata={"table": table, "kind": kind, "help": help_text})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """All settings of `foreword serve`; `None` where the engine chooses."""

    listen_address: str = _setting("server", Address(), "127.0.0.1:50051", "address to listen on; port 0 picks one")
    admin_listen_address: str | None = _setting(
        "server",
        Address(),
        None,
        "address of EngineService, for operators; by default it is served at listen_address if only this machine can "
        "reach that, else nowhere",
    )
    metrics_listen_address: str | None = _setting(
        "server", Address(), None, "address that serves metrics to Prometheus over HTTP; by default none does"
    )
    channelz: bool = _setting(
        "server", Switch(), False, "offer gRPC's own account of connections and calls next to EngineService"
    )
    insecure: bool = _setting("server", Switch(), False, "listen without TLS on an address others can reach")
    tls_certificate: str | None = _setting("server", Text("FILE"), None, "certificate chain in PEM format")
    tls_private_key: str | None = _setting("server", Text("FILE"), None, "private key of the certificate, PEM format")
    max_receive_message_bytes: int = _setting(
        "server", Size(64 << 10, MAX_MESSAGE_BYTES), 4 * MIB, "largest request message accepted"
    )
    max_send_message_bytes: int = _setting(
        "server", Size(64 << 10, MAX_MESSAGE_BYTES), 4 * MIB, "largest response message sent"
    )
    drain_delay_s: float = _setting(
        "server",
        Float(0, YEAR_S),
        0.0,
        "time between reporting NOT_SERVING and refusing calls, for load balancers to notice",
    )
    drain_grace_s: float = _setting("server", Float(0, YEAR_S), 30.0, "time running generations get to end at shutdown")

    model: str | None = _setting("model", Text("PATH"), None, "GGUF file or Hugging Face folder; default: built in")
    served_name: str | None = _setting("model", Text("NAME"), None, "name clients ask for; default: from the model")
    max_model_len: int | None = _setting("model", Integer(1, auto=True), None, "tokens of prompt and output together")

    device: str = _setting(
        "engine", Choice("auto", "cpu", "cuda"), "auto", "where the model runs; auto: cuda if it can"
    )
    dtype: str = _setting(
        "engine", Choice("auto", "bfloat16", "float16", "float32", "int8"), "auto", "type of weights and activations"
    )
    threads: int | None = _setting("engine", Integer(1, 1024, auto=True), None, "threads of the CPU device")
    kv_cache_memory: int | None = _setting("engine", Size(MIB, TIB, auto=True), None, "memory of the KV cache")
    block_size: int = _setting("engine", Integer(1, 256), 16, "tokens per block of the KV cache")
    max_num_sequences: int = _setting("engine", Integer(1), 64, "sequences that run at once")
    max_num_batched_tokens: int = _setting("engine", Integer(1), 512, "token budget of one step")
    max_num_waiting: int = _setting("engine", Integer(1), 1024, "requests that may wait; one more is refused")
    engine_timeout_s: float = _setting(
        "engine", Float(1, YEAR_S), 60.0, "an engine that is silent for so long is restarted; longer than any step"
    )
    max_num_waiting_tokens: int = _setting("engine", Integer(1), 1 << 20, "prompt tokens that may wait")

    tenant_weights: tuple[tuple[str, int], ...] = _setting(
        "engine",
        Weights(MAX_TENANT_WEIGHT, is_tenant_name, TENANT_NAMES),
        (),
        "shares of the tenants that calls name in metadata foreword-tenant; one that is not listed has 1",
    )

    speculation: str = _setting(
        "speculation",
        Choice("auto", "off", "ngram", "suffix", "hybrid", "draft-model"),
        "auto",
        "auto drafts where it pays, off never, a drafter always",
    )
    draft_model: str | None = _setting(
        "speculation", Text("PATH"), None, "GGUF file or Hugging Face folder of a smaller model that drafts"
    )
    max_draft_tokens: int = _setting(
        "speculation", Integer(1, 16), 6, "drafts of a sequence that a step checks at most"
    )

    tokenizer_threads: int = _setting("stream", Integer(1, 256), 2, "threads that turn text into tokens")
    stream_buffer_tokens: int = _setting(
        "stream", Integer(1, 8192), 256, "tokens kept for a client that does not read, before its sequence pauses"
    )
    stall_budget_s: float = _setting(
        "stream",
        Float(0.001, YEAR_S),
        60.0,
        "time a client may leave a message unread before its generation is aborted",
    )
    max_generation_duration_s: float = _setting(
        "stream", Float(0.001, YEAR_S), 600.0, "longest time a generation may take"
    )

    log_level: str = _setting("log", Choice("debug", "info", "warning", "error"), "info", "least severe level logged")
    log_format: str = _setting(
        "log", Choice("auto", "console", "json"), "auto", "of standard error; auto: console on a terminal, else json"
    )

    @property
    def has_shared_listener(self) -> bool:
        """True when operators are served at `listen_address`."""
        return self.admin_listen_address is None and _is_loopback(self.listen_address)

    @property
    def has_tls(self) -> bool:
        """True when a certificate is configured."""
        return self.tls_certificate is not None

    @property
    def has_json_log(self) -> bool:
        """True when log records are JSON."""
        return self.log_format == "json" or (self.log_format == "auto" and not sys.stderr.isatty())


_FIELDS = {field.name: field for field in dataclasses.fields(ServerConfig)}


def flag_of(name: str) -> str:
    """`stall_budget_s` -> `--stall-budget-s`."""
    return "--" + name.replace("_", "-")


def environment_name_of(name: str) -> str:
    """`stall_budget_s` -> `FOREWORD_STALL_BUDGET_S`."""
    return ENVIRONMENT_PREFIX + name.upper()


def program_name() -> str:
    """How the program was called, such as `.venv/bin/foreword`; `foreword` where another program runs it."""
    return sys.argv[0] if Path(sys.argv[0]).name == "foreword" else "foreword"


class ArgumentParser(argparse.ArgumentParser):
    """An argument parser whose errors are `ConfigError`s of one line that name the nearest known word."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse `args`, the process's own arguments when `None`.

        Raises:
            ConfigError: an argument is unknown, missing or malformed.
        """
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].partition("=")[0]
            subparser: ArgumentParser = getattr(parsed, "parser", self)
            raise ConfigError(f"unknown argument {word}{_nearest(word, subparser._option_string_actions)}")
        return parsed

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Leave after a help text has been written, which fails here when nobody reads it."""
        sys.stdout.flush()
        super().exit(status, message)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving."""
        raise ConfigError(message)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Declare a flag for every setting, grouped by table, and `--config`."""
    parser.add_argument("--config", metavar="FILE", help="settings file (TOML)")
    groups: dict[str, Any] = {}
    for name, field in _FIELDS.items():
        table, kind = field.metadata["table"], field.metadata["kind"]
        if table not in groups:
            groups[table] = parser.add_argument_group(f"[{table}]")
        group = groups[table]
        text = f"{field.metadata['help']} (default: {kind.show(field.default)})".replace("%", "%%")
        if isinstance(kind, Switch):
            group.add_argument(flag_of(name), action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            group.add_argument(flag_of(name), metavar=kind.metavar, default=None, help=text)


def read_server_config(flags: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> ServerConfig:
    """Merge all sources of settings.

    Args:
        flags: parsed flags by name, those of `add_server_flags` with `None` where not given; other names are ignored.
        environment: environment variables; the process's own by default.

    Raises:
        ConfigError: a key is unknown, a value cannot be used, the file cannot be read, or settings contradict.
    """
    environment = os.environ if environment is None else environment
    given = {name[len(ENVIRONMENT_PREFIX) :].lower(): name for name in environment if _is_ours(name)}
    for name, variable in given.items():
        if name not in _FIELDS and name != "config":
            known = map(environment_name_of, (*_FIELDS, "config"))
            raise ConfigError(f"unknown environment variable {variable}{_nearest(variable, known)}")
    values: dict[str, Any] = {}
    path = flags.get("config") or environment.get(ENVIRONMENT_PREFIX + "CONFIG")
    if path:
        values |= _read_file(Path(path))
    for name, variable in given.items():
        if name != "config":
            values[name] = _parse(name, environment[variable], variable)
    for name in _FIELDS:
        if flags.get(name) is not None:
            values[name] = _parse(name, flags[name], flag_of(name))
    config = ServerConfig(**values)
    _check(config)
    return config


def _is_ours(variable: str) -> bool:
    return variable.startswith(ENVIRONMENT_PREFIX)


def _parse(name: str, raw: Any, source: str) -> Any:
    kind: Kind = _FIELDS[name].metadata["kind"]
    try:
        return kind.parse(raw)
    except ValueError:
        raise ConfigError(f"{source}: {_shown(raw)} is not {kind.allowed}") from None


def _shown(raw: Any) -> str:
    """A value for a message, cut when it is absurdly long."""
    text = repr(raw)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _read_file(path: Path) -> dict[str, Any]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # wider than TOMLDecodeError: absurd numbers, absurd nesting
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    table_of = {name: field.metadata["table"] for name, field in _FIELDS.items()}
    values = {}
    for table, entries in tables.items():
        if table not in table_of.values():
            hint = f"; {table} belongs in table [{table_of[table]}]" if table in table_of else None
            raise ConfigError(f"{path}: unknown table {table}{hint or _nearest(table, table_of.values())}")
        if not isinstance(entries, dict):
            raise ConfigError(f"{path}: {table} is a table: write [{table}]")
        for name, raw in entries.items():
            if table_of.get(name) != table:
                hint = f"; it belongs in table [{table_of[name]}]" if name in table_of else _nearest(name, table_of)
                raise ConfigError(f"{path}: unknown key {table}.{name}{hint}")
            values[name] = _parse(name, raw, f"{path}: {table}.{name}")
    return values


def _nearest(word: str, known: Iterable[str]) -> str:
    names = sorted(set(known))
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.0)
    return f"; did you mean {close[0]}?" if close else ""


def _check(config: ServerConfig) -> None:
    if (config.tls_certificate is None) != (config.tls_private_key is None):
        raise ConfigError("tls_certificate and tls_private_key: give both or neither")
    for name in ("listen_address", "admin_listen_address"):
        address = getattr(config, name)
        if not (address is None or config.has_tls or config.insecure or _is_loopback(address)):
            raise ConfigError(
                f"{name}: {address} can be reached by others; "
                "give --tls-certificate and --tls-private-key, or --insecure to listen without encryption"
            )
    metrics_address = config.metrics_listen_address
    if not (metrics_address is None or config.insecure or _is_loopback(metrics_address)):
        raise ConfigError(
            f"metrics_listen_address: {metrics_address} can be reached by others; "
            "give --insecure to serve metrics there, which are not encrypted"
        )
    if config.device in ("auto", "cpu") and config.block_size % CPU_BLOCK_MULTIPLE:
        raise ConfigError(
            f"block_size: must be a multiple of {CPU_BLOCK_MULTIPLE} on the CPU device, got {config.block_size}"
        )
    if config.max_num_batched_tokens < config.max_num_sequences:
        raise ConfigError(
            f"max_num_batched_tokens ({config.max_num_batched_tokens}) must be at least "
            f"max_num_sequences ({config.max_num_sequences})"
        )


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
