"""Plans made ahead of results: a device that computes late gives the same tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.errors import ForewordError
from foreword.scheduler.request import Request, SamplingParams, StoppingParams
from foreword.scheduler.scheduler import Scheduler
from foreword.scheduler.step import Drafts, FinishReason, StepPlan, StepResult, StepUpdate

EOS = 0
UNKNOWN_TOKEN = -1


def draw(context: list[int], key: int) -> int:
    """The token after a context: for this model it depends on all of it. One in 24 ends the sequence."""
    return crc32(np.array([key, *context], np.int32).tobytes()) % 24


def expected_output(request: Request) -> list[int]:
    """What a request gives by itself."""
    tokens = request.prompt_token_ids.tolist()
    for _ in range(request.stopping.max_output_tokens):
        tokens.append(draw(tokens, request.request_key))
        if tokens[-1] == EOS:
            break
    return tokens[len(request.prompt_token_ids) :]


class MemoryDevice:
    """Keeps tokens where a real one keeps keys and values, and draws from what it reads there.

    A plan is executed when its result is asked for, after the next one may have been made: whatever that one changed
    too early shows as a wrong context.
    """

    def __init__(self, config: SchedulerConfig, random: Random, draft_rate: float) -> None:
        self.block_size = config.block_size
        self.block_table = np.full((config.max_num_sequences, config.max_blocks_per_sequence), -1)
        self.token_ids = np.zeros(config.num_blocks * config.block_size, np.int32)
        self.positions = np.full(config.num_blocks * config.block_size, -1)
        self.last_drawn = np.zeros(config.max_num_sequences, np.int32)
        self.requests: dict[int, Request] = {}
        self.random = random
        self.draft_rate = draft_rate
        self.num_unknown = 0
        self.num_drawn = 0

    def execute(self, plan: StepPlan) -> StepResult:
        for row, index, block in plan.block_table_updates.tolist():
            self.block_table[row, index] = block
        self.requests |= dict(plan.admitted)
        drawn, drafts = [], []
        for b, row in enumerate(plan.rows.tolist()):
            start, end = plan.query_offsets[b : b + 2].tolist()
            token_ids = plan.token_ids[start:end].copy()
            is_unknown = token_ids == UNKNOWN_TOKEN
            self.num_unknown += int(is_unknown.sum())
            assert not (is_unknown.any() and self.requests[row].needs_last_token)
            token_ids[is_unknown] = self.last_drawn[row]
            self.token_ids[plan.slot_mapping[start:end]] = token_ids
            self.positions[plan.slot_mapping[start:end]] = plan.positions[start:end]
            num_logits = int(plan.logits_offsets[b + 1] - plan.logits_offsets[b])
            drawn.append(self._draw(row, int(plan.context_lens[b]), num_logits))
            drafts.append(self._propose(row, int(plan.context_lens[b]), num_logits, drawn[-1]))
        token_ids = np.array([token for ids in drawn for token in ids], np.int32)
        return StepResult(
            step_id=plan.step_id,
            token_offsets=np.cumsum([0] + [len(ids) for ids in drawn]).astype(np.int32),
            token_ids=token_ids,
            logprobs=np.zeros(len(token_ids), np.float32),
            failed=np.zeros(plan.num_sequences, np.bool_),
            drafts=Drafts(
                np.cumsum([0] + [len(ids) for ids in drafts]).astype(np.int32),
                np.array([token for ids in drafts for token in ids], np.int32),
            ),
        )

    def _read(self, row: int, length: int) -> list[int]:
        positions = np.arange(length)
        slots = self.block_table[row, positions // self.block_size] * self.block_size + positions % self.block_size
        np.testing.assert_array_equal(self.positions[slots], positions)
        return self.token_ids[slots].tolist()

    def _draw(self, row: int, length: int, num_logits: int) -> list[int]:
        """Check the drafts, which the context ends with: those that are as drawn, and the token after them."""
        context, drawn = self._read(row, length), []
        for end in range(length - num_logits + 1, length + 1):
            drawn.append(draw(context[:end], self.requests[row].request_key))
            self.num_drawn += 1
            self.last_drawn[row] = drawn[-1]
            if end < length and context[end] != drawn[-1]:
                break
        return drawn

    def _propose(self, row: int, length: int, num_logits: int, drawn: list[int]) -> list[int]:
        if not drawn or self.random.random() >= self.draft_rate:
            return []
        context = self._read(row, length)[: length - num_logits + 1] + drawn
        drafts: list[int] = []
        for _ in range(self.random.randint(1, 4)):
            is_right = self.random.random() < 0.8
            drafts.append(draw(context + drafts, self.requests[row].request_key) if is_right else 1)
        return drafts


class Run:
    """A scheduler with lookahead, a device that is one plan behind, and what each sequence has given."""

    def __init__(self, config: SchedulerConfig, random: Random, draft_rate: float = 0.0) -> None:
        self.scheduler = Scheduler(config)
        self.device = MemoryDevice(config, random, draft_rate)
        self.plans: deque[StepPlan] = deque()
        self.expected: dict[int, list[int]] = {}
        self.outputs: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.num_ahead = 0
        self.num_preemptions = 0

    def add(self, request: Request, now_ns: int = 0) -> bool:
        try:
            self.scheduler.add(request, now_ns)
        except ForewordError:
            return False
        for index, key in enumerate(request.output_keys):
            self.expected[key] = expected_output(request.output(index))
            self.outputs[key] = []
        return True

    def schedule(self, now_ns: int = 0) -> None:
        self.num_ahead += len(self.plans)
        self.plans.append(self.scheduler.schedule(now_ns))
        self.scheduler.check_invariants()

    def apply(self) -> None:
        plan = self.plans.popleft()
        update = self.scheduler.apply(self.device.execute(plan) if plan.num_sequences else None)
        self.scheduler.check_invariants()
        self.follow(update)

    def follow(self, update: StepUpdate) -> None:
        start = 0
        for record in update.sequences:
            key, end = int(record["request_key"]), start + int(record["num_tokens"])
            assert key not in self.reasons, "nothing follows an end"
            self.outputs[key] += update.token_ids[start:end].tolist()
            start = end
            if record["finish_reason"]:
                self.reasons[key] = FinishReason(int(record["finish_reason"]))
                self.num_preemptions += int(record["num_preemptions"])

    def drain(self) -> None:
        """One plan ahead wherever it is allowed, until all is done."""
        for key in self.outputs:
            self.scheduler.resume(key)
        while self.scheduler.has_work or self.plans:
            while self.scheduler.has_work and self.scheduler.can_schedule:
                self.schedule()
            self.apply()

    def check(self) -> None:
        for key, output in self.outputs.items():
            if self.reasons[key] in (FinishReason.CANCELLED, FinishReason.DEADLINE):
                assert output == self.expected[key][: len(output)]
            else:
                assert output == self.expected[key]
        load = self.scheduler.load()
        assert load.num_free_blocks == load.num_blocks
        assert (load.num_running, load.num_waiting, load.num_paused) == (0, 0, 0)


def request(key: int, num_prompt: int, max_output: int, **fields: object) -> Request:
    prompt = (np.arange(num_prompt) % 5 + 1).astype(np.int32)
    stopping = StoppingParams(max_output, eos_token_ids=(EOS,))
    return Request(key, prompt, stopping, **fields)  # type: ignore[arg-type]


def config(**limits: int) -> SchedulerConfig:
    small = {"num_blocks": 64, "block_size": 4, "max_num_sequences": 8, "max_num_batched_tokens": 16}
    return SchedulerConfig(**small | {"max_model_len": 64, "lookahead": 1} | limits)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(150))
def test_a_late_device_gives_the_same_tokens(seed: int) -> None:
    """Chunked prompts, shared prefixes, preemption, cancels, pauses, deadlines, outputs and drafts, in random order."""
    random = Random(seed)
    max_num_sequences = random.randint(1, 8)
    limits = config(
        num_blocks=random.randint(16, 40),
        block_size=random.randint(1, 5),
        max_num_sequences=max_num_sequences,
        max_num_batched_tokens=max_num_sequences + random.choice([0, 4, 20]),
        max_model_len=random.choice([30, 60]),
    )
    run = Run(limits, random, random.choice([0.0, 0.0, 0.5]))
    next_key = now_ns = 0
    pause_rate = random.choice([0.0, 0.1])
    for _ in range(120):
        now_ns += random.randint(0, 2)
        while random.random() < 0.3:
            fields: dict[str, object] = {"num_outputs": random.choice([1, 1, 3]), "priority": random.choice([0, 0, 1])}
            fields["deadline_ns"] = random.choice([0, 0, 0, now_ns + random.randint(1, 60)])
            fields["bypass_prefix_cache"] = random.random() < 0.2
            fields["grammar"] = random.choice(["", "", "x"])
            run.add(request(next_key, random.randint(1, 25), random.randint(1, 20), **fields), now_ns)
            next_key += 3
        for key in list(run.outputs):
            if random.random() < 0.01:
                run.scheduler.cancel(key)
            if random.random() < pause_rate:
                random.choice([run.scheduler.pause, run.scheduler.resume])(key)
        if run.scheduler.can_schedule and (not run.plans or random.random() < 0.7):
            run.schedule(now_ns)
        else:
            run.apply()
    run.drain()
    run.check()


def test_the_walks_look_ahead_and_preempt() -> None:
    """What the test above relies on, at a pool that is too small for all."""
    run = Run(config(num_blocks=10), Random(0))
    for key in range(6):
        run.add(request(key, 5, 20))
    run.drain()
    run.check()
    assert run.device.num_unknown > 30
    assert run.num_ahead > 20
    assert run.num_preemptions > 0


def test_an_end_that_is_noticed_late_wastes_one_token() -> None:
    run = Run(config(), Random(0))
    for key in range(8):
        run.add(request(key, 3, 40))
    run.drain()
    run.check()
    num_ended_by_token = sum(reason is FinishReason.EOS for reason in run.reasons.values())
    assert num_ended_by_token > 4
    assert run.device.num_drawn == sum(map(len, run.outputs.values())) + num_ended_by_token


def test_a_plan_made_ahead_continues_behind_a_token_that_is_not_known_yet() -> None:
    scheduler = Scheduler(config())
    device = MemoryDevice(scheduler.config, Random(0), 0.0)
    scheduler.add(request(0, 20, 3), 0)
    first = scheduler.schedule(0)
    assert scheduler.can_schedule
    second = scheduler.schedule(0)
    assert not scheduler.can_schedule
    with pytest.raises(RuntimeError):
        scheduler.schedule(0)
    assert (first.positions.tolist(), second.positions.tolist()) == (list(range(16)), list(range(16, 20)))
    assert (len(first.logits_indices), len(second.logits_indices)) == (0, 1)
    result = device.execute(first)
    with pytest.raises(ValueError, match=r"result\.step_id must be 1, got 2"):
        scheduler.apply(replace(result, step_id=2))
    scheduler.apply(result)
    third = scheduler.schedule(0)
    assert (third.positions.tolist(), third.token_ids.tolist()) == ([20], [UNKNOWN_TOKEN])
    scheduler.apply(device.execute(second))
    fourth = scheduler.schedule(0)
    assert (fourth.positions.tolist(), fourth.token_ids.tolist()) == ([21], [UNKNOWN_TOKEN])
    scheduler.apply(device.execute(third))
    assert scheduler.schedule(0).num_sequences == 0, "its last token is on the way"


def test_a_cancelled_sequence_keeps_its_blocks_while_a_plan_uses_them() -> None:
    run = Run(config(), Random(0))
    run.add(request(1, 5, 9))
    run.schedule()
    run.schedule()
    assert run.scheduler.cancel(1)
    run.apply()
    assert run.reasons == {1: FinishReason.CANCELLED}
    assert run.scheduler.load().num_running == 1
    run.apply()
    assert run.scheduler.load().num_running == 0
    run.check()


def test_nothing_is_preempted_while_a_plan_is_open() -> None:
    run = Run(config(num_blocks=3, max_num_batched_tokens=8), Random(0))
    run.add(request(1, 3, 9))
    run.add(request(2, 3, 9))
    while run.num_preemptions == 0 and run.scheduler.has_work:
        num_running = run.scheduler.load().num_running
        while run.scheduler.has_work and run.scheduler.can_schedule:
            run.schedule()
            assert len(run.plans) == 1 or run.scheduler.load().num_running >= num_running
        run.apply()
    run.drain()
    run.check()


def test_drafts_stop_the_lookahead_of_their_sequence_alone() -> None:
    run = Run(config(), Random(0), draft_rate=1.0)
    run.add(request(1, 3, 9))
    run.schedule()
    run.apply()  # its drafts are known before the next plan
    run.schedule()
    run.add(request(2, 3, 9))
    run.schedule()
    verified, ahead = run.plans
    assert len(verified.logits_indices) > 1
    assert ahead.num_sequences == 1
    assert ahead.positions.tolist() == [0, 1, 2]
    run.drain()
    run.check()


@pytest.mark.parametrize(
    "fields",
    [
        {"grammar": "root ::= [a-z]"},
        {"sampling": SamplingParams(repetition_penalty=1.1)},
        {"sampling": SamplingParams(frequency_penalty=-0.5)},
        {"sampling": SamplingParams(presence_penalty=0.5)},
    ],
)
def test_what_draws_by_its_last_token_waits_for_it(fields: dict[str, Any]) -> None:
    run = Run(config(), Random(0))
    run.add(request(1, 40, 9, **fields))
    run.drain()
    run.check()
    assert run.device.num_unknown == 0
    assert run.num_ahead > 2, "prompt chunks before the last draw nothing"


def test_lookahead_goes_on_beside_what_waits_for_its_token() -> None:
    run = Run(config(), Random(0))
    run.add(request(1, 3, 9, grammar="x"))
    run.add(request(2, 3, 9))
    run.schedule()
    run.schedule()
    assert run.plans[1].num_sequences == 1
    assert run.plans[1].token_ids.tolist() == [UNKNOWN_TOKEN]
    run.drain()
    run.check()


def test_lookahead_is_0_or_1() -> None:
    with pytest.raises(ValueError, match="lookahead must be 0 or 1, got 2"):
        config(lookahead=2)


def test_without_lookahead_a_plan_waits_for_the_result(new_scheduler: Callable[..., Scheduler]) -> None:
    scheduler = new_scheduler(num_blocks=4)
    assert scheduler.can_schedule
    scheduler.schedule(0)
    assert not scheduler.can_schedule
    scheduler.apply(None)
    assert scheduler.can_schedule
