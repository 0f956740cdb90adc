"""How a client connects: the recommended channel settings, and no unencrypted prompts across a network."""

from __future__ import annotations

import ipaddress
import json
import re

SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [
                {"service": "foreword.v1.GenerationService"},
                {"service": "foreword.v1.TokenizationService"},
                {"service": "foreword.v1.ModelService"},
                {"service": "foreword.v1.EngineService"},
            ],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.2s",
                "maxBackoff": "5s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
    "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
}
"""Recommended gRPC service config. UNAVAILABLE is retried with backoff (a loading, draining or restarting server); gRPC
does so only while no response has arrived, so no token is seen twice. Nothing is hedged: a second copy of a generation
would cost the server as much as the first. Throttling ends the retries of a client whose calls keep failing."""

MAX_MESSAGE_BYTES = 16 * 1024 * 1024

ChannelOptions = list[tuple[str, int | str]]


def channel_options(target: str) -> ChannelOptions:
    """Options of a channel to `target`: retries, message size limits and keepalive pings while a call is active."""
    options: ChannelOptions = [
        ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 0),
    ]
    if is_loopback(target):
        options.append(("grpc.enable_http_proxy", 0))
    return options


def check_security(target: str, has_credentials: bool, insecure: bool) -> None:
    """Refuse a channel that would carry prompts across a network unencrypted without anyone having said so.

    Raises:
        ValueError: neither credentials nor `insecure` for a target that is not loopback, or both.
    """
    if has_credentials and insecure:
        raise ValueError("credentials and insecure=True exclude each other")
    if not (has_credentials or insecure or is_loopback(target)):
        raise ValueError(
            f"target {target!r} is not a loopback address: pass credentials (grpc.ssl_channel_credentials()), "
            "or insecure=True to send prompts unencrypted"
        )


def is_loopback(target: str) -> bool:
    """Whether a gRPC target (`host:port` or a name with a scheme) stays on this machine."""
    scheme, separator, rest = target.partition(":")
    if separator and scheme in ("unix", "unix-abstract"):
        return True
    if separator and scheme in ("ipv4", "ipv6"):
        return all(_is_loopback_host(address) for address in rest.split(","))
    if separator and scheme == "dns":
        return _is_loopback_host(rest.removeprefix("//").partition("/")[2] if rest.startswith("//") else rest)
    return _is_loopback_host(target)


def _is_loopback_host(address: str) -> bool:
    """Whether the host of `host`, `host:port`, `[host]` or `[host]:port` is loopback."""
    if address.startswith("["):
        host = address[1:].partition("]")[0]
    elif address.count(":") == 1:
        host = address.partition(":")[0]
    else:
        host = address
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tenant_metadata(tenant: str) -> tuple[tuple[str, str], ...]:
    """Metadata of calls for a tenant; none when it is empty.

    Raises:
        ValueError: it is not a name.
    """
    if not tenant:
        return ()
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", tenant):
        raise ValueError(f"tenant must be 1 to 64 of the characters A-Z a-z 0-9 . _ -, got {tenant[:80]!r}")
    return (("foreword-tenant", tenant),)
