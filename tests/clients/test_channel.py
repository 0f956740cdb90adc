from __future__ import annotations

import json

import pytest

from foreword.clients import SERVICE_CONFIG, AsyncClient, Client
from foreword.clients.channel import channel_options, check_security, is_loopback
from foreword.v1 import (
    engine_service_pb2,
    generation_service_pb2,
    model_service_pb2,
    tokenization_service_pb2,
)


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1:50051",
        "127.8.9.10:1",
        "127.0.0.1",
        "localhost:50051",
        "[::1]:50051",
        "::1",
        "dns:localhost:50051",
        "dns:///localhost:50051",
        "dns://8.8.8.8/127.0.0.1:50051",
        "ipv4:127.0.0.1:50051",
        "ipv4:127.0.0.1:1,127.0.0.2:2",
        "ipv6:[::1]:50051",
        "unix:/run/foreword.sock",
        "unix:///run/foreword.sock",
        "unix-abstract:foreword",
    ],
)
def test_loopback_targets(target: str) -> None:
    assert is_loopback(target)
    check_security(target, has_credentials=False, insecure=False)


@pytest.mark.parametrize(
    "target",
    [
        "10.0.0.1:50051",
        "0.0.0.0:50051",
        "example.org:50051",
        "localhost.example.org:50051",
        "127.0.0.1.example.org:50051",
        "dns://127.0.0.1/example.org:50051",
        "dns:///example.org",
        "ipv4:127.0.0.1:1,10.0.0.1:2",
        "[2001:db8::1]:50051",
        "xds:///localhost",
        "",
    ],
)
def test_other_targets_need_a_decision(target: str) -> None:
    assert not is_loopback(target)
    with pytest.raises(ValueError, match="not a loopback address"):
        check_security(target, has_credentials=False, insecure=False)
    check_security(target, has_credentials=True, insecure=False)
    check_security(target, has_credentials=False, insecure=True)
    with pytest.raises(ValueError, match="exclude each other"):
        check_security(target, has_credentials=True, insecure=True)


async def test_both_clients_refuse_an_unencrypted_network() -> None:
    with pytest.raises(ValueError, match="not a loopback address"):
        Client("example.org:50051")
    with pytest.raises(ValueError, match="not a loopback address"):
        AsyncClient("example.org:50051")


def test_the_service_config_names_every_service() -> None:
    (method,) = json.loads(json.dumps(SERVICE_CONFIG))["methodConfig"]
    modules = (engine_service_pb2, generation_service_pb2, model_service_pb2, tokenization_service_pb2)
    services = {name.full_name for module in modules for name in module.DESCRIPTOR.services_by_name.values()}
    assert {name["service"] for name in method["name"]} == services
    assert method["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]
    assert "hedgingPolicy" not in method


def test_only_loopback_goes_past_a_proxy() -> None:
    assert ("grpc.enable_http_proxy", 0) in channel_options("127.0.0.1:1")
    assert "grpc.enable_http_proxy" not in dict(channel_options("example.org:1"))
