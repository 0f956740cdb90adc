"""Scheduler one step ahead of the CUDA device: every step is begun before the result of the one before is looked at."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from simt.driver import CheckerDriver

from foreword.gpu.backends.cuda_backend import CudaBackend
from foreword.gpu.runner import ModelRunner
from foreword.gpu.speculative.drafter import Proposals
from foreword.gpu.speculative.speculator import Speculator
from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.request import Request
from foreword.scheduler.scheduler import Scheduler
from foreword.scheduler.step import DraftState, FinishReason, Int32Array, StepPlan, StepResult, StepUpdate
from tests.service.engine.test_speculation import ScriptedDrafter

VOCAB, NUM_ROWS, MAX_MODEL_LEN = 131, 8, 256


@dataclass
class Output:
    """What a sequence gave: tokens, their log probabilities and the most probable tokens beside them."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[int] = field(default_factory=list)
    reason: FinishReason = FinishReason.NONE


class Run:
    """Generates until all is done, as the engine does: a step is begun ahead unless drafts came with the last result.

    Attributes:
        outputs: by request.
        num_unknown: tokens that a step took from the one before on the device.
        num_accepted: drafts.
        num_preemptions: of all sequences.
    """

    def __init__(self, runner: ModelRunner, lookahead: int, num_blocks: int = 64, budget: int = 40) -> None:
        self.runner = runner
        self.scheduler = Scheduler(
            SchedulerConfig(num_blocks, 16, NUM_ROWS, budget, MAX_MODEL_LEN, lookahead=lookahead)
        )
        self.open: deque[tuple[StepPlan, Callable[[], StepResult] | None]] = deque()
        self.outputs: dict[int, Output] = {}
        self.want_top: set[int] = set()
        self.has_drafts = False
        self.num_unknown = self.num_accepted = self.num_preemptions = 0

    def generate(self, requests: Sequence[Request], cancel: int | None = None) -> dict[int, Output]:
        self.want_top = {request.request_key for request in requests if request.num_top_logprobs}
        for request in requests:
            self.scheduler.add(request, 0)
        while self.scheduler.has_work or self.open:
            while self.scheduler.has_work and self.scheduler.can_schedule and not (self.open and self.has_drafts):
                self.launch()
            if cancel is not None and len(self.outputs.get(cancel, Output()).tokens) > 2:
                self.scheduler.cancel(cancel)
            self.finish()
        return self.outputs

    def launch(self) -> None:
        plan = self.scheduler.schedule(0)
        self.num_unknown += int((plan.token_ids < 0).sum())
        self.num_preemptions += plan.num_preempted
        self.open.append((plan, self.runner.launch(plan) if plan.num_sequences else None))

    def finish(self) -> None:
        _, finish = self.open.popleft()
        result = finish() if finish else None
        self.has_drafts = result is not None and result.drafts is not None
        update = self.scheduler.apply(result)
        self.scheduler.check_invariants()
        self.collect(result, update)

    def collect(self, result: StepResult | None, update: StepUpdate) -> None:
        start = 0
        for record in update.sequences:
            output, end = (
                self.outputs.setdefault(int(record["request_key"]), Output()),
                start + int(record["num_tokens"]),
            )
            output.tokens += update.token_ids[start:end].tolist()
            output.logprobs += update.logprobs[start:end].tolist()
            output.reason = FinishReason(int(record["finish_reason"]))
            self.num_accepted += int(record["num_accepted"])
            if result and result.scores and int(record["request_key"]) in self.want_top:
                output.top_ids += result.scores.take(update.result_indices[start:end]).top_token_ids.tolist()
            start = end


def out_of_memory(*arguments: Any, **keywords: Any) -> None:
    raise torch.OutOfMemoryError("tried to allocate 3 GiB")


@pytest.fixture
def requests(new_request: Callable[..., Request]) -> list[Request]:
    """Prompts that repeat themselves, greedy and random, with and without what they may ask for beside tokens."""
    wanted: list[dict[str, Any]] = [
        {"want_logprob": True},
        {"num_top_logprobs": 2},
        {"stop_token_ids": tuple(range(0, VOCAB, 9))},
        {"min_output_tokens": 6, "eos_token_ids": tuple(range(0, VOCAB, 3))},
        {"want_ranks": True, "banned_token_ids": (1, 2, 3)},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    ]
    requests = []
    for key, fields in enumerate(wanted):
        prompt = np.tile(np.random.default_rng(key).integers(0, VOCAB, 5 + 4 * key), 2)
        fields["want_logprobs"] = fields.pop("want_logprob", False)
        sampling = {"temperature": (0.0, 0.8)[key % 2], "top_p": (1.0, 0.9)[key // 2 % 2], "seed": key}
        requests.append(new_request(prompt, key=key, max_output_tokens=26, **sampling, **fields))
    return requests


class SometimesDrafter(ScriptedDrafter):
    """Proposes in two steps of five, and sees nothing but tokens."""

    num_calls = 0

    def observe(
        self, rows: Int32Array, positions: Int32Array, token_ids: Int32Array, starts: Int32Array, ends: Int32Array
    ) -> None:
        assert (token_ids >= 0).all()
        super().observe(rows, positions, token_ids, starts, ends)

    def propose(self, rows: Int32Array, limits: Int32Array) -> Proposals:
        self.num_calls += 1
        return super().propose(rows, limits if self.num_calls % 5 < 2 else np.zeros_like(limits))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_tokens_as_one_step_after_the_other(
    new_runner: Callable[..., ModelRunner], requests: list[Request], checker: CheckerDriver, dtype: str
) -> None:
    """Prompts in chunks, log probabilities, end tokens, a pool too small for all: bit for bit, alone and together."""
    runner = new_runner(dtype, CudaBackend(dtype, checker, device="cpu"))
    alone = {key: output for request in requests for key, output in Run(runner, 0).generate([request]).items()}
    assert {output.reason for output in alone.values()} >= {FinishReason.LENGTH, FinishReason.EOS}
    ahead = Run(runner, 1, num_blocks=5)
    assert ahead.generate(requests) == alone
    assert ahead.num_unknown > 20
    assert ahead.num_preemptions > 0


def test_drafts_and_steps_ahead_together(
    new_runner: Callable[..., ModelRunner], requests: list[Request], checker: CheckerDriver
) -> None:
    runner = new_runner("float32", CudaBackend("float32", checker, device="cpu"))
    expected = Run(runner, 0).generate(requests)
    scripts = {key: [*requests[key].prompt_token_ids.tolist(), *output.tokens] for key, output in expected.items()}
    scripts[1][-5] += 1
    drafter = SometimesDrafter(scripts, num_drafts=2)
    runner.speculator = Speculator(drafter, None, max_num_sequences=NUM_ROWS, max_draft_tokens=2, vocab_size=VOCAB)
    ahead = Run(runner, 1)
    assert ahead.generate(requests) == expected
    assert runner.speculator.state is DraftState.ACTIVE  # it would be DRAFTER_FAILED
    assert ahead.num_unknown > 10
    assert ahead.num_accepted > 2


def test_a_cancel_while_a_step_is_under_way_changes_nobody_else(
    new_runner: Callable[..., ModelRunner], requests: list[Request], checker: CheckerDriver
) -> None:
    runner = new_runner("float32", CudaBackend("float32", checker, device="cpu"))
    expected = Run(runner, 0).generate(requests)
    outputs = Run(runner, 1).generate(requests, cancel=0)
    assert outputs[0].reason is FinishReason.CANCELLED
    assert outputs[0].tokens == expected[0].tokens[: len(outputs[0].tokens)]
    assert {key: outputs[key] for key in range(1, 6)} == {key: expected[key] for key in range(1, 6)}


def test_memory_that_ends_under_way_leaves_the_step_before_its_result(
    new_runner: Callable[..., ModelRunner],
    plan_writer: Callable[..., Any],
    new_request: Callable[..., Request],
    checker: CheckerDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = new_runner("float32", CudaBackend("float32", checker, device="cpu"))
    writer, request = plan_writer(), new_request([5, 6, 7], temperature=0.0)
    plan = writer.plan([(3, [5, 6, 7], 1)], [(3, request)])
    expected = runner.execute(plan).token_ids.tolist()
    under_way = runner.launch(plan)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "where", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            runner.launch(writer.plan([(3, [-1], 1)]))
    assert under_way().token_ids.tolist() == expected


def test_what_a_step_wanted_is_read_when_it_is_begun(
    new_runner: Callable[..., ModelRunner],
    plan_writer: Callable[..., Any],
    new_request: Callable[..., Request],
    checker: CheckerDriver,
) -> None:
    """Results are waited for after the next step was begun, whose uploads and downloads must not touch them."""
    runner = new_runner("float32", CudaBackend("float32", checker, device="cpu"))
    writer, request = plan_writer(), new_request([5, 6, 7], temperature=0.0, num_top_logprobs=2)
    first = runner.launch(writer.plan([(3, [5, 6, 7], 1)], [(3, request)]))
    second = runner.launch(writer.plan([(3, [-1], 1)]))
    results = [first(), runner.launch(writer.plan([(3, [-1], 1)])), second()]
    tokens = [results[0], results[2], results[1]()]
    again = plan_writer()
    one_by_one = [runner.execute(again.plan([(3, [5, 6, 7], 1)], [(3, request)]))]
    for _ in range(2):
        one_by_one.append(runner.execute(again.plan([(3, one_by_one[-1].token_ids.tolist(), 1)])))
    for got, want in zip(tokens, one_by_one, strict=True):
        assert got.token_ids.tolist() == want.token_ids.tolist()
        assert got.scores is not None
        assert want.scores is not None
        assert got.scores.top_token_ids.tolist() == want.scores.top_token_ids.tolist()
        assert got.scores.top_logprobs.tolist() == want.scores.top_logprobs.tolist()
