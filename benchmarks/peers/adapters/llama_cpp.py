"""llama.cpp's `llama-server`, spoken to through HTTP as it streams."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.peers.adapters import worker

HOST = "127.0.0.1"
NUM_SLOTS = 32
OPTIONS = ("--kv-unified", "--no-cache-prompt", "--cache-ram", "0", "--log-disable")
LOOKUP = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8")


def start(binary: Path, settings: worker.Settings) -> tuple[subprocess.Popen[bytes], int]:
    """Start the server; returns it and its port once it is ready."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = int(probe.getsockname()[1])
    threads = str(settings.num_threads)
    sizes = ("-t", threads, "-tb", threads, "-c", str(settings.num_kv_tokens), "-np", str(NUM_SLOTS))
    command = [str(binary), "-m", settings.model, "--host", HOST, "--port", str(port), *sizes, *OPTIONS]
    command.extend(LOOKUP if settings.speculates else ())
    process = subprocess.Popen(command, stdout=sys.stderr, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            connection = http.client.HTTPConnection(HOST, port, timeout=10)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return process, port
        except OSError:
            pass
        time.sleep(0.02)
    process.kill()
    raise SystemExit(f"llama-server did not become ready, its status is {process.wait()}")


def generate(port: int, prompt: list[int], num_tokens: int) -> Iterator[int]:
    """Stream an answer; yields numbers of tokens."""
    body = {
        "prompt": prompt,
        "n_predict": num_tokens,
        "samplers": ["top_k"],
        "top_k": 1,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
        "return_tokens": True,
    }
    connection = http.client.HTTPConnection(HOST, port, timeout=300)
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise worker.Refused(response.read().decode()[:200])
    for line in response:
        if line.startswith(b"data: {"):
            yield len(json.loads(line[6:]).get("tokens", ()))
    connection.close()


@contextmanager
def open_system(settings: worker.Settings) -> Iterator[tuple[worker.Ready, worker.Run]]:
    """Run the server."""
    binary = Path(sys.executable).with_name("llama-server")
    version = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    begin = time.monotonic()
    process, port = start(binary, settings)
    ready = worker.Ready((version.stdout + version.stderr).split("\n")[0], time.monotonic() - begin, [process.pid])
    try:
        yield ready, partial(worker.run_streams, partial(generate, port))
    finally:
        process.terminate()
        process.wait(30)


if __name__ == "__main__":
    worker.main(open_system)
