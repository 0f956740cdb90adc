"""A `foreword serve` of its own for a benchmark, and what its processes cost."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def free_port() -> int:
    """A port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def descendants(pid: int) -> list[int]:
    """The process and all processes below it."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [pid, *(found for child in children for found in descendants(child))]


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of the processes."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextmanager
def server(arguments: list[str]) -> Iterator[tuple[str, int]]:
    """Run `foreword serve` on a free port; yields its address and process id once it is ready."""
    address = f"127.0.0.1:{free_port()}"
    command = [
        str(Path(sys.executable).with_name("foreword")),
        "serve",
        "--listen-address",
        address,
        "--log-level",
        "warning",
    ]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.DEVNULL)
    try:
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="foreword.v1.GenerationService")
            deadline = time.monotonic() + 120
            while True:
                if process.poll() is not None:
                    raise SystemExit(f"the server ended with status {process.returncode}")
                try:
                    if health.Check(request).status == health_pb2.HealthCheckResponse.SERVING:
                        break
                except grpc.RpcError:
                    pass
                if time.monotonic() > deadline:
                    raise SystemExit("the server did not become ready within 120 s")
                time.sleep(0.1)
        yield address, process.pid
    finally:
        process.terminate()
        process.wait(30)
