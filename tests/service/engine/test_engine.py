from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from engine_fakes import POISON, VOCAB_SIZE, FakeRunner, RecordingSink, expected_tokens, make_engine, make_request

from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.errors import ContextLengthExceeded, DuplicateRequest, InvalidField, QueueFull
from foreword.scheduler.request import Request, StoppingParams
from foreword.scheduler.scheduler import Scheduler
from foreword.scheduler.step import Drafts, DraftState, FinishReason, StepForecast, StepPlan, StepResult
from foreword.service.engine.config import EngineConfig
from foreword.service.engine.engine import Engine, StepFault


def build(**settings: int) -> Engine:
    return make_engine(EngineConfig("fake", **settings), FakeRunner())  # type: ignore[arg-type]


def run(engine: Engine, sinks: dict[int, RecordingSink]) -> None:
    """Step until there is nothing to do."""
    while (report := engine.step()) is not None:
        begin = 0
        for update in report.sequences:
            end = begin + int(update["num_tokens"])
            sinks[int(update["request_key"])].on_step(
                report.header, update, report.token_ids[begin:end], report.logprobs[begin:end]
            )
            begin = end


def test_a_request_becomes_tokens() -> None:
    engine, sink = build(), RecordingSink()
    engine.submit(make_request(7, num_prompt_tokens=4, max_output_tokens=8))
    assert engine.has_work
    run(engine, {7: sink})
    assert sink.token_ids == expected_tokens(4, 8)
    assert sink.finish_reason is FinishReason.LENGTH
    assert not engine.has_work


def test_an_idle_engine_has_nothing_to_report() -> None:
    engine = build()
    assert not engine.has_work
    assert engine.step() is None
    assert engine.next_deadline_ns == 0


def test_a_step_report_tells_what_the_step_was() -> None:
    engine = build()
    engine.submit(make_request(1, num_prompt_tokens=5))
    engine.submit(make_request(2, num_prompt_tokens=3))
    before = time.monotonic_ns()
    report = engine.step()
    after = time.monotonic_ns()
    assert report is not None
    assert before <= report.header.start_ns <= report.header.end_ns <= after
    assert (report.header.num_sequences, report.header.num_tokens) == (2, 8)
    assert (report.header.load.num_running, report.header.load.num_waiting) == (2, 0)


class DraftingRunner(FakeRunner):
    """Proposes three drafts for every sequence, of which two come true."""

    def execute(self, plan: StepPlan) -> StepResult:
        num_drafted = np.maximum(np.diff(plan.logits_offsets) - 1, 0)
        counts = 1 + np.minimum(num_drafted, 2)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return StepResult(
            step_id=plan.step_id,
            token_offsets=offsets,
            token_ids=np.full(offsets[-1], 5, np.int32),
            logprobs=np.zeros(offsets[-1], np.float32),
            failed=np.zeros(plan.num_sequences, np.bool_),
            drafts=Drafts(
                (3 * np.arange(plan.num_sequences + 1)).astype(np.int32), np.full(3 * len(counts), 5, np.int32)
            ),
            draft_state=DraftState.ACTIVE,
            forecast=StepForecast(7, 9),
        )


def test_a_step_report_tells_how_drafts_fared_at_each_place() -> None:
    engine = make_engine(EngineConfig("fake"), DraftingRunner())
    engine.submit(make_request(1, num_prompt_tokens=5, max_output_tokens=20))
    engine.submit(make_request(2, num_prompt_tokens=5, max_output_tokens=3))
    reports = [engine.step(), engine.step()]
    first, second = (report.header for report in reports if report is not None)
    assert (first.drafted, first.accepted, first.emitted) == ((), (), ())
    assert second.drafted == (2, 1, 1)  # the second sequence may have two tokens more, so one draft
    assert second.accepted == (2, 1)
    assert second.emitted == (2, 2, 1)
    assert (sum(second.drafted), sum(second.accepted)) == (second.num_drafted, second.num_accepted)
    assert second.forecast == StepForecast(7, 9)


def test_a_thousand_requests_all_end_as_they_should() -> None:
    engine = build(max_num_sequences=32)
    sinks = {key: RecordingSink() for key in range(1, 1001)}
    for key in sinks:
        engine.submit(make_request(key, num_prompt_tokens=1 + key % 40, max_output_tokens=1 + key % 7))
    run(engine, sinks)
    for key, sink in sinks.items():
        assert sink.token_ids == expected_tokens(1 + key % 40, 1 + key % 7)
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.num_free_blocks) == (0, 0, load.num_blocks)
    engine._scheduler.check_invariants()


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**31 - 1])
def test_token_ids_outside_the_vocabulary_are_refused(token_id: int) -> None:
    engine = build()
    good, bad = np.array([0, VOCAB_SIZE - 1], np.int32), np.array([1, token_id], np.int32)
    for field, request in {
        "prompt_token_ids": Request(1, bad, StoppingParams(1)),
        "stopping.eos_token_ids": Request(1, good, StoppingParams(1, eos_token_ids=(token_id,))),
        "stopping.stop_token_ids": Request(1, good, StoppingParams(1, stop_token_ids=(token_id,))),
    }.items():
        with pytest.raises(InvalidField) as refusal:
            engine.submit(request)
        assert refusal.value.field == field
    engine.submit(Request(1, good, StoppingParams(1)))


def test_refusals_are_domain_errors() -> None:
    engine = build(max_num_waiting=1)
    with pytest.raises(InvalidField, match="prompt_token_ids"):
        engine.submit(make_request(1, num_prompt_tokens=0))
    with pytest.raises(ContextLengthExceeded):
        engine.submit(make_request(1, max_output_tokens=2048))
    engine.submit(make_request(1))
    with pytest.raises(DuplicateRequest):
        engine.submit(make_request(1))
    with pytest.raises(QueueFull):
        engine.submit(make_request(2))


def test_a_cancelled_request_ends_with_a_last_update() -> None:
    engine, sink = build(), RecordingSink()
    engine.submit(make_request(1))
    engine.step()
    assert engine.cancel(1)
    run(engine, {1: sink})
    assert sink.finish_reason is FinishReason.CANCELLED
    assert sink.token_ids == []
    assert not engine.cancel(1)


def test_a_paused_sequence_rests_until_it_is_resumed() -> None:
    engine, sink = build(), RecordingSink()
    engine.submit(make_request(1))
    assert engine.pause(1)
    run(engine, {1: sink})
    assert not sink.ended
    assert engine.resume(1)
    run(engine, {1: sink})
    assert sink.token_ids == expected_tokens(4, 8)


def test_a_device_fault_names_the_sequences_of_the_step() -> None:
    engine = build(max_num_sequences=2)
    engine.submit(make_request(1))
    engine.step()
    engine.submit(Request(2, np.array([POISON], np.int32), StoppingParams(1)))
    engine.submit(make_request(3))
    with pytest.raises(StepFault) as fault:
        engine.step()
    assert sorted(fault.value.request_keys) == [1, 2]
    assert fault.value.step_id == 2
    assert isinstance(fault.value.__cause__, RuntimeError)
    assert "poison" not in str(fault.value)


def test_the_header_counts_what_the_step_did() -> None:
    engine = build(max_num_sequences=4, max_num_batched_tokens=8)
    engine.submit(make_request(1, num_prompt_tokens=6, max_output_tokens=3))
    engine.submit(make_request(2, num_prompt_tokens=6, max_output_tokens=2))
    headers = []
    while (report := engine.step()) is not None:
        headers.append(report.header)
    assert [header.num_sequences for header in headers] == [2, 2, 2]
    assert [header.num_tokens for header in headers] == [8, 5, 2]
    assert [header.num_prefill_sequences for header in headers] == [2, 1, 0]
    assert [header.num_prefill_tokens for header in headers] == [8, 4, 0]
    assert [header.num_output_tokens for header in headers] == [1, 2, 2]
    assert [header.num_finished for header in headers] == [0, 0, 2]
    for header in headers:
        assert 0 < header.schedule_duration_ns < header.end_ns - header.start_ns
        assert header.load.num_running + header.load.num_waiting == 2 - header.num_finished
    assert headers[-1].load.num_free_blocks == headers[-1].load.num_blocks


def test_the_header_counts_preemptions() -> None:
    engine = build(kv_cache_bytes=4, block_size=8, max_num_sequences=2, max_model_len=32)
    for key in (1, 2):
        engine.submit(make_request(key, num_prompt_tokens=8, max_output_tokens=20))
    headers = []
    while (report := engine.step()) is not None:
        headers.append(report.header)
    assert sum(header.num_preempted for header in headers) >= 1
    assert sum(header.num_output_tokens for header in headers) == 40
    recomputed = sum(header.num_prefill_tokens for header in headers) - 16
    assert recomputed > 0
    [step] = [index for index, header in enumerate(headers) if header.num_preempted][:1]
    assert headers[step].load.num_waiting == headers[step - 1].load.num_waiting + headers[step].num_preempted


class LateRunner(FakeRunner):
    """Computes a step when its result is asked for, and notes in which order it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.num_unknown = 0

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        self.calls.append(f"launch {plan.step_id}")
        self.num_unknown += int((plan.token_ids == -1).sum())

        def finish() -> StepResult:
            self.calls.append(f"finish {plan.step_id}")
            return self.execute(plan)

        return finish


def looking_ahead(runner: FakeRunner) -> Engine:
    info = make_engine(EngineConfig("fake"), FakeRunner()).info
    config = SchedulerConfig(num_blocks=8, max_num_sequences=4, max_num_batched_tokens=16, lookahead=1)
    return Engine(Scheduler(config), runner, info)


def test_the_next_step_is_begun_before_a_result_is_waited_for() -> None:
    runner = LateRunner()
    engine, sinks = looking_ahead(runner), {1: RecordingSink(), 2: RecordingSink()}
    engine.submit(make_request(1, num_prompt_tokens=20, max_output_tokens=3))
    engine.submit(make_request(2, num_prompt_tokens=3, max_output_tokens=6))
    run(engine, sinks)
    assert sinks[1].token_ids == expected_tokens(20, 3)
    assert sinks[2].token_ids == expected_tokens(3, 6)
    assert runner.calls[:5] == ["launch 1", "launch 2", "finish 1", "launch 3", "finish 2"]
    assert runner.num_unknown > 4
    assert not engine.has_work
    assert engine.step() is None
    load = engine.load()
    assert (load.num_running, load.num_free_blocks) == (0, load.num_blocks)


def test_sequences_that_wait_for_each_result_are_stepped_without_a_pause() -> None:
    engine, sink = looking_ahead(LateRunner()), RecordingSink()
    engine.submit(make_request(1, max_output_tokens=9, grammar="x"))
    run(engine, {1: sink})
    assert sink.finish_reason is FinishReason.LENGTH
    assert engine.step() is None


def test_paused_sequences_do_not_keep_an_engine_that_looks_ahead_busy() -> None:
    engine, sink = looking_ahead(LateRunner()), RecordingSink()
    engine.submit(make_request(1, max_output_tokens=9))
    engine.step()
    engine.pause(1)
    run(engine, {1: sink})
    assert engine.step() is None
    assert not engine.has_work
    engine.resume(1)
    assert engine.has_work
    run(engine, {1: sink})
    assert sink.finish_reason is FinishReason.LENGTH


def test_a_fault_behind_a_step_ahead_names_its_own_sequences() -> None:
    engine = looking_ahead(LateRunner())
    engine.submit(Request(1, np.array([POISON], np.int32), StoppingParams(4)))
    engine.submit(make_request(2))
    with pytest.raises(StepFault) as fault:
        engine.step()
    assert (fault.value.step_id, fault.value.request_keys) == (1, [1, 2])


class PromisingRunner(LateRunner):
    """Brings drafts, of which there are none, with the results of some steps."""

    def __init__(self, *step_ids: int) -> None:
        super().__init__()
        self.step_ids = step_ids

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        drafts = Drafts(np.zeros(plan.num_sequences + 1, np.int32), np.zeros(0, np.int32))
        return replace(result, drafts=drafts if plan.step_id in self.step_ids else None)


def test_a_plan_waits_for_the_drafts_of_a_device_that_proposes() -> None:
    runner, sink = PromisingRunner(2, 3), RecordingSink()
    engine = looking_ahead(runner)
    engine.submit(make_request(1, num_prompt_tokens=3, max_output_tokens=9))
    run(engine, {1: sink})
    assert sink.token_ids == expected_tokens(3, 9)
    assert runner.calls[:5] == ["launch 1", "launch 2", "finish 1", "launch 3", "finish 2"]
    assert runner.calls[5:10] == ["finish 3", "launch 4", "finish 4", "launch 5", "launch 6"]


def test_lookahead_needs_a_device_that_works_asynchronously() -> None:
    with pytest.raises(ValueError, match="launch"):
        looking_ahead(FakeRunner())
