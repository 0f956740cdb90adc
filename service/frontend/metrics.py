"""What Prometheus reads: sums over steps, generations and errors, and the engine's gauges.

Steps and generations are counted as a whole, never token by token; the samples are made when somebody asks for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from threading import Lock

import grpc
import numpy as np
import numpy.typing as npt
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from foreword.service.engine.client import EngineClient
from foreword.service.engine.messages import StepHeader
from foreword.service.frontend.generation import Generation
from foreword.service.frontend.registry import GenerationRegistry
from foreword.service.frontend.timeline import Timeline

_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_WAIT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_POWERS_OF_TWO = tuple(float(1 << exponent) for exponent in range(15))


class Distribution:
    """How many values lie up to each of a few bounds, and the sum of all."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_all(self, values: npt.NDArray[np.float64]) -> None:
        """Count `[N]` values."""
        slots = np.searchsorted(self._bounds, values)
        for slot, count in enumerate(np.bincount(slots, minlength=len(self._counts)).tolist()):
            self._counts[slot] += count
        self._sum += float(values.sum())

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        """The distribution as a histogram."""
        names = (*map(str, self._bounds), "+Inf")
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._sum)


class Metrics(Collector):
    """Counts on the event loop's thread, is read on any. Labels take few values, and none comes from a caller."""

    def __init__(self, engine: EngineClient, registry: GenerationRegistry) -> None:
        self._engine = engine
        self._registry = registry
        self._lock = Lock()
        self._totals: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._errors: Counter[tuple[str, str]] = Counter()
        self._drafted: Counter[tuple[str, int]] = Counter()
        self._accepted: Counter[tuple[str, int]] = Counter()
        self._verifications: Counter[str] = Counter()
        self._step_duration = Distribution(_STEP_S)
        self._step_tokens = Distribution(_POWERS_OF_TWO)
        self._step_sequences = Distribution(_POWERS_OF_TWO)
        self._queue_duration = Distribution(_WAIT_S)
        self._first_token = Distribution(_WAIT_S)
        self._gaps = Distribution(_GAP_S)
        self._duration = Distribution(_WHOLE_S)

    def count_step(self, header: StepHeader) -> None:
        """Count a step of the engine."""
        with self._lock:
            self._step_duration.add((header.end_ns - header.start_ns) / 1e9)
            self._step_tokens.add(header.num_tokens)
            self._step_sequences.add(header.num_sequences)
            totals = self._totals
            totals["prefill tokens"] += header.num_prefill_tokens
            totals["decode tokens"] += header.num_tokens - header.num_prefill_tokens
            totals["preemptions"] += header.num_preempted
            totals["schedule ns"] += header.schedule_duration_ns
            totals["draft ns"] += header.draft_duration_ns
            totals["model ns"] += header.model_duration_ns
            if header.forecast.undrafted_duration_ns:
                totals["actual ns"] += header.draft_duration_ns + header.model_duration_ns
                totals["predicted ns"] += header.draft_duration_ns + header.forecast.model_duration_ns
                totals["undrafted ns"] += header.forecast.undrafted_duration_ns

    def count_generation(self, generation: Generation, now_ns: int) -> None:
        """Count a generation that has ended."""
        with self._lock:
            for outcome in generation.outcomes:
                self._outcomes[outcome] += 1
            self._count_tokens(generation)
            self._count_drafts(generation)
            self._count_times(generation.timeline, now_ns)

    def count_error(self, method: str, code: grpc.StatusCode) -> None:
        """Count a call, or a command of a stream, that was answered with an error."""
        with self._lock:
            self._errors[method.removeprefix("/"), code.name] += 1

    def collect(self) -> Iterator[Metric]:
        """All metrics, as of one moment between two steps."""
        with self._lock:
            families = [*self._gauges(), *self._step_families(), *self._generation_families()]
        yield from families

    def _count_tokens(self, generation: Generation) -> None:
        counts = generation.counts
        self._totals["output tokens"] += counts.num_output
        if generation.timeline.schedule_ns is None:
            return
        self._totals["prompt tokens"] += counts.num_prompt
        if not generation.settings.bypass_prefix_cache:
            self._totals["prefix cache query tokens"] += counts.num_prompt
            self._totals["prefix cache hit tokens"] += counts.num_cached

    def _count_drafts(self, generation: Generation) -> None:
        for (drafter, num_drafted, num_accepted), count in generation.counts.verifications.items():
            name = generation.settings.draft_sources[drafter]
            self._verifications[name] += count
            for position in range(num_drafted):
                self._drafted[name, position] += count
            for position in range(num_accepted):
                self._accepted[name, position] += count

    def _count_times(self, timeline: Timeline, now_ns: int) -> None:
        if timeline.tokenize_ns is not None and timeline.schedule_ns is not None:
            self._queue_duration.add((timeline.schedule_ns - timeline.tokenize_ns) / 1e9)
        if timeline.first_token_ns is not None:
            self._first_token.add((timeline.first_token_ns - timeline.receive_ns) / 1e9)
        for delivery in timeline.deliveries:
            self._gaps.add_all(delivery.token_gaps_ns() / 1e9)
        self._duration.add((now_ns - timeline.receive_ns) / 1e9)

    def _gauges(self) -> Iterator[Metric]:
        load = self._engine.load
        for name, text, value in (
            ("engine_ready", "1 while an engine takes requests.", self._engine.ready),
            ("active_generations", "Generations under way.", len(self._registry)),
            ("running_sequences", "Sequences that take part in steps, paused ones included.", load.num_running),
            ("waiting_sequences", "Sequences that wait to take part.", load.num_waiting),
            ("waiting_tokens", "Prompt tokens of the waiting sequences.", load.num_waiting_tokens),
            ("paused_sequences", "Running sequences whose client does not read.", load.num_paused),
            ("kv_cache_blocks", "Blocks of the KV cache.", load.num_blocks),
            ("kv_cache_free_blocks", "Blocks that no sequence holds.", load.num_free_blocks),
            ("kv_cache_cached_blocks", "Blocks in the prefix cache, held or not.", load.num_cached_blocks),
        ):
            yield GaugeMetricFamily(f"foreword_{name}", text, value=value)

    def _step_families(self) -> Iterator[Metric]:
        yield self._step_duration.family("foreword_step_duration_seconds", "From scheduling to known tokens.")
        yield self._step_tokens.family("foreword_step_tokens", "Tokens computed in a step.")
        yield self._step_sequences.family("foreword_step_sequences", "Sequences in a step.")
        parts = CounterMetricFamily("foreword_step_seconds", "Time of steps by what it went into.", labels=["part"])
        for part in ("schedule", "draft", "model"):
            parts.add_metric([part], self._totals[f"{part} ns"] / 1e9)
        yield parts
        tokens = CounterMetricFamily("foreword_computed_tokens", "Tokens computed in steps.", labels=["kind"])
        for kind in ("prefill", "decode"):
            tokens.add_metric([kind], self._totals[f"{kind} tokens"])
        yield tokens
        text = "Sequences that lost their place in the KV cache to others."
        yield CounterMetricFamily("foreword_preemptions", text, value=self._totals["preemptions"])

    def _generation_families(self) -> Iterator[Metric]:
        """Sums over generations that have ended."""
        for name, text in (
            ("prompt_tokens", "Prompt tokens of generations that were scheduled."),
            ("output_tokens", "Tokens that were returned."),
            ("prefix_cache_query_tokens", "Prompt tokens that were looked up in the prefix cache."),
            ("prefix_cache_hit_tokens", "Of those, found."),
        ):
            yield CounterMetricFamily(f"foreword_{name}", text, value=self._totals[name.replace("_", " ")])
        outcomes = CounterMetricFamily("foreword_outputs", "Outputs by how they ended.", labels=["outcome"])
        for outcome, count in self._outcomes.items():
            outcomes.add_metric([outcome], count)
        yield outcomes
        text = "Calls and commands that were answered with an error."
        errors = CounterMetricFamily("foreword_errors", text, labels=["method", "code"])
        for labels, count in self._errors.items():
            errors.add_metric(labels, count)
        yield errors
        yield from self._draft_families()
        yield self._queue_duration.family("foreword_queue_duration_seconds", "From known tokens to the first step.")
        yield self._first_token.family("foreword_time_to_first_token_seconds", "From receipt to the first token sent.")
        yield self._gaps.family("foreword_inter_token_latency_seconds", "Between two tokens sent.")
        yield self._duration.family("foreword_generation_duration_seconds", "From receipt to the end.")

    def _draft_families(self) -> Iterator[Metric]:
        labels = ["drafter", "position"]
        for name, text, totals in (
            ("draft_tokens", "Draft tokens checked, by their place in the draft from 0.", self._drafted),
            ("accepted_draft_tokens", "Draft tokens kept, by their place in the draft from 0.", self._accepted),
        ):
            family = CounterMetricFamily(f"foreword_{name}", text, labels=labels)
            for (drafter, position), count in totals.items():
                family.add_metric([drafter, str(position)], count)
            yield family
        text = "Time of steps that checked drafts: actual, as predicted, and as predicted without drafts."
        times = CounterMetricFamily("foreword_draft_step_seconds", text, labels=["kind"])
        for kind in ("actual", "predicted", "undrafted"):
            times.add_metric([kind], self._totals[f"{kind} ns"] / 1e9)
        yield times
        text = "Checks of a draft; each brings the accepted tokens and one more."
        family = CounterMetricFamily("foreword_draft_verifications", text, labels=labels[:1])
        for drafter, count in self._verifications.items():
            family.add_metric([drafter], count)
        yield family
