"""A front end over gRPC with a scripted engine behind it and a small byte-level vocabulary."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from structlog.testing import capture_logs

from foreword.gpu.checkpoint.checkpoint import ChatTemplate, Checkpoint
from foreword.scheduler.errors import EngineUnavailable, ForewordError
from foreword.scheduler.request import Request
from foreword.scheduler.step import SEQUENCE_UPDATE, DraftState, FinishReason, SchedulerLoad, StepKind, TokenScores
from foreword.service.config import ServerConfig
from foreword.service.engine.messages import EngineInfo, GenerationSink, StepHeader
from foreword.service.frontend.model import ServedModel
from foreword.service.server import Server
from foreword.service.text.processor import TextProcessor
from foreword.service.text.vocabulary import BYTE_ALPHABET
from foreword.v1.generation_service_pb2_grpc import GenerationServiceStub

INFO = EngineInfo(
    device="cpu",
    device_name="test processor",
    dtype="float32",
    architecture="ToyForCausalLM",
    vocab_size=300,
    num_parameters=1234,
    max_model_len=1000,
    max_num_sequences=8,
    max_num_batched_tokens=64,
    block_size=16,
    num_blocks=100,
    load_duration_s=0.5,
)
LOAD = SchedulerLoad(
    num_running=1,
    num_waiting=2,
    num_waiting_tokens=30,
    num_paused=0,
    num_free_blocks=90,
    num_cached_blocks=40,
    num_blocks=100,
)


@dataclass(eq=False)
class FakeSequence:
    """What the fake engine holds for a request."""

    request: Request
    sink: GenerationSink
    num_steps: int = 0
    num_scored: int = 1
    first_scheduled_ns: int = 0
    is_paused: bool = False
    calls: list[str] = field(default_factory=list)


def scores_of(token_ids: list[int]) -> TokenScores:
    """Scores that tell which token they belong to: its rank is the id plus 1, and it leads three most probable ones."""
    ids = np.array(token_ids, np.int32)
    top = np.stack([ids, ids - 1, ids - 2], axis=1)
    return TokenScores(-ids.astype(np.float32), ids + 1, 3, top.ravel(), -top.astype(np.float32).ravel())


class FakeEngine:
    """Stands for `EngineClient`: admits at once and computes only what the test tells it to."""

    def __init__(self) -> None:
        self.info: EngineInfo | None = INFO
        self.ready = True
        self.load = LOAD
        self.draft_state = DraftState.DISABLED
        self.refusal: ForewordError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.sequences: dict[int, FakeSequence] = {}
        self.submitted: list[Request] = []
        self.forgotten: list[int] = []
        self.cancelled: list[int] = []
        self._arrived = asyncio.Event()
        self._next_key = 0
        self._step_id = 0

    def new_request_key(self, num_outputs: int = 1) -> int:
        request_key = self._next_key + 1
        self._next_key += num_outputs
        return request_key

    async def submit(self, request: Request, sink: GenerationSink) -> None:
        if not self.ready:
            raise EngineUnavailable("the engine is restarting")
        self.submitted.append(request)
        for index, request_key in enumerate(request.output_keys):
            self.sequences[request_key] = FakeSequence(request.output(index), sink)
        self._arrived.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            for request_key in request.output_keys:
                self.forget(request_key)
            raise
        if self.refusal is not None:
            for request_key in request.output_keys:
                del self.sequences[request_key]
            raise self.refusal

    def cancel(self, request_key: int) -> None:
        self.cancelled.append(request_key)
        if request_key in self.sequences:
            asyncio.get_running_loop().call_soon(self._end_cancelled, request_key)

    def pause(self, request_key: int) -> None:
        self.sequences[request_key].is_paused = True
        self.sequences[request_key].calls.append("pause")

    def resume(self, request_key: int) -> None:
        self.sequences[request_key].is_paused = False
        self.sequences[request_key].calls.append("resume")

    def forget(self, request_key: int) -> None:
        self.forgotten.append(request_key)
        self.sequences.pop(request_key, None)

    async def arrival(self, count: int = 1) -> list[FakeSequence]:
        """Wait until this many sequences are active."""
        while len(self.sequences) < count:
            self._arrived.clear()
            await self._arrived.wait()
        return list(self.sequences.values())

    def step(
        self, tokens: dict[FakeSequence, Sequence[int] | str], finish: FinishReason = FinishReason.NONE, **counts: int
    ) -> None:
        """Report one step: what each sequence gained, and how all of them ended, if they did."""
        self._step_id += 1
        end_ns = time.monotonic_ns()  # the first step seems to be scheduled just before, after the request came
        header = StepHeader(self._step_id, end_ns - 2_000_000, end_ns, 0, 1_500_000, len(tokens), len(tokens), LOAD)
        for sequence, gained in tokens.items():
            ids = list(gained.encode()) if isinstance(gained, str) else list(gained)
            sequence.num_steps += 1
            sequence.first_scheduled_ns = sequence.first_scheduled_ns or end_ns - 1000
            update = np.zeros((), SEQUENCE_UPDATE)
            update["request_key"] = sequence.request.request_key
            update["first_scheduled_ns"] = sequence.first_scheduled_ns
            update["num_tokens"] = len(ids)
            update["num_prompt_computed"] = len(sequence.request.prompt_token_ids)
            update["num_steps"] = sequence.num_steps
            update["num_prefill_chunks"] = 1
            update["step_kind"] = StepKind.PREFILL if sequence.num_steps == 1 else StepKind.DECODE
            update["finish_reason"] = finish
            for name, value in counts.items():
                update[name] = value
            if finish:
                del self.sequences[sequence.request.request_key]
            start = sequence.num_scored = sequence.num_scored + int(update["num_scored"])
            prompt_ids = sequence.request.prompt_token_ids[start - int(update["num_scored"]) : start]
            sequence.sink.on_step(
                header,
                update[()],
                np.array(ids, np.int32),
                np.full(len(ids), -0.5, np.float32),
                scores_of(ids),
                scores_of(prompt_ids.tolist()) if len(prompt_ids) else None,
            )

    def fail(self, error: ForewordError) -> None:
        """Die: every sequence fails."""
        sequences, self.sequences = list(self.sequences.values()), {}
        for sequence in sequences:
            sequence.sink.on_failure(error)

    def _end_cancelled(self, request_key: int) -> None:
        sequence = self.sequences.get(request_key)
        if sequence is not None:
            self.step({sequence: []}, FinishReason.CANCELLED)


class Harness:
    """A server on a free port, its engine, and a channel to it."""

    def __init__(
        self, server: Server, engine: FakeEngine, channel: grpc.aio.Channel, logs: list[MutableMapping[str, Any]]
    ) -> None:
        self.server = server
        self.engine = engine
        self.channel = channel
        self.logs = logs
        self.generation = GenerationServiceStub(channel)
        self.registry = server.frontend.registry

    def outcomes(self) -> dict[str, str]:
        """What the log says of each generation that has ended."""
        ended = [entry for entry in self.logs if entry["event"] == "generation ended"]
        return {entry["request_id"]: entry["outcome"] for entry in ended}


CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
SPECIAL_TOKENS = {"<s>": 256, "</s>": 257}
EOS = SPECIAL_TOKENS["</s>"]


def toy_tokenizer_json() -> str:
    """A tokenizer whose token of id n is the byte n, with two special tokens."""
    spelling = {byte: character for character, byte in BYTE_ALPHABET.items()}
    added = [
        {"id": token_id, "content": text, "special": True, "normalized": False, "single_word": False}
        | {"lstrip": False, "rstrip": False}
        for text, token_id in SPECIAL_TOKENS.items()
    ]
    vocab = {spelling[byte]: byte for byte in range(256)} | SPECIAL_TOKENS
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": added,
            "pre_tokenizer": level,
            "decoder": level,
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        }
    )


class ToyCheckpoint(Checkpoint):
    """A model without weights."""

    def __init__(self) -> None:
        self.path = Path("toy")
        self.architecture = INFO.architecture
        self.config = {"vocab_size": INFO.vocab_size}
        self.eos_token_ids = (EOS,)
        self.chat_template = ChatTemplate(CHAT_TEMPLATE)

    def tensor_names(self) -> frozenset[str]:
        return frozenset()

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        raise NotImplementedError

    def tokenizer_json(self) -> str:
        return toy_tokenizer_json()


@pytest.fixture(scope="session")
def toy_model() -> Iterator[ServedModel]:
    """A model of bytes; its chat template is ready, so that no test starts the template's process."""
    text = TextProcessor(ToyCheckpoint())
    asyncio.run(text.start())
    yield ServedModel("toy", INFO.architecture, text, (EOS,), has_chat_template=True)
    text.close()


@pytest.fixture
def config() -> ServerConfig:
    """Settings of the server; tests override single ones."""
    return ServerConfig(listen_address="127.0.0.1:0", stream_buffer_tokens=64, stall_budget_s=5.0)


_descriptors: dict[str, int] = {}


@pytest.fixture
async def harness(
    config: ServerConfig, toy_model: ServedModel, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Harness]:
    """A running server; afterwards no generation, task or descriptor is left, and gRPC has logged nothing."""
    tasks = asyncio.all_tasks()
    engine = FakeEngine()
    server = Server(config, engine, toy_model)  # type: ignore[arg-type]
    await server.start()
    channel = grpc.aio.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)])
    with capture_logs() as logs:
        try:
            yield Harness(server, engine, channel, logs)
            await asyncio.wait_for(server.frontend.registry.wait_until_empty(), 5)
            assert engine.sequences == {}
        finally:
            await channel.close()
            await server.stop()
    assert [entry for entry in logs if entry["log_level"] == "error"] == []
    tasks = {*tasks, asyncio.current_task()}
    await _settle(lambda: asyncio.all_tasks() <= tasks)
    assert asyncio.all_tasks() - tasks == set()
    assert [record.message for record in caplog.records if record.name.startswith("grpc")] == []
    gc.collect()
    bound = _descriptors.setdefault("after the first test", _count_descriptors())
    await _settle(lambda: _count_descriptors() <= bound)
    assert _count_descriptors() <= bound


def _count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def _settle(has_settled: Callable[[], bool]) -> None:
    """Give gRPC's own threads time to close what they hold."""
    for _ in range(100):
        if has_settled():
            return
        await asyncio.sleep(0.01)
