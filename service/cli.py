"""The `foreword` command."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from foreword.clients import AsyncClient, Client, Constraint, ForewordClientError, GenerationOptions, Message
from foreword.clients.channel import is_loopback
from foreword.clients.client import DEFAULT_TARGET
from foreword.scheduler.errors import ConfigError, EngineUnavailable, ForewordError
from foreword.service.config import ArgumentParser, ServerConfig, add_server_flags, program_name, read_server_config
from foreword.service.logs import configure_logging
from foreword.service.terminal import LoadProgress, timing_summary, write_line, write_note, write_piece
from foreword.service.values import Address
from foreword.service.version import installed_version

DEMO_QUESTION = "What is a foreword? Answer in two sentences."
DEMO_MAX_OUTPUT_TOKENS = 96

CHAT_SAMPLING: GenerationOptions = {"temperature": 0.2, "top_p": 0.9}
"""Small models ramble at the server's default, the model's own distribution."""

LOADING_PATIENCE_S = 60
BROKEN_PIPE_STATUS = 141  # what a shell reports for a command that SIGPIPE ended

_SERVE_HELP = """\
Every setting can be given in three forms; its table in the settings file heads its group here:

  flag                  --max-model-len 4096
  environment variable  FOREWORD_MAX_MODEL_LEN=4096
  settings file (TOML)  [model]
                        max_model_len = 4096

A flag wins over the environment, the environment over the file, the file over the default. The file is named by
--config or FOREWORD_CONFIG.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the process's own arguments by default.

    Returns:
        The exit status: 0, 2 after an error that is told in one line, 130 after Ctrl-C, 141 when nobody reads the
        output any more.
    """
    parser = _parser()
    try:
        options = parser.parse_args(arguments)
        if not hasattr(options, "run"):
            parser.print_help(sys.stderr)
            return 2
        return int(options.run(options))
    except (ForewordError, ForewordClientError) as error:
        write_note(f"foreword: {' '.join(str(error).split())}")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail, too
        return BROKEN_PIPE_STATUS


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="foreword", description="Serve a language model over gRPC, or talk to such a server.")
    parser.add_argument("--version", action="version", version=f"foreword {installed_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, run: Any, text: str, **details: Any) -> ArgumentParser:
        added: ArgumentParser = commands.add_parser(name, help=text, description=text, **details)
        added.set_defaults(run=run, parser=added)
        return added

    server_help = {"epilog": _SERVE_HELP, "formatter_class": argparse.RawDescriptionHelpFormatter}
    add_server_flags(command("serve", _serve, "Serve a model until Ctrl-C.", **server_help))

    demo = command("demo", _demo, "Serve a model, show one answer, and end.", **server_help)
    demo.add_argument("--serve", action="store_true", help="keep serving after the answer, until Ctrl-C")
    add_server_flags(demo)

    generate = command("generate", _generate, "Continue a text.")
    generate.add_argument("prompt", type=_text, nargs="?", help="the text; read from standard input when left out")
    generate.add_argument(
        "--n", dest="num_outputs", type=_integer(32), metavar="N", help="generate N outputs, shown one after the other"
    )
    _add_generation_flags(generate)

    chat_help = "It samples with temperature 0.2 and top-p 0.9 unless one of the two is given."
    chat = command(
        "chat", _chat, "Talk to the model; each line is a turn, an empty one or Ctrl-D ends.", epilog=chat_help
    )
    chat.add_argument("--system", type=_text, metavar="TEXT", help="instructions for the whole conversation")
    _add_generation_flags(chat)

    _add_client_flags(command("models", _models, "List what a server serves."))
    return parser


def _integer(num_bits: int) -> Callable[[str], int]:
    """A type of arguments: what a field of this many bits can hold."""
    limit = 1 << num_bits - 1

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = limit
        if not -limit <= value < limit:
            raise argparse.ArgumentTypeError(f"not an integer of {num_bits} bits: {text[:80]!r}")
        return value

    return parse


def _text(text: str) -> str:
    """A type of arguments: bytes that are not UTF-8 come from the command line as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("not UTF-8") from None
    return text


def _read_input(read: Callable[[], str]) -> str:
    try:
        return _text(read())
    except (UnicodeDecodeError, argparse.ArgumentTypeError):
        raise ConfigError("standard input: not UTF-8") from None


def _add_client_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--target", default=DEFAULT_TARGET, metavar="HOST:PORT", help="server (default: %(default)s)")
    parser.add_argument("--tls-ca", metavar="FILE", help="use TLS and trust the certificates in this PEM file")
    parser.add_argument("--insecure", action="store_true", help="connect without TLS to another machine")


def _add_generation_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--model", type=_text, metavar="NAME", help="served model (default: the server's)")
    parser.add_argument("--max-output-tokens", type=_integer(32), metavar="N", help="most tokens to generate")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 always takes the most probable token")
    parser.add_argument("--top-p", type=float, metavar="X", help="keep the most probable tokens up to this sum")
    parser.add_argument("--top-k", type=_integer(32), metavar="N", help="keep this many most probable tokens")
    parser.add_argument("--min-p", type=float, metavar="X", help="keep tokens this likely relative to the best")
    parser.add_argument("--seed", type=_integer(64), metavar="N", help="same seed, same tokens")
    parser.add_argument("--stop", type=_text, action="append", metavar="TEXT", help="end at this text; may be repeated")
    parser.add_argument("--json-schema", metavar="FILE", help="the output is JSON that is valid under this schema")
    parser.add_argument("--timing", action="store_true", help="show a timing summary")
    _add_client_flags(parser)


def _serve(options: argparse.Namespace) -> int:
    return _run_server(read_server_config(vars(options)), _until_asked_to_end)


def _demo(options: argparse.Namespace) -> int:
    """Quiet unless told otherwise: the answer is what matters."""
    options.log_level = options.log_level or "warning"

    async def body(server: Any, shutdown: Any) -> None:
        await _show_answer(server.address)
        if options.serve:
            write_line(f"\nServing until Ctrl-C. Try: {chat_command(server.address)}")
            await _until_asked_to_end(server, shutdown)

    return _run_server(read_server_config(vars(options)), body)


def chat_command(address: str) -> str:
    """The command that talks to this server, as it can be pasted."""
    return f"{program_name()} chat" + ("" if address == DEFAULT_TARGET else f" --target {address}")


async def _until_asked_to_end(server: Any, shutdown: Any) -> None:
    await shutdown.wait()
    frontend = server.frontend
    grace_s = frontend.drain.remaining_s if frontend.drain.is_requested else frontend.config.drain_grace_s
    if num_active := len(frontend.registry):
        generations = "1 generation" if num_active == 1 else f"{num_active} generations"
        write_note(f"Draining: {generations} may take up to {grace_s:.3g} s to end; Ctrl-C again ends at once.")


async def _show_answer(address: str) -> None:
    write_line(f"\n> {DEMO_QUESTION}\n")
    question = [Message("user", DEMO_QUESTION)]
    settings: GenerationOptions = {"max_output_token_count": DEMO_MAX_OUTPUT_TOKENS, "temperature": 0.0}
    async with AsyncClient(address) as client, client.stream(question, **settings) as stream:
        async for delta in stream:
            write_piece(delta.text)
        write_line(f"\n\n{timing_summary(await stream.result())}")


def _run_server(config: ServerConfig, body: Any) -> int:
    from foreword.service.server import serve  # the other commands start faster without it

    configure_logging(config.log_level, json=config.has_json_log)
    progress = LoadProgress()

    async def announced(server: Any, shutdown: Any) -> None:
        progress.finish()
        _announce(server)
        await body(server, shutdown)

    try:
        asyncio.run(serve(config, progress, announced))
    finally:
        progress.finish()
    return 0


def _announce(server: Any) -> None:
    info = server.frontend.engine_info()
    write_line(
        f"{server.frontend.model.name} on {server.address} "
        f"({info.device_name}, {info.dtype}, context {info.max_model_len}, loaded in {info.load_duration_s:.1f} s)"
    )


def _generate(options: argparse.Namespace) -> int:
    prompt = options.prompt if options.prompt is not None else _read_input(sys.stdin.read)
    with _client(options) as client:
        _wait_for_engine(client, options)
        settings = _generation_options(options) | {"output_count": options.num_outputs}
        with client.stream(prompt, **settings) as stream:
            if options.num_outputs is None:
                for delta in stream:
                    write_piece(delta.text)
                write_line()
            else:
                for index, output in enumerate(stream.result().outputs):
                    write_line(f"[{index}] {output.content.text}")
            if options.timing:
                write_note(timing_summary(stream.result()))
    return 0


def _chat(options: argparse.Namespace) -> int:
    messages = [Message("system", options.system)] if options.system else []
    settings = _generation_options(options)
    if options.temperature is None and options.top_p is None:
        settings |= CHAT_SAMPLING
    is_terminal = sys.stdin.isatty()
    with _client(options) as client:
        _wait_for_engine(client, options)
        while True:
            if is_terminal:
                write_piece("> ")
            line = _read_input(sys.stdin.readline).strip()
            if not line:
                return 0
            turns = [*messages, Message("user", line)]
            # Ctrl-C ends the answer, not the conversation, which goes on as if the question had not been asked
            with contextlib.suppress(KeyboardInterrupt), client.stream(turns, **settings) as stream:
                for delta in stream:
                    write_piece(delta.text)
                if options.timing:
                    write_note("\n" + timing_summary(stream.result()))
                messages = [*turns, stream.result().message]
            write_line()


def _models(options: argparse.Namespace) -> int:
    with _client(options) as client:
        for model in _models_of(client, options):
            facts = [model.name, _state_of(model)]
            facts += filter(None, (model.architecture, model.dtype))  # a loading model lacks some
            if model.parameter_count:
                facts.append(f"{model.parameter_count / 1e6:.0f} M parameters")
            if model.max_context_token_count:
                facts.append(f"context {model.max_context_token_count}")
            write_line("\t".join(facts))
    return 0


def _client(options: argparse.Namespace) -> Client:
    if options.tls_ca is not None and options.insecure:
        raise ConfigError("--tls-ca and --insecure exclude each other")
    try:
        Address().parse(options.target)
        is_usable = is_loopback(options.target) or options.insecure or options.tls_ca is not None
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ConfigError(
            f"--target: {options.target!r}: give HOST:PORT of a server on this machine, or of another one with "
            "--tls-ca FILE, or --insecure to connect without encryption"
        )
    credentials = None
    if options.tls_ca is not None:
        try:
            credentials = grpc.ssl_channel_credentials(Path(options.tls_ca).read_bytes())
        except OSError as error:
            raise ConfigError(f"--tls-ca: {options.tls_ca}: {error.strerror}") from None
    return Client(options.target, credentials=credentials, insecure=options.insecure)


def _state_of(model: Any) -> str:
    """The word for the state of a model, such as "loading"."""
    states = model.DESCRIPTOR.fields_by_name["state"].enum_type
    name: str = states.values_by_number[model.state].name
    return name.removeprefix("MODEL_STATE_").lower()


def _models_of(client: Client, options: argparse.Namespace) -> list[Any]:
    """Ask the server what it serves: the first call, which finds out whether there is one."""
    try:
        return client.models()
    except ForewordClientError as error:
        if error.reason or error.code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise
        how = " over TLS" if options.tls_ca is not None else ""
        raise ConfigError(f"cannot reach {options.target}{how}; is `foreword serve` running?") from None


def _wait_for_engine(client: Client, options: argparse.Namespace) -> None:
    """Let an engine load before anything is asked of it."""
    give_up_s = time.monotonic() + LOADING_PATIENCE_S
    is_told = False
    while _state_of(_models_of(client, options)[0]) in ("loading", "restarting"):
        if not is_told:
            write_note(f"The engine is loading; waiting up to {LOADING_PATIENCE_S} s.")
            is_told = True
        if time.monotonic() >= give_up_s:
            raise EngineUnavailable(f"the engine is still loading after {LOADING_PATIENCE_S} s")
        time.sleep(0.2)


def _generation_options(options: argparse.Namespace) -> GenerationOptions:
    return {
        "model": options.model,
        "max_output_token_count": options.max_output_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "seed": options.seed,
        "stop_strings": options.stop,
        "constraint": _json_constraint(options.json_schema) if options.json_schema is not None else None,
    }


def _json_constraint(path: str) -> Constraint:
    try:
        return Constraint(json_schema=Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--json-schema: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--json-schema: {path}: not UTF-8") from None
