"""What all services of one front end share, and the life of a generation in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import structlog

from foreword.scheduler.errors import ClientStalled, EngineUnavailable, InvalidField
from foreword.service.config import ServerConfig
from foreword.service.engine.client import EngineClient
from foreword.service.engine.messages import EngineInfo, StepHeader
from foreword.service.frontend.boundary import field_of
from foreword.service.frontend.drain import Drain
from foreword.service.frontend.generation import Generation
from foreword.service.frontend.metrics import Metrics
from foreword.service.frontend.model import ServedModel
from foreword.service.frontend.registry import GenerationRegistry
from foreword.service.frontend.requests import read_settings
from foreword.service.frontend.response_size import check_message_size, max_packed_bytes, packed
from foreword.service.frontend.responses import GenerationConverter
from foreword.service.frontend.step_feed import StepFeed
from foreword.service.frontend.timeline import Timeline
from foreword.service.status import ResponseTooLarge
from foreword.service.tenants import TENANT_KEY, TENANT_NAMES, is_tenant_name
from foreword.v1 import generation_pb2, generation_service_pb2

_log = structlog.get_logger(__name__)

StreamedResponse = generation_service_pb2.StreamGenerateTextResponse | generation_service_pb2.BidiGenerateTextResponse


class State(IntEnum):
    """Whether requests are served; numbers as in `foreword.v1.ServerState` and `ModelState`."""

    LOADING = 1
    READY = 2
    RESTARTING = 3
    DRAINING = 4


class Frontend:
    """Opens and closes generations on one engine.

    Attributes:
        engine: client of the engine process.
        model: that it serves.
        config: the server's settings.
        registry: generations under way.
        steps: news of every step of the engine.
        metrics: sums for Prometheus.
        drain: the end of the server's work.
        start_time_ns: wall clock at the start.
    """

    def __init__(self, engine: EngineClient, model: ServedModel, config: ServerConfig) -> None:
        self.engine = engine
        self.model = model
        self.config = config
        self.registry = GenerationRegistry()
        self.steps = StepFeed()
        self.metrics = Metrics(engine, self.registry)
        engine.step_listener = self._note_step
        self.drain = Drain(self.registry, config.drain_delay_s)
        self.start_time_ns = time.time_ns()

    @property
    def state(self) -> State:
        """Whether requests are served, and why not."""
        if self.drain.is_requested:
            return State.DRAINING
        if self.engine.ready:
            return State.READY
        return State.LOADING if self.engine.info is None else State.RESTARTING

    def engine_info(self) -> EngineInfo:
        """Facts about the engine.

        Raises:
            EngineUnavailable: none is ready.
        """
        if not self.engine.ready or self.engine.info is None:
            raise EngineUnavailable(f"the engine is {self.state.name.lower()}", state=self.state.name)
        return self.engine.info

    def open(
        self,
        spec: generation_pb2.GenerationSpec,
        timeline: Timeline,
        notify: Callable[[Generation], None],
        *,
        streamed: bool,
        rpc_deadline_ns: int | None,
        tenant: str,
    ) -> Generation:
        """Check a specification and register its generation, which the caller must `close`.

        Raises:
            InvalidField, ContextLengthExceeded, UnknownModel, DuplicateRequest, EngineUnavailable: it cannot begin.
        """
        self.model.check_name(spec.model)
        max_duration_ns = round(self.config.max_generation_duration_s * 1e9)
        settings = read_settings(spec, self.engine_info(), max_duration_ns, streamed=streamed)
        self.registry.check_free(settings.request_id)
        generation = Generation(
            settings,
            self.model,
            self.engine,
            timeline,
            notify,
            buffer_tokens=self.config.stream_buffer_tokens if streamed else None,
            max_response_bytes=self.config.max_send_message_bytes,
            rpc_deadline_ns=rpc_deadline_ns,
            tenant=tenant,
        )
        self.registry.add(generation)
        return generation

    def close(self, generation: Generation) -> None:
        """Free what a generation holds and log how it went."""
        generation.close()
        self.registry.remove(generation, remember=generation.is_admitted)
        now_ns = time.monotonic_ns()
        self.metrics.count_generation(generation, now_ns)
        timeline, counts = generation.timeline, generation.counts
        _log.info(
            "generation ended",
            request_id=generation.settings.request_id,
            outcome=",".join(dict.fromkeys(generation.outcomes)),
            tenant=generation.tenant,
            **field_of(generation.error),
            prompt_tokens=counts.num_prompt,
            output_tokens=counts.num_output,
            queue_us=timeline.between_us(timeline.ready_ns, timeline.schedule_ns),
            ttft_us=timeline.between_us(timeline.receive_ns, timeline.first_token_ns),
            total_us=timeline.offset_us(now_ns),
        )

    @contextmanager
    def generation(
        self,
        spec: generation_pb2.GenerationSpec,
        notify: Callable[[Generation], None],
        context: Any,
        *,
        streamed: bool,
    ) -> Iterator[tuple[Generation, GenerationConverter]]:
        """A generation for the length of one RPC, whose log lines all carry its id."""
        generation = self.open(
            spec,
            Timeline(),
            notify,
            streamed=streamed,
            rpc_deadline_ns=rpc_deadline_ns(context),
            tenant=tenant_of(context),
        )
        structlog.contextvars.bind_contextvars(request_id=generation.settings.request_id)
        try:
            yield generation, self.converter(generation)
        except (ClientStalled, ResponseTooLarge) as error:
            generation.abandon(error)
            raise
        finally:
            self.close(generation)

    def converter(self, generation: Generation) -> GenerationConverter:
        """Builds the messages about a generation."""
        info = self.engine.info
        return GenerationConverter(generation, self.model, "" if info is None else info.device)

    def _note_step(self, header: StepHeader) -> None:
        self.metrics.count_step(header)
        self.steps.publish(header)

    async def write(
        self, context: Any, events: Iterable[generation_pb2.GenerationEvent], response_type: type[StreamedResponse]
    ) -> None:
        """Send events in as few messages as hold them, waiting for the client to read no longer than the stall budget.

        Raises:
            ClientStalled: it did not read in time.
            ResponseTooLarge: a single event does not fit a message.
        """
        limit = self.config.max_send_message_bytes
        try:
            for pack in packed(events, max_packed_bytes(limit)):
                response = response_type(events=pack)
                check_message_size(response.ByteSize(), limit)
                async with asyncio.timeout(self.config.stall_budget_s):
                    await context.write(response)
        except TimeoutError:
            budget_s = self.config.stall_budget_s
            raise ClientStalled(f"the client did not read for {budget_s:g} s", stall_budget_s=budget_s) from None


def rpc_deadline_ns(context: Any) -> int | None:
    """Monotonic clock at which an RPC's deadline passes; `None` when it has none."""
    remaining_s = context.time_remaining()
    return None if remaining_s is None else time.monotonic_ns() + round(remaining_s * 1e9)


def tenant_of(context: Any) -> str:
    """The tenant that an RPC names; empty when it names none.

    Raises:
        InvalidField: it is not a name, or there are several.
    """
    names = [value for key, value in context.invocation_metadata() if key == TENANT_KEY]
    if len(names) > 1:
        raise InvalidField(TENANT_KEY, "must be given once in the metadata")
    if names and names[0] and not is_tenant_name(names[0]):
        raise InvalidField(TENANT_KEY, f"must be {TENANT_NAMES}")
    return str(names[0]) if names else ""
