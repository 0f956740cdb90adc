"""Serves metrics to Prometheus over HTTP."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from foreword.scheduler.errors import ConfigError


class MetricsServer:
    """An HTTP server in a thread, from when it is made until it is stopped.

    Attributes:
        address: it listens at, with the port that was picked when the given one is 0.
    """

    def __init__(self, address: str, metrics: Collector) -> None:
        """Begin to serve.

        Raises:
            ConfigError: the address cannot be used.
        """
        registry = CollectorRegistry()
        registry.register(metrics)
        host, _, port = address.rpartition(":")
        try:
            self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        except OSError as error:
            raise ConfigError(
                f"metrics_listen_address: cannot listen on {address}: {error.strerror or error}"
            ) from None
        self.address = f"{host}:{self._server.server_port}"

    async def stop(self) -> None:
        """Close the port."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        await asyncio.to_thread(self._thread.join)
