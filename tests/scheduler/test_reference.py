"""Both schedulers do the same whatever is asked of them."""

from __future__ import annotations

from dataclasses import fields
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.errors import DuplicateRequest, ForewordError
from foreword.scheduler.reference import ReferenceScheduler
from foreword.scheduler.request import Request, StoppingParams
from foreword.scheduler.scheduler import Scheduler
from foreword.scheduler.step import Drafts, FinishReason, StepPlan, StepResult, StepUpdate

NUM_TOKEN_IDS = 6


def assert_equal(real: StepPlan | StepUpdate, reference: StepPlan | StepUpdate) -> None:
    for field in fields(real):
        a, b = getattr(real, field.name), getattr(reference, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, field.name
            np.testing.assert_array_equal(a, b, err_msg=field.name)
        else:
            assert a == b, field.name


def call(scheduler: Scheduler | ReferenceScheduler, method: str, *args: object) -> object:
    """The method's value, or the type of the error that it raised."""
    try:
        return getattr(scheduler, method)(*args)
    except (ForewordError, ValueError) as error:
        return type(error)


class Twins:
    """Both schedulers under the same calls; follows every token of every request.

    Prompts begin like those of a few families, so that prefixes are shared. Under a small `hash_mask` the real one's
    hashes collide; the reference has none.
    """

    def __init__(self, config: SchedulerConfig, hash_mask: int = (1 << 64) - 1) -> None:
        self.real, self.reference = Scheduler(config), ReferenceScheduler(config)
        self.real.prefix_cache.hash_mask = hash_mask
        self.now_ns = 100
        self.next_key = 0
        self.keys: list[int] = []
        self.streams: dict[int, list[int]] = {}
        self.scored: dict[int, list[int]] = {}
        self.plans: list[StepPlan] = []

    def call(self, method: str, *args: object) -> object:
        real = call(self.real, method, *args)
        assert real == call(self.reference, method, *args)
        self.check_state()
        return real

    def add(
        self,
        num_prompt: int,
        stopping: StoppingParams,
        priority: int,
        time_left: int | None,
        family: int,
        cache_salt: str,
        bypass_prefix_cache: bool,
        tenant: str,
        num_outputs: int,
        want_prompt_logprobs: bool,
        grammar: str,
    ) -> None:
        prompt = np.arange(num_prompt, dtype=np.int32) // (1 + family) % NUM_TOKEN_IDS
        deadline_ns = 0 if time_left is None else self.now_ns + time_left
        request = Request(
            self.next_key,
            prompt,
            stopping,
            priority=priority,
            deadline_ns=deadline_ns,
            cache_salt=cache_salt,
            bypass_prefix_cache=bypass_prefix_cache,
            tenant=tenant,
            num_outputs=num_outputs,
            want_prompt_logprobs=want_prompt_logprobs,
            grammar=grammar,
        )
        keys = range(self.next_key, self.next_key + num_outputs)
        if self.call("add", request, self.now_ns) is None:
            self.keys += keys
            self.streams |= {key: [] for key in keys}
            self.scored |= {key: [] for key in keys}
        self.next_key += num_outputs

    def schedule(self, passed: int) -> None:
        self.now_ns += passed
        plan = self.real.schedule(self.now_ns)
        self.plans.append(plan)
        assert_equal(plan, self.reference.schedule(self.now_ns))
        active = [self.reference.sequences[key] for key in self.keys]
        assert plan.num_sequences or len(self.plans) > 1 or all(not s.is_ready or s.finish_reason for s in active), (
            "nobody makes progress"
        )
        self.check_state()

    def apply(self, random: Random, num_token_ids: int = NUM_TOKEN_IDS) -> None:
        """Answer the plan with random tokens, drafts and, rarely, failures.

        Ids from NUM_TOKEN_IDS on never end a sequence.
        """
        plan = self.plans.pop(0)
        rows, failed, drafts = [], [], []
        for num_logits in np.diff(plan.logits_offsets).tolist():
            failed.append(random.random() < 0.02)
            num_tokens = 0 if failed[-1] or not num_logits else random.randint(1, num_logits)
            rows.append([random.randrange(num_token_ids) for _ in range(num_tokens)])
            num_drafts = random.choice([0, 0, random.randint(1, 5)]) if num_tokens else 0
            drafts.append([random.randrange(NUM_TOKEN_IDS) for _ in range(num_drafts)])
        token_ids = np.array([token for row in rows for token in row], np.int32)
        offsets = np.cumsum([0] + [len(row) for row in rows]).astype(np.int32)
        logprobs = token_ids.astype(np.float32) / 7
        draft_offsets = np.cumsum([0] + [len(row) for row in drafts]).astype(np.int32)
        draft_token_ids = np.array([token for row in drafts for token in row], np.int32)
        drafters = (plan.step_id + np.arange(len(drafts), dtype=np.int32)) % 3 if plan.step_id % 5 else None
        result = StepResult(
            plan.step_id,
            offsets,
            token_ids,
            logprobs,
            np.array(failed, np.bool_),
            drafts=Drafts(draft_offsets, draft_token_ids, drafters) if random.random() < 0.9 else None,
        )
        plan_scored = plan.scored_token_ids.copy()
        update = self.real.apply(result)
        assert_equal(update, self.reference.apply(result))
        self.follow(update)
        self.follow_scores(update, plan_scored)
        self.check_state()

    def follow(self, update: StepUpdate) -> None:
        """What was sent out is what the scheduler will feed back to the model."""
        start = 0
        for record in update.sequences:
            key = int(record["request_key"])
            end = start + int(record["num_tokens"])
            self.streams[key] += update.token_ids[start:end].tolist()
            start = end
            if record["finish_reason"] != FinishReason.NONE:
                self.keys.remove(key)
        assert start == len(update.token_ids) == len(update.logprobs)
        for key in self.keys:
            sequence = self.reference.sequences[key]
            assert sequence.tokens[sequence.num_prompt :] == self.streams[key]

    def follow_scores(self, update: StepUpdate, plan_scored: np.ndarray) -> None:
        """Every prompt token but the first is scored once, in order, before the sequence has a token."""
        scored = plan_scored[update.scored_indices].tolist()
        for record in update.sequences:
            key, num_scored = int(record["request_key"]), int(record["num_scored"])
            self.scored[key] += scored[:num_scored]
            del scored[:num_scored]
            sequence = self.reference.sequences.get(key)
            if sequence is not None:
                expected = sequence.tokens[1 : sequence.num_prompt] if sequence.request.want_prompt_logprobs else []
                assert self.scored[key] == expected[: len(self.scored[key])]
                assert len(self.scored[key]) == len(expected) or not self.streams[key]
        assert not scored

    def check_state(self) -> None:
        self.real.check_invariants()
        self.reference.check_invariants()
        assert self.real.load() == self.reference.load()
        assert self.real.has_work == self.reference.has_work
        assert self.real.can_schedule == self.reference.can_schedule
        assert self.real.next_deadline_ns == self.reference.next_deadline_ns

    def drain(self) -> None:
        """Run everything to its end: no request hangs, and every pool is full again."""
        for key in self.keys:
            self.call("resume", key)
        random = Random(0)
        while self.plans or self.real.has_work:
            while self.real.has_work and self.real.can_schedule:
                self.schedule(0)
            self.apply(random)
        assert not self.keys
        load = self.real.load()
        assert load.num_free_blocks == load.num_blocks
        assert (load.num_running, load.num_waiting, load.num_waiting_tokens, load.num_paused) == (0, 0, 0, 0)


class BothSchedulers(RuleBasedStateMachine):
    """Finds and shrinks the sequence of calls after which the two differ."""

    @initialize(
        num_blocks=st.integers(1, 14),
        block_size=st.integers(1, 5),
        max_num_sequences=st.integers(1, 5),
        extra_budget=st.integers(0, 12),
        max_model_len=st.integers(2, 40),
        max_num_waiting=st.integers(1, 8),
        max_num_waiting_tokens=st.integers(1, 80),
        priority_aging_ns=st.integers(1, 20),
        hash_mask=st.sampled_from([(1 << 64) - 1, 1, 0]),
        lookahead=st.integers(0, 1),
    )
    def build(self, extra_budget: int, hash_mask: int, **limits: int) -> None:
        budget = limits["max_num_sequences"] + extra_budget
        config = SchedulerConfig(max_num_batched_tokens=budget, tenant_weights=(("heavy", 5),), **limits)
        self.twins = Twins(config, hash_mask)

    @rule(
        num_prompt=st.integers(1, 30),
        max_output=st.integers(1, 12),
        min_output=st.integers(0, 4),
        eos=st.sampled_from([(), (0,), (0, 1)]),
        stop=st.sampled_from([(), (2,)]),
        priority=st.integers(-1, 1),
        time_left=st.one_of(st.none(), st.integers(-1, 6)),
        family=st.integers(0, 2),
        cache_salt=st.sampled_from(["", "", "a", "b"]),
        bypass_prefix_cache=st.sampled_from([False, False, False, True]),
        tenant=st.sampled_from(["", "heavy", "light"]),
        num_outputs=st.sampled_from([1, 1, 2, 3]),
        want_prompt_logprobs=st.booleans(),
        grammar=st.sampled_from(["", "", "x"]),
    )
    def add(
        self,
        num_prompt: int,
        max_output: int,
        min_output: int,
        eos: tuple[int, ...],
        stop: tuple[int, ...],
        **fields: Any,
    ) -> None:
        self.twins.add(num_prompt, StoppingParams(max_output, min_output, eos, stop), **fields)

    @precondition(lambda self: self.twins.keys)
    @rule(data=st.data(), method=st.sampled_from(["cancel", "pause", "resume"]))
    def touch(self, data: st.DataObject, method: str) -> None:
        self.twins.call(method, data.draw(st.sampled_from(self.twins.keys)))

    @precondition(lambda self: self.twins.keys)
    @rule(data=st.data())
    def add_again(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.twins.keys))
        request = Request(key, np.zeros(1, np.int32), StoppingParams(1))
        assert self.twins.call("add", request, self.twins.now_ns) is DuplicateRequest

    @precondition(lambda self: self.twins.real.can_schedule)
    @rule(passed=st.integers(-2, 3))
    def schedule(self, passed: int) -> None:
        self.twins.schedule(passed)

    @precondition(lambda self: self.twins.plans)
    @rule(random=st.randoms(use_true_random=False))
    def apply(self, random: Random) -> None:
        self.twins.apply(random)

    def teardown(self) -> None:
        if hasattr(self, "twins"):
            self.twins.drain()


BothSchedulers.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestBothSchedulers = BothSchedulers.TestCase


def random_request(
    random: Random, num_tenants: int
) -> tuple[int, StoppingParams, int, int | None, int, str, bool, str, int, bool, str]:
    num_prompt = random.choice([1, 2, 3, random.randint(1, 12), random.randint(1, 40)])
    eos = random.choice([(), (), (0,), (0, 1)])
    stop = random.choice([(), (), (2,)])
    stopping = StoppingParams(random.randint(1, 20), random.choice([0, 0, 3]), eos, stop)
    return (
        num_prompt,
        stopping,
        random.choice([0, 0, 0, 1, -1]),
        random.choice([None] * 9 + [random.randint(1, 30)]),
        random.choice([0, 0, 1, 2]),
        random.choice(["", "", "", "a"]),
        random.random() < 0.1,
        f"tenant-{random.randrange(num_tenants)}",
        random.choice([1, 1, 1, 2, 4]),
        random.random() < 0.2,
        random.choice(["", "", "x"]),
    )


@pytest.mark.parametrize("seed", range(120))
def test_long_random_walks_agree(seed: int) -> None:
    """Overload over many steps: preemption, overtaking and verification in states that short runs do not reach."""
    random = Random(seed)
    max_num_sequences = random.randint(1, 12)
    twins = Twins(
        SchedulerConfig(
            num_blocks=random.randint(8, 40),
            block_size=random.randint(1, 4),
            max_num_sequences=max_num_sequences,
            max_num_batched_tokens=max_num_sequences + random.choice([0, 3, 20]),
            max_model_len=random.choice([24, 60]),
            max_num_waiting=20,
            max_num_waiting_tokens=300,
            priority_aging_ns=random.choice([1, 7, 1000]),
            lookahead=seed % 2,
            tenant_weights=(("tenant-0", 3), ("tenant-1", 1000)),
        ),
        random.choice([0, 3, (1 << 64) - 1, (1 << 64) - 1]),
    )
    num_token_ids = random.choice([NUM_TOKEN_IDS, 100])
    pause_rate = random.choice([0.0, 0.05, 0.3])
    num_tenants = random.choice([1, 3, 1000])
    for _ in range(100):
        for _ in range(random.choice([0, 0, 1, 3])):
            twins.add(*random_request(random, num_tenants))
        for key in list(twins.keys):
            if random.random() < pause_rate:
                twins.call(random.choice(["pause", "resume"]), key)
            if random.random() < 0.01:
                twins.call("cancel", key)
        if twins.real.can_schedule and (not twins.plans or random.random() < 0.7):
            twins.schedule(random.choice([-3, 0, 0, 1, 1, 1, 4]))
        else:
            twins.apply(random, num_token_ids)
    twins.drain()
