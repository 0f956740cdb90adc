"""The `foreword` command."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from foreword.clients import AsyncClient, Client, ForewordClientError, GenerationOptions, Message
from foreword.scheduler.errors import ConfigError, ForewordError
from foreword.service.config import ArgumentParser, ServerConfig, add_server_flags, read_server_config
from foreword.service.logs import configure_logging
from foreword.service.terminal import LoadProgress, timing_summary, write_line, write_note, write_piece

DEMO_QUESTION = "What is a foreword? Answer in two sentences."
DEMO_MAX_OUTPUT_TOKENS = 96

_SERVE_HELP = """\
Every setting can also be given as environment variable FOREWORD_<NAME> or in the TOML file, as key <name> of the table
that heads its group here. A flag wins over the environment, the environment over the file, the file over the default.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the process's own arguments by default.

    Returns:
        The exit status: 0, 2 after an error that is told in one line, 130 after Ctrl-C.
    """
    try:
        options = _parser().parse_args(arguments)
        return int(options.run(options))
    except (ForewordError, ForewordClientError) as error:
        write_note(f"foreword: {' '.join(str(error).split())}")
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="foreword", description="Serve a language model over gRPC, or talk to such a server.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

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
    generate.add_argument("prompt", nargs="?", help="the text; read from standard input when left out")
    _add_generation_flags(generate)

    chat = command("chat", _chat, "Talk to the model; each line is a turn, an empty one or Ctrl-D ends.")
    chat.add_argument("--system", metavar="TEXT", help="instructions for the whole conversation")
    _add_generation_flags(chat)

    _add_client_flags(command("models", _models, "List what a server serves."))
    return parser


def _add_client_flags(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--target", default="127.0.0.1:50051", metavar="HOST:PORT", help="server (default: %(default)s)"
    )
    parser.add_argument("--tls-ca", metavar="FILE", help="use TLS and trust the certificates in this PEM file")
    parser.add_argument("--insecure", action="store_true", help="connect without TLS to another machine")


def _add_generation_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help="served model (default: the server's)")
    parser.add_argument("--max-output-tokens", type=int, metavar="N", help="most tokens to generate")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 always takes the most probable token")
    parser.add_argument("--top-p", type=float, metavar="X", help="keep the most probable tokens up to this sum")
    parser.add_argument("--top-k", type=int, metavar="N", help="keep this many most probable tokens")
    parser.add_argument("--min-p", type=float, metavar="X", help="keep tokens this likely relative to the best")
    parser.add_argument("--seed", type=int, metavar="N", help="same seed, same tokens")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be repeated")
    parser.add_argument("--timing", action="store_true", help="show a timing summary")
    _add_client_flags(parser)


def _serve(options: argparse.Namespace) -> int:
    async def body(server: Any, shutdown: Any) -> None:
        await shutdown.wait()

    return _run_server(read_server_config(vars(options)), body)


def _demo(options: argparse.Namespace) -> int:
    """Quiet unless told otherwise: the answer is what matters."""
    options.log_level = options.log_level or "warning"

    async def body(server: Any, shutdown: Any) -> None:
        await _show_answer(server.address)
        if options.serve:
            write_line("\nServing until Ctrl-C. Try: foreword chat")
            await shutdown.wait()

    return _run_server(read_server_config(vars(options)), body)


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

    configure_logging(config.log_level, json=config.log_format == "json")
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
    prompt = options.prompt if options.prompt is not None else sys.stdin.read()
    with _client(options) as client, client.stream(prompt, **_generation_options(options)) as stream:
        for delta in stream:
            write_piece(delta.text)
        write_line()
        if options.timing:
            write_note(timing_summary(stream.result()))
    return 0


def _chat(options: argparse.Namespace) -> int:
    messages = [Message("system", options.system)] if options.system else []
    settings = _generation_options(options)
    is_terminal = sys.stdin.isatty()
    with _client(options) as client:
        while True:
            if is_terminal:
                write_piece("> ")
            line = sys.stdin.readline().strip()
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
        for model in client.models():
            states = model.DESCRIPTOR.fields_by_name["state"].enum_type
            assert states is not None
            state = states.values_by_number[model.state].name
            write_line(
                f"{model.name}\t{state.removeprefix('MODEL_STATE_').lower()}\t{model.architecture}\t{model.dtype}\t"
                f"{model.parameter_count / 1e6:.0f} M parameters\tcontext {model.max_context_token_count}"
            )
    return 0


def _client(options: argparse.Namespace) -> Client:
    credentials = None
    try:
        if options.tls_ca is not None:
            credentials = grpc.ssl_channel_credentials(Path(options.tls_ca).read_bytes())
        return Client(options.target, credentials=credentials, insecure=options.insecure)
    except OSError as error:
        raise ConfigError(f"--tls-ca: {options.tls_ca}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--target: {error}") from None


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
    }
