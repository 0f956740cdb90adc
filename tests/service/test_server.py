"""The whole server with its engine process and the default model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foreword.clients import AsyncClient, ForewordClientError, Message
from foreword.service.config import ServerConfig
from foreword.service.server import SERVICES, Server, running_server
from foreword.v1.engine_pb2 import Step
from foreword.v1.engine_service_pb2 import DrainServerRequest, WatchStepsRequest
from foreword.v1.engine_service_pb2_grpc import EngineServiceStub

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = [
    [Message("user", "Name three colours.")],
    "Once upon a time",
    "def add(a, b):",
    [Message("user", "Wie heißt die Hauptstadt von Frankreich? 🇫🇷")],
]
GREEDY = {"temperature": 0.0, "max_output_token_count": 12}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    config = ServerConfig(listen_address="127.0.0.1:0", max_model_len=512, max_num_sequences=16, log_level="error")
    descriptors = open_descriptors()
    stages: list[str] = []
    async with running_server(config, lambda stage, done, total: stages.append(stage)) as server:
        assert "weights" in stages
        yield server
        load = server.frontend.engine.load
        assert len(server.frontend.registry) == 0
        assert (load.num_running, load.num_waiting, load.num_free_blocks) == (0, 0, load.num_blocks)
    for _ in range(100):  # connections close a little later
        left = open_descriptors() - descriptors
        if len(left) <= 4:  # gRPC keeps its event engine
            break
        await asyncio.sleep(0.05)
    assert len(left) <= 4, left


def open_descriptors() -> set[str]:
    """What this process holds open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address) as client:
        yield client


async def test_all_ways_to_generate_agree(client: AsyncClient) -> None:
    alone = [await client.generate(prompt, **GREEDY) for prompt in PROMPTS]
    streams = [client.stream(prompt, **GREEDY) for prompt in PROMPTS]
    together = await asyncio.gather(*(stream.result() for stream in streams))
    async with client.session() as session:
        on_one_stream = await asyncio.gather(*(session.start(prompt, **GREEDY).result() for prompt in PROMPTS))
    for each, streamed, multiplexed in zip(alone, together, on_one_stream, strict=True):
        assert list(each.token_ids) == list(streamed.token_ids) == list(multiplexed.token_ids)
        assert each.text == streamed.text == multiplexed.text
        assert each.text == (await client.detokenize(each.token_ids)).text
        assert each.usage.output_token_count == len(each.token_ids) > 0
        for timing in (each.timing, streamed.timing, multiplexed.timing):
            parts = timing.tokenize_duration_micros + timing.queue_duration_micros
            parts += timing.prefill_duration_micros + timing.delivery_duration_micros
            assert timing.first_token_duration_micros == parts
            assert timing.queue_duration_micros >= 0


async def test_seeds_repeat(client: AsyncClient) -> None:
    options = {"temperature": 1.5, "max_output_token_count": 16}
    first = await client.generate("Once", **options)
    again = await client.generate("Once", seed=first.started.sampling.seed, **options)
    other = await client.generate("Once", **options)
    assert list(first.token_ids) == list(again.token_ids) != list(other.token_ids)


async def test_limits_of_the_context(client: AsyncClient) -> None:
    with pytest.raises(ForewordClientError) as caught:
        await client.generate([1] * 500, max_output_token_count=13)
    assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"
    result = await client.generate([1] * 510, ignore_eos=True)
    assert result.usage.output_token_count == result.started.stopping.max_output_token_count == 2


async def test_steps_add_up_to_the_usage(server: Server, client: AsyncClient) -> None:
    async with grpc.aio.insecure_channel(server.admin_address) as channel:
        watch = EngineServiceStub(channel).WatchSteps(WatchStepsRequest())
        await watch.initial_metadata()
        results = await asyncio.gather(*(client.generate(prompt, seed=1, **GREEDY) for prompt in PROMPTS))
        steps: list[Step] = []
        while sum(step.finished_sequence_count for step in steps) < len(PROMPTS):
            message = await asyncio.wait_for(watch.read(), 10)
            assert message.dropped_step_count == 0
            steps += message.steps
        watch.cancel()
    usages = [result.usage for result in results]
    assert sum(step.output_token_count for step in steps) == sum(usage.output_token_count for usage in usages)
    assert sum(step.draft_token_count for step in steps) == sum(usage.draft_token_count for usage in usages)
    accepted = sum(usage.accepted_draft_token_count for usage in usages)
    assert sum(step.accepted_draft_token_count for step in steps) == accepted
    computed = sum(usage.prompt_token_count - usage.cached_prompt_token_count for usage in usages)
    assert sum(step.prefill_token_count for step in steps) == computed
    for step in steps:
        assert step.prefill_token_count <= step.token_count <= step.token_budget == 512
        parts = step.schedule_duration_micros + step.draft_duration_micros + step.verify_duration_micros
        assert 0 < parts <= step.step_duration_micros
        assert step.load.running_sequence_count + step.finished_sequence_count >= step.sequence_count
    assert [step.step_id for step in steps] == sorted({step.step_id for step in steps})
    assert steps[-1].load.free_block_count == steps[-1].load.block_count


async def test_killed_engine_ends_streams_and_is_replaced(server: Server, client: AsyncClient) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICES[0]))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stream = client.stream("Once upon a time", max_output_token_count=400, ignore_eos=True)
        await anext(aiter(stream))
        [pid] = engine_processes()
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(ForewordClientError) as caught:
            await stream.result()
        assert time.monotonic() - killed < 1
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_UNAVAILABLE")
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
    assert (await client.generate("Once", **GREEDY)).text


def engine_processes() -> list[int]:
    """Children of this process that run an engine."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may end meanwhile
            is_child = f"\nPPid:\t{os.getpid()}\n" in (process / "status").read_text()
            if is_child and b"engine.process" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


async def test_command_line() -> None:
    command = [sys.executable, "-c", "import sys; from foreword.service.cli import main; sys.exit(main())"]

    def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *arguments], input=text, capture_output=True, text=True, timeout=60)

    flags = ["serve", "--listen-address", "127.0.0.1:0", "--max-model-len", "256"]
    with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            banner = await asyncio.to_thread(process.stdout.readline)
            match = re.search(r"127\.0\.0\.1:\d+", banner)
            assert match, banner
            target = ["--target", match[0]]
            models = await asyncio.to_thread(run, "models", *target)
            assert "smollm2-135m-instruct\tready" in models.stdout
            flags = ["--max-output-tokens", "8", "--temperature", "0", "--timing", *target]
            answer = await asyncio.to_thread(run, "generate", "Once upon a time", *flags)
            assert answer.returncode == 0
            assert re.search(r"TTFT [\d.]+ ms .* 8 out, LENGTH", answer.stderr)
            piped = await asyncio.to_thread(run, "generate", *flags, text="Once upon a time")
            assert piped.stdout == answer.stdout
            chat = await asyncio.to_thread(run, "chat", *flags, text="Hello!\nAnd you?\n")
            assert chat.returncode == 0
            assert chat.stderr.count("TTFT") == 2
        finally:
            process.send_signal(signal.SIGINT)
            _, log = await asyncio.to_thread(process.communicate)
    assert process.returncode == 0
    assert "upon a time" not in log
    ended = [json.loads(line) for line in log.splitlines() if '"generation ended"' in line]
    assert len(ended) == 4
    assert all(line["output_tokens"] == 8 and line["request_id"] for line in ended[:2])


@pytest.mark.parametrize("num_signals", [1, 2])
async def test_ctrl_c_drains_and_says_so(num_signals: int) -> None:
    command = [sys.executable, "-c", "import sys; from foreword.service.cli import main; sys.exit(main())"]
    flags = ["serve", "--listen-address", "127.0.0.1:0", "--max-model-len", "512"]
    with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            match = re.search(r"127\.0\.0\.1:\d+", await asyncio.to_thread(process.stdout.readline))
            assert match
            async with AsyncClient(match[0]) as client:
                stream = client.stream("Once", max_output_token_count=400, ignore_eos=True)
                await anext(aiter(stream))
                process.send_signal(signal.SIGINT)
                while "Draining" not in (note := await asyncio.to_thread(process.stderr.readline)):
                    assert note
                assert note == "Draining: 1 generation may take up to 30 s to end; Ctrl-C again ends at once.\n"
                if num_signals == 2:
                    process.send_signal(signal.SIGINT)
                    with pytest.raises(ForewordClientError):
                        await stream.result()
                else:
                    assert (await stream.result()).usage.output_token_count == 400
        finally:
            process.send_signal(signal.SIGINT)
            await asyncio.to_thread(process.communicate)
    assert process.returncode == 0


async def test_drain_server_ends_the_process_and_a_signal_does_not_hasten_it() -> None:
    command = [sys.executable, "-c", "import sys; from foreword.service.cli import main; sys.exit(main())"]
    flags = ["serve", "--listen-address", "127.0.0.1:0", "--max-model-len", "512"]
    with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            match = re.search(r"127\.0\.0\.1:\d+", await asyncio.to_thread(process.stdout.readline))
            assert match
            async with AsyncClient(match[0]) as client, grpc.aio.insecure_channel(match[0]) as channel:
                stream = client.stream("Once", max_output_token_count=100, ignore_eos=True)
                await anext(aiter(stream))
                answer = await EngineServiceStub(channel).DrainServer(DrainServerRequest())
                assert answer.active_generation_count == 1
                process.send_signal(signal.SIGTERM)
                assert (await stream.result()).usage.output_token_count == 100
        finally:
            try:
                await asyncio.to_thread(process.communicate, timeout=20)
            finally:
                process.kill()
    assert process.returncode == 0


async def test_demo() -> None:
    command = [sys.executable, "-c", "import sys; from foreword.service.cli import main; sys.exit(main())"]
    arguments = ["demo", "--listen-address", "127.0.0.1:0", "--max-model-len", "256"]
    shown = await asyncio.to_thread(
        subprocess.run, [*command, *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    assert re.search(r"TTFT .* tokens/s \| ITL p50 .* out, (EOS|LENGTH)\n$", shown.stdout)
    assert all(line.startswith("loading: ") for line in shown.stderr.splitlines()), shown.stderr
