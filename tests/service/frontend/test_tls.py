from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import grpc
import pytest

from foreword.scheduler.errors import ConfigError
from foreword.service.config import ServerConfig
from foreword.service.frontend.model import ServedModel
from foreword.service.server import Server
from foreword.v1.model_service_pb2 import ListModelsRequest
from foreword.v1.model_service_pb2_grpc import ModelServiceStub

from .conftest import FakeEngine

CREATE = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
async def test_server_with_a_certificate(tmp_path: Path, toy_model: ServedModel) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    names = ["-keyout", str(key), "-out", str(certificate), "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(["openssl", *CREATE.split(), *names], check=True, capture_output=True)
    config = ServerConfig(listen_address="localhost:0", tls_certificate=str(certificate), tls_private_key=str(key))
    server = Server(config, FakeEngine(), toy_model)  # type: ignore[arg-type]
    await server.start()
    try:
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
        async with grpc.aio.secure_channel(server.address, credentials) as channel:
            response = await ModelServiceStub(channel).ListModels(ListModelsRequest())
        assert response.models[0].name == "toy"
        async with grpc.aio.insecure_channel(server.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await ModelServiceStub(channel).ListModels(ListModelsRequest())
    finally:
        await server.stop()


async def test_certificates_that_cannot_be_read(tmp_path: Path, toy_model: ServedModel) -> None:
    config = ServerConfig(listen_address="localhost:0", tls_certificate="/nowhere.pem", tls_private_key="/nowhere.pem")
    with pytest.raises(ConfigError, match=r"tls_private_key: /nowhere.pem: No such file"):
        Server(config, FakeEngine(), toy_model)  # type: ignore[arg-type]


async def test_certificates_that_are_none(tmp_path: Path, toy_model: ServedModel) -> None:
    path = tmp_path / "no.pem"
    path.write_text("no certificate")
    config = ServerConfig(listen_address="localhost:0", tls_certificate=str(path), tls_private_key=str(path))
    with pytest.raises(ConfigError, match="tls_certificate"):
        Server(config, FakeEngine(), toy_model)  # type: ignore[arg-type]
