"""Random workloads against a device that answers from a script. A failure replays from its seed.

What a sequence says is a pure function of its key and the position. Whatever is batched, chunked, cached, preempted,
paused, drafted or late, it must get its scripted tokens, or a beginning of them when something ended it early.

    python tests/scheduler/simulator.py --first 0 --seeds 1000
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random

import numpy as np
from fake_device import FakeDevice, script_of

from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.errors import (
    ContextLengthExceeded,
    DeadlineInfeasible,
    DuplicateRequest,
    ForewordError,
    QueueFull,
)
from foreword.scheduler.request import Request, StoppingParams
from foreword.scheduler.scheduler import Scheduler
from foreword.scheduler.step import FinishReason, StepKind, StepPlan, StepUpdate

MAX_OVERTAKEN = 4


@dataclass
class Generation:
    """What the simulator knows of a sequence that is active."""

    request: Request
    script: list[int]
    finish_reason: FinishReason
    leader: int
    tokens: list[int] = field(default_factory=list)
    is_paused: bool = False
    is_cancelled: bool = False
    is_decoding: bool = False  # it has a row and only its last token to compute, as far as can be told
    must_resume: bool = False  # it has lost its row
    num_overtaken: int = 0
    num_preemptions: int = 0

    @property
    def flow(self) -> tuple[str, int]:
        """Requests of one flow are admitted in order of arrival."""
        return self.request.tenant, self.request.priority


class Simulation:
    """One workload; everything in it follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        max_num_sequences = random.randint(1, 8)
        self.config = SchedulerConfig(
            num_blocks=random.choice([1, random.randint(2, 8), random.randint(6, 16), random.randint(8, 40)]),
            block_size=random.randint(1, 5),
            max_num_sequences=max_num_sequences,
            max_num_batched_tokens=max_num_sequences + random.choice([0, 2, 8, 40]),
            max_model_len=random.choice([8, 24, 60]),
            max_num_waiting=random.choice([1, 4, 16, 40]),
            max_num_waiting_tokens=random.choice([10, 400]),
            priority_aging_ns=random.choice([1, 10, 1000]),
            lookahead=random.choice([0, 1]),
            tenant_weights=(("heavy", random.randint(1, 1000)),),
        )
        self.scheduler = Scheduler(self.config)
        self.scheduler.prefix_cache.hash_mask = random.choice([(1 << 64) - 1, (1 << 64) - 1, 3, 0])
        self.device = FakeDevice(self.config, random, random.choice([0.0, 0.7, 1.0]), random.choice([0.0, 0.0, 0.01]))
        self.rate = {name: random.choice([0.0, 0.02, 0.2]) for name in ("cancel", "pause", "deadline", "priority")}
        self.tenants = random.choice([[""], ["heavy", "light"], [f"tenant-{i}" for i in range(200)]])
        self.is_loaded = True
        self.open: deque[StepPlan] = deque()
        self.keys: dict[int, int] = {}  # of rows
        self.active: dict[int, Generation] = {}
        self.next_key = 0
        self.now_ns = 0  # latest that the scheduler has seen
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        """Some steps under load, then all that is left to its end."""
        for _ in range(self.random.choice([20, 60])):
            for _ in range(self.random.choice([0, 0, 1, 1, 5])):
                self.add()
            self.touch()
            self.step()
        self.is_loaded = False
        self.rate["pause"] = 0.0
        for key, generation in self.active.items():
            self.scheduler.resume(key)
            generation.is_paused = False
        num_steps = 0
        while self.scheduler.has_work or self.open:
            self.step()
            num_steps += 1
            assert num_steps < 5000, "this takes for ever"
        assert not self.active, "a generation never ended"
        load = self.scheduler.load()
        assert load.num_free_blocks == load.num_blocks, "blocks are lost"
        assert (load.num_running, load.num_waiting, load.num_waiting_tokens, load.num_paused) == (0, 0, 0, 0)
        assert self.scheduler.next_deadline_ns == 0

    def add(self) -> None:
        random = self.random
        key, num_outputs = self.next_key, random.choice([1, 1, 1, 1, 3])
        if self.active and random.random() < 0.02:
            key, num_outputs = random.choice(list(self.active)), 1
        longest = min(self.config.max_model_len, self.config.num_blocks * self.config.block_size)
        num_prompt = random.choice(
            [1, random.randint(1, 5), random.randint(1, longest), random.randint(1, longest + 1)]
        )
        max_output = random.randint(1, 30) if random.random() < 0.1 else random.randint(1, max(1, longest - num_prompt))
        request = Request(
            key,
            np.arange(num_prompt, dtype=np.int32) // random.choice([1, 2]) % 9,
            StoppingParams(
                random.choice([1, max_output, max_output]),
                random.choice([0, 0, 3]),
                random.choice([(), (), (0,)]),
                random.choice([(), (), (2,)]),
            ),
            deadline_ns=max(1, self.now_ns + random.randint(-1, 60)) if self.happens("deadline") else 0,
            priority=random.randint(-2, 2) if self.happens("priority") else 0,
            tenant=random.choice(self.tenants),
            cache_salt=random.choice(["", "", "", "salt"]),
            bypass_prefix_cache=random.random() < 0.1,
            num_outputs=num_outputs,
            grammar=random.choice(["", "", "x"]),
        )
        try:
            self.scheduler.add(request, self.now_ns - random.choice([0, 0, 5]))
        except (ForewordError, ValueError) as error:
            self.counts[type(error).__name__] += 1
            self.check_refusal(request, error)
            return
        assert key == self.next_key, "a key became active twice"
        self.next_key += num_outputs
        for i in range(num_outputs):
            output = request.output(i)
            script, reason = script_of(output, self.config.max_model_len)
            self.active[output.request_key] = Generation(output, script, reason, leader=key)
        self.counts["requests"] += 1

    def check_refusal(self, request: Request, error: Exception) -> None:
        """Every refusal has its cause."""
        config, num_prompt = self.config, len(request.prompt_token_ids)
        num_tokens = num_prompt + request.stopping.max_output_tokens
        num_slots = config.num_blocks * config.block_size
        load = self.scheduler.load()
        if isinstance(error, DuplicateRequest):
            assert request.request_key in self.active
        elif isinstance(error, ContextLengthExceeded):
            assert num_tokens > config.max_model_len or num_tokens - 1 > num_slots
        elif isinstance(error, DeadlineInfeasible):
            assert request.deadline_ns
            assert request.deadline_ns <= self.now_ns or int(error.metadata["estimated_wait_ns"]) > 0
        elif isinstance(error, QueueFull):
            num_waiting = load.num_waiting + request.num_outputs
            num_waiting_tokens = load.num_waiting_tokens + num_prompt * request.num_outputs
            planned = {self.keys[row] for plan in self.open for row in plan.rows.tolist()}
            num_entries = len(planned.union(self.active)) + request.num_outputs  # ended, but still being computed
            assert (
                num_waiting > config.max_num_waiting
                or num_waiting_tokens > config.max_num_waiting_tokens
                or num_entries > config.max_num_waiting + config.max_num_sequences
            )
        else:
            assert request.num_outputs > config.max_num_waiting, error

    def happens(self, name: str) -> bool:
        return self.random.random() < self.rate[name]

    def touch(self) -> None:
        """Clients cancel, stop to read and read again, whatever is under way."""
        for key, generation in self.active.items():
            if self.happens("cancel"):
                is_cancelled = self.scheduler.cancel(key)
                assert is_cancelled != (generation.is_cancelled or self.is_late(generation))
                generation.is_cancelled |= is_cancelled
            if self.happens("pause") and self.scheduler.pause(key):
                generation.is_paused = True
            elif generation.is_paused and self.random.random() < 0.3 and self.scheduler.resume(key):
                generation.is_paused = False
        assert not self.scheduler.cancel(self.next_key)

    def step(self) -> None:
        """Make the next plan, with lookahead one more, and take the result of the oldest."""
        while self.scheduler.can_schedule and (not self.open or self.random.random() < 0.8):
            now_ns = self.now_ns + self.random.choice([-3, 0, 1, 1, 2, 9])
            self.now_ns = max(self.now_ns, now_ns)
            plan = self.scheduler.schedule(now_ns)
            self.scheduler.check_invariants()
            self.check_plan(plan)
            self.open.append(plan)
            self.touch()
            if self.is_loaded and self.random.random() < 0.3:
                self.add()
        plan = self.open.popleft()
        result = self.device.execute(plan)
        update = self.scheduler.apply(result if plan.num_sequences else None)
        self.scheduler.check_invariants()
        self.check_update(update)
        self.counts["steps"] += 1
        self.counts["steps planned ahead"] += len(self.open)

    def is_late(self, generation: Generation) -> bool:
        """Its deadline has passed in a step that has been scheduled."""
        return 0 < generation.request.deadline_ns <= self.now_ns

    def is_ready(self, generation: Generation) -> bool:
        """Nothing but a lack of rows, blocks and budget keeps it from being scheduled."""
        leader = self.active.get(generation.leader)
        is_following = leader is not None and leader is not generation and not leader.tokens and not leader.is_cancelled
        return not (generation.is_paused or generation.is_cancelled or self.is_late(generation) or is_following)

    def check_plan(self, plan: StepPlan) -> None:
        """Who takes part, and who does not although it could."""
        admitted = {request.request_key for _, request in plan.admitted}
        self.keys |= {row: request.request_key for row, request in plan.admitted}
        planned = {self.keys[row] for row in plan.rows.tolist()}
        assert admitted <= planned
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        for key, generation in self.active.items():
            if key in planned:
                keeps_its_place = generation.is_paused and key in admitted
                assert keeps_its_place or self.is_ready(generation), f"{key} is scheduled although it is not ready"
                assert key in admitted or not generation.must_resume, f"{key} was left out although it had a row"
                generation.must_resume = False
                continue
            if self.open:  # what it does next may depend on a result
                continue
            if generation.is_decoding and not generation.is_paused:
                generation.is_decoding, generation.must_resume = False, True  # then it was preempted
            if not self.is_ready(generation):
                continue
            assert planned, f"{key} waits and nothing runs"
            if generation.leader == key and generation.request.num_outputs == 1:
                passed_by = [k for k in admitted if k > key and self.active[k].flow == generation.flow]
                generation.num_overtaken += len(passed_by)
                assert generation.num_overtaken <= MAX_OVERTAKEN, f"{key} is overtaken again and again"

    def check_update(self, update: StepUpdate) -> None:
        """What came out is the script, and the numbers agree with it."""
        tokens, logprobs = update.token_ids.tolist(), update.logprobs.tolist()
        assert logprobs == [-float(token) for token in tokens]
        start = 0
        for record in update.sequences:
            key, num_tokens = int(record["request_key"]), int(record["num_tokens"])
            generation = self.active[key]
            generation.tokens += tokens[start : start + num_tokens]
            start += num_tokens
            assert generation.tokens == generation.script[: len(generation.tokens)], f"{key} left its script"
            kind, reason = StepKind(record["step_kind"]), FinishReason(record["finish_reason"])
            num_accepted, num_drafted = int(record["num_accepted"]), int(record["num_drafted"])
            assert num_accepted <= num_drafted
            if reason == FinishReason.NONE and kind in (StepKind.DECODE, StepKind.VERIFY):
                assert num_tokens == num_accepted + 1
            assert num_tokens <= num_accepted + 1
            num_prompt = len(generation.request.prompt_token_ids)
            assert record["num_cached"] < num_prompt
            assert record["num_prompt_computed"] <= num_prompt
            assert record["num_preemptions"] >= generation.num_preemptions
            self.counts["preemptions"] += int(record["num_preemptions"]) - generation.num_preemptions
            generation.num_preemptions = int(record["num_preemptions"])
            generation.is_decoding = num_tokens > 0
            if num_tokens:
                generation.num_overtaken = 0
            self.counts["tokens"] += num_tokens
            self.counts["drafts"] += num_drafted
            self.counts["accepted drafts"] += num_accepted
            if reason != FinishReason.NONE:
                self.counts["cached tokens"] += int(record["num_cached"])
                self.finish(key, reason)
        assert start == len(tokens)

    def finish(self, key: int, reason: FinishReason) -> None:
        generation = self.active.pop(key)
        self.counts[reason.name] += 1
        if reason is FinishReason.CANCELLED:
            assert generation.is_cancelled
        elif reason is FinishReason.DEADLINE:
            assert self.is_late(generation)
        elif reason is FinishReason.FAILED:
            assert key in self.device.failed
        else:
            assert (generation.tokens, reason) == (generation.script, generation.finish_reason)


def simulate(first: int, num_seeds: int, counts: Counter[str]) -> list[int]:
    """Run simulations and report those that fail; returns their seeds."""
    failed = []
    for seed in range(first, first + num_seeds):
        simulation = Simulation(seed)
        try:
            simulation.run()
        except Exception:
            traceback.print_exc()
            print(f"seed {seed} failed; replay it with: make simulate FIRST={seed} SEEDS=1", file=sys.stderr)
            failed.append(seed)
        counts += simulation.counts
    return failed


def main() -> int:
    """Print a summary as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=1000)
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    start = time.monotonic()
    failed = simulate(arguments.first, arguments.seeds, counts)
    summary = {"seeds": arguments.seeds, "failed": failed, "seconds": round(time.monotonic() - start, 1)}
    print(json.dumps(summary | dict(sorted(counts.items()))))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
