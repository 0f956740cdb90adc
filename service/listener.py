"""An address at which gRPC calls are taken."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from pathlib import Path

import grpc

from foreword.scheduler.errors import ConfigError
from foreword.service.config import ServerConfig, flag_of
from foreword.service.frontend.boundary import ErrorBoundary


def channel_options(config: ServerConfig) -> list[tuple[str, int]]:
    """Options of the gRPC server. gRPC ignores names it does not know, so tests compare them with the library's own."""
    return [
        ("grpc.so_reuseport", 0),  # a second server on the port must fail
        ("grpc.max_receive_message_length", config.max_receive_message_bytes),
        ("grpc.max_send_message_length", config.max_send_message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # clients may ping during a long prefill
    ]


class Listener:
    """A gRPC server at one address, bound when it is made.

    Attributes:
        grpc_server: takes services until it is started.
        address: it listens at, with the port that was picked when the configured one is 0.
    """

    def __init__(self, config: ServerConfig, setting: str, count_error: Callable[[str, grpc.StatusCode], None]) -> None:
        """Bind the port.

        Args:
            config: of the server.
            setting: that holds the address.
            count_error: called with the method and the code of each call that fails.

        Raises:
            ConfigError: the address cannot be used, or a certificate not be read.
        """
        address = getattr(config, setting)
        check_port_is_free(address, setting)
        self.grpc_server = grpc.aio.server(interceptors=[ErrorBoundary(count_error)], options=channel_options(config))
        try:
            if config.has_tls:
                port = self.grpc_server.add_secure_port(address, _credentials(config))
            else:
                port = self.grpc_server.add_insecure_port(address)
        except RuntimeError:
            cause = "tls_certificate, tls_private_key: no certificate chain in PEM format, or not its key"
            raise ConfigError(cause if config.has_tls else f"{setting}: cannot listen on {address}") from None
        self.address = f"{address.rpartition(':')[0]}:{port}"


def check_port_is_free(address: str, setting: str) -> None:
    """Find out that a port is taken before gRPC does, whose own report is not one line.

    Raises:
        ConfigError: it is, or the address, which `setting` holds, cannot be used.
    """
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{address} is in use; choose another with {flag_of(setting)}") from None
        raise ConfigError(f"{setting}: cannot listen on {address}: {error.strerror or error}") from None


def _credentials(config: ServerConfig) -> grpc.ServerCredentials:
    files = {"tls_private_key": config.tls_private_key, "tls_certificate": config.tls_certificate}
    contents = []
    for name, path in files.items():
        try:
            contents.append(Path(path or "").read_bytes())
        except OSError as error:
            raise ConfigError(f"{name}: {path}: {error.strerror}") from None
    return grpc.ssl_server_credentials([(contents[0], contents[1])])
