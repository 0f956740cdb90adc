"""What Prometheus reads."""

from __future__ import annotations

import asyncio
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from foreword.scheduler.errors import ConfigError, QueueFull
from foreword.scheduler.step import FinishReason, StepForecast
from foreword.service.config import ServerConfig
from foreword.service.engine.messages import StepHeader
from foreword.service.frontend.metrics import Distribution
from foreword.service.metrics_server import MetricsServer
from foreword.v1.generation_service_pb2 import BidiGenerateTextRequest, CancelCommand

from .conftest import EOS, LOAD, Harness
from .rpc import failure_of, read_events, spec, streamed, unary

Samples = dict[tuple[str, ...], float]


class TestDistribution:
    def test_a_bound_belongs_to_the_values_below_it(self) -> None:
        distribution = Distribution((1.0, 2.0))
        for value in (0.5, 1.0, 1.5, 2.0, 2.5):
            distribution.add(value)
        samples = {(s.name, s.labels.get("le")): s.value for s in distribution.family("d", "").samples}
        assert samples == {
            ("d_bucket", "1.0"): 2,
            ("d_bucket", "2.0"): 4,
            ("d_bucket", "+Inf"): 5,
            ("d_count", None): 5,
            ("d_sum", None): 7.5,
        }

    def test_many_values_count_as_one_by_one(self) -> None:
        values = np.random.default_rng(1).choice([0.0, 0.5, 1.0, 1.5, 2.0, 7.0], 100)
        one_by_one, together = Distribution((1.0, 2.0)), Distribution((1.0, 2.0))
        for value in values.tolist():
            one_by_one.add(value)
        together.add_all(values)
        together.add_all(np.zeros(0))
        assert one_by_one.family("d", "").samples == together.family("d", "").samples


@pytest.fixture
def config() -> ServerConfig:
    return ServerConfig(listen_address="127.0.0.1:0", metrics_listen_address="127.0.0.1:0", stall_budget_s=5.0)


async def scrape(harness: Harness) -> Samples:
    """All samples, by name and label values in the order of the labels' names."""
    assert harness.server.metrics_server is not None
    url = f"http://{harness.server.metrics_server.address}/metrics"

    def read() -> str:
        with urllib.request.urlopen(url, timeout=10) as response:
            return str(response.read().decode())

    text = await asyncio.to_thread(read)
    assert "secret" not in text
    families = list(text_string_to_metric_families(text))
    assert all(family.name.startswith("foreword_") and family.documentation for family in families)
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


async def test_generations_add_up_to_their_usage(harness: Harness) -> None:
    usages, timings = [], []
    for index in range(3):
        call = harness.generation.StreamGenerateText(streamed(prompt="secret", stopping={"max_output_token_count": 6}))
        [sequence] = await harness.engine.arrival()
        harness.engine.step({sequence: "a"}, num_cached=index)
        harness.engine.step({sequence: "bcd"}, num_drafted=4, num_accepted=2)
        harness.engine.step({sequence: "e"}, num_drafted=1, num_accepted=0)
        harness.engine.step({sequence: "f"}, FinishReason.LENGTH)
        finished = (await read_events(call))[-1].finished
        usages.append(finished.usage)
        timings.append(finished.timing)
    await harness.registry.wait_until_empty()
    samples = await scrape(harness)
    prompt = sum(usage.prompt_token_count for usage in usages)
    assert samples["foreword_prompt_tokens_total",] == prompt == 18
    assert samples["foreword_prefix_cache_query_tokens_total",] == prompt
    cached = sum(usage.cached_prompt_token_count for usage in usages)
    assert samples["foreword_prefix_cache_hit_tokens_total",] == cached == 3
    assert samples["foreword_output_tokens_total",] == sum(usage.output_token_count for usage in usages) == 18
    drafted = [samples["foreword_draft_tokens_total", "", str(position)] for position in range(4)]
    accepted = [samples.get(("foreword_accepted_draft_tokens_total", "", str(position)), 0) for position in range(4)]
    assert drafted == [6, 3, 3, 3]
    assert accepted == [3, 3, 0, 0]
    assert sum(drafted) == sum(usage.draft_token_count for usage in usages)
    assert sum(accepted) == sum(usage.accepted_draft_token_count for usage in usages)
    assert samples["foreword_draft_verifications_total", ""] == 6
    assert samples["foreword_outputs_total", "LENGTH"] == 3
    assert samples["foreword_time_to_first_token_seconds_count",] == 3
    first = sum(timing.first_token_duration_micros for timing in timings) / 1e6
    assert samples["foreword_time_to_first_token_seconds_sum",] == pytest.approx(first, abs=1e-5)
    assert samples["foreword_inter_token_latency_seconds_count",] == 15
    decode = sum(timing.decode_duration_micros for timing in timings) / 1e6
    assert samples["foreword_inter_token_latency_seconds_sum",] == pytest.approx(decode, abs=1e-5)
    assert samples["foreword_generation_duration_seconds_count",] == 3
    assert samples["foreword_active_generations",] == 0


async def test_steps_add_up(harness: Harness) -> None:
    for _ in range(4):
        harness.engine.step({})
    samples = await scrape(harness)
    assert samples["foreword_step_duration_seconds_count",] == 4
    assert samples["foreword_step_duration_seconds_sum",] == pytest.approx(0.008)
    assert samples["foreword_step_seconds_total", "model"] == pytest.approx(0.006)
    assert samples["foreword_step_tokens_count",] == samples["foreword_step_sequences_count",] == 4
    gauges = {
        "running_sequences": LOAD.num_running,
        "waiting_sequences": LOAD.num_waiting,
        "waiting_tokens": LOAD.num_waiting_tokens,
        "paused_sequences": LOAD.num_paused,
        "kv_cache_blocks": LOAD.num_blocks,
        "kv_cache_free_blocks": LOAD.num_free_blocks,
        "kv_cache_cached_blocks": LOAD.num_cached_blocks,
        "engine_ready": 1,
    }
    assert {name: samples[f"foreword_{name}",] for name in gauges} == gauges


async def test_what_drafts_gain_is_the_ratio_of_two_sums(harness: Harness) -> None:
    plain = StepHeader(1, 0, 5_000_000, 0, 4_000_000, 1, 1, LOAD, forecast=StepForecast(3_000_000))
    checked = replace(plain, draft_duration_ns=1_000_000, forecast=StepForecast(5_000_000, 15_000_000))
    for header in (plain, checked, checked):
        harness.engine.step_listener(header)
    samples = await scrape(harness)
    for kind, seconds in {"actual": 0.010, "predicted": 0.012, "undrafted": 0.030}.items():
        assert samples["foreword_draft_step_seconds_total", kind] == pytest.approx(seconds)


async def test_what_fails_is_counted_by_its_status(harness: Harness) -> None:
    await failure_of(harness.generation.GenerateText(unary(sampling={"top_p": 7})))
    harness.engine.refusal = QueueFull("the queue is full")
    await failure_of(harness.generation.StreamGenerateText(streamed(prompt="secret")))
    call = harness.generation.BidiGenerateText()
    await call.write(BidiGenerateTextRequest(cancel=CancelCommand(request_id="secret")))
    await call.write(BidiGenerateTextRequest(start={"spec": spec(request_id="secret")}))
    await call.done_writing()
    assert len(await read_events(call)) == 2
    samples = await scrape(harness)
    service = "foreword.v1.GenerationService"
    errors = {labels[1:]: value for labels, value in samples.items() if labels[0] == "foreword_errors_total"}
    assert errors == {
        ("INVALID_ARGUMENT", f"{service}/GenerateText"): 1,
        ("RESOURCE_EXHAUSTED", f"{service}/StreamGenerateText"): 1,
        ("NOT_FOUND", f"{service}/BidiGenerateText"): 1,
        ("RESOURCE_EXHAUSTED", f"{service}/BidiGenerateText"): 1,
    }
    assert samples["foreword_outputs_total", "QUEUE_FULL"] == 2
    assert samples["foreword_prompt_tokens_total",] == 0
    assert samples["foreword_time_to_first_token_seconds_count",] == 0


async def test_a_generation_that_bypasses_the_prefix_cache_asks_it_nothing(harness: Harness) -> None:
    call = harness.generation.GenerateText(unary(cache={"bypass_prefix_cache": True}))
    [sequence] = await harness.engine.arrival()
    harness.engine.step({sequence: "x"}, FinishReason.LENGTH)
    await call
    await harness.registry.wait_until_empty()
    samples = await scrape(harness)
    assert samples["foreword_prompt_tokens_total",] == 5
    assert samples["foreword_prefix_cache_query_tokens_total",] == 0


async def test_the_port_is_free_again_after_the_end(harness: Harness) -> None:
    assert harness.server.metrics_server is not None
    address = harness.server.metrics_server.address
    with pytest.raises(ConfigError, match="metrics_listen_address"):
        MetricsServer(address, harness.server.frontend.metrics)
    await harness.server.metrics_server.stop()
    harness.server.metrics_server = MetricsServer(address, harness.server.frontend.metrics)
    assert (await scrape(harness))["foreword_engine_ready",] == 1


async def test_every_output_counts(harness: Harness) -> None:
    spec = {"sampling": {"output_count": 2}, "stopping": {"max_output_token_count": 2}}
    call = harness.generation.GenerateText(unary(**spec))
    first, second = await harness.engine.arrival(2)
    harness.engine.step({first: "ab"}, FinishReason.LENGTH)
    harness.engine.step({second: [*b"c", EOS]}, FinishReason.EOS)
    usage = (await call).finished.usage
    await harness.registry.wait_until_empty()
    samples = await scrape(harness)
    assert samples["foreword_output_tokens_total",] == usage.output_token_count
    assert samples["foreword_outputs_total", "LENGTH"] == samples["foreword_outputs_total", "EOS"] == 1
    assert samples["foreword_inter_token_latency_seconds_count",] == 1
    assert samples["foreword_prompt_tokens_total",] == usage.prompt_token_count
