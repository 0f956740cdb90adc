"""Scripts of calls with the plans and updates that follow, in tests/golden/scheduler/*.txt.

A line is a call, the indented lines below it are what it gave. `--update-golden` rewrites those; review them as a diff.

    config num_blocks=4 block_size=4 [weights=x:3,y:1]     SchedulerConfig; once, first
    add a prompt=10 max=4 [min= eos= stop= priority= tenant= deadline= salt= bypass=1 n= grammar=]
                                          outputs of several are a, a.1, a.2
    cancel a | pause a | resume a
    step [now=5]                          schedule
    apply [a=17 b=5,6>7,8 c=failed]       the result of the oldest plan without one and, behind >, drafts for the next
                                          step to verify; a sequence that is not named draws token 1
    load

Prompts are 100, 101, 102 and so on. Requests share cached blocks only where they are given the same salt: it is a
request's name when the script gives none.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import pytest

from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.errors import ForewordError
from foreword.scheduler.request import Request, StoppingParams
from foreword.scheduler.scheduler import Scheduler
from foreword.scheduler.step import Drafts, DraftState, FinishReason, StepKind, StepPlan, StepResult, StepUpdate

GOLDEN = Path(__file__).parents[1] / "golden" / "scheduler"


class Script:
    """Runs the calls of one golden file."""

    def __init__(self) -> None:
        self.scheduler: Scheduler
        self.plans: deque[StepPlan] = deque()
        self.names: list[str] = []
        self.rows: dict[int, str] = {}
        self.now_ns = 0

    def run(self, line: str) -> list[str]:
        """Output lines of one call."""
        command, *words = line.split()
        options = dict(word.split("=") for word in words if "=" in word)
        names = [word for word in words if "=" not in word]
        try:
            return getattr(self, command)(*names, **options)
        except ForewordError as error:
            return [f"{type(error).__name__}: {error}"]

    def config(self, **options: str) -> list[str]:
        weights = [pair.split(":") for pair in options.pop("weights", "").split(",") if pair]
        limits = {name: int(value) for name, value in options.items()}
        tenant_weights = tuple((tenant, int(weight)) for tenant, weight in weights)
        self.scheduler = Scheduler(SchedulerConfig(tenant_weights=tenant_weights, **limits))
        return []

    def add(self, name: str, prompt: str, max: str, **options: str) -> list[str]:  # noqa: A002
        ids = {key: tuple(int(i) for i in options.pop(key, "").split(",") if i) for key in ("eos", "stop")}
        request = Request(
            request_key=len(self.names),
            prompt_token_ids=np.arange(100, 100 + int(prompt), dtype=np.int32),
            stopping=StoppingParams(int(max), int(options.pop("min", 0)), ids["eos"], ids["stop"]),
            priority=int(options.pop("priority", 0)),
            tenant=options.pop("tenant", ""),
            deadline_ns=int(options.pop("deadline", 0)),
            cache_salt=options.pop("salt", name),
            bypass_prefix_cache=options.pop("bypass", "") == "1",
            num_outputs=int(options.pop("n", 1)),
            grammar=options.pop("grammar", ""),
        )
        assert not options
        self.scheduler.add(request, self.now_ns)
        self.names += [name] + [f"{name}.{i}" for i in range(1, request.num_outputs)]
        return []

    def cancel(self, name: str) -> list[str]:
        return [] if self.scheduler.cancel(self.names.index(name)) else ["not active"]

    def pause(self, name: str) -> list[str]:
        return [] if self.scheduler.pause(self.names.index(name)) else ["not active"]

    def resume(self, name: str) -> list[str]:
        return [] if self.scheduler.resume(self.names.index(name)) else ["not active"]

    def step(self, now: str = "0") -> list[str]:
        self.now_ns = max(self.now_ns, int(now))
        plan = self.scheduler.schedule(self.now_ns)
        self.scheduler.check_invariants()
        self.plans.append(plan)
        self.rows |= {row: self.names[request.request_key] for row, request in plan.admitted}
        admitted = {row for row, _ in plan.admitted}
        lines = [f"plan {plan.step_id}: {plan.num_tokens} tokens"]
        for b, row in enumerate(plan.rows.tolist()):
            start, end = plan.query_offsets[b], plan.query_offsets[b + 1]
            positions, slots = plan.positions[start:end], plan.slot_mapping[start:end]
            num_logits = plan.logits_offsets[b + 1] - plan.logits_offsets[b]
            lines.append(
                f"{self.rows[row]}: row {row}{' (new)' if row in admitted else ''}, "
                f"positions {positions[0]}-{positions[-1]}, slots {spans(slots)}, "
                f"tokens {spans(plan.token_ids[start:end])}, {num_logits} logits"
            )
        lines += [f"block table: row {row}[{i}] = block {block}" for row, i, block in plan.block_table_updates]
        return lines

    def apply(self, **tokens: str) -> list[str]:
        plan = self.plans.popleft()
        named = [self.rows[row] for row in plan.rows.tolist()]
        assert set(tokens) <= set(named)
        owed = np.diff(plan.logits_offsets) > 0
        drafts = [ints(tokens.get(name, "").partition(">")[2]) for name in named]
        tokens = {name: ids.partition(">")[0] for name, ids in tokens.items()}
        failed = [tokens.get(name) == "failed" for name in named]
        drawn = [ints(tokens.get(name, "1")) if owed[b] and not failed[b] else [] for b, name in enumerate(named)]
        token_ids = np.array([token for ids in drawn for token in ids], np.int32)
        result = StepResult(
            step_id=plan.step_id,
            token_offsets=np.cumsum([0] + [len(ids) for ids in drawn]).astype(np.int32),
            token_ids=token_ids,
            logprobs=np.zeros(len(token_ids), np.float32),
            failed=np.array(failed, np.bool_),
            drafts=Drafts(
                np.cumsum([0] + [len(ids) for ids in drafts]).astype(np.int32),
                np.array([token for ids in drafts for token in ids], np.int32),
            ),
        )
        update = self.scheduler.apply(result if named else None)
        self.scheduler.check_invariants()
        return describe(update, self.names)

    def load(self) -> list[str]:
        load = self.scheduler.load()
        return [
            f"{load.num_running} running ({load.num_paused} paused), {load.num_waiting} waiting, "
            f"{load.num_free_blocks} of {load.num_blocks} blocks free, {load.num_cached_blocks} cached"
        ]


def ints(text: str) -> list[int]:
    return [int(i) for i in text.split(",") if i]


def spans(values: np.ndarray) -> str:
    """Runs of consecutive numbers: 4-7,12."""
    runs = np.split(values, np.flatnonzero(np.diff(values) != 1) + 1)
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def describe(update: StepUpdate, names: list[str]) -> list[str]:
    lines = []
    token_ids = iter(update.token_ids.tolist())
    for record in update.sequences:
        parts = [StepKind(record["step_kind"]).name]
        if record["num_tokens"]:
            parts.append("tokens " + ",".join(str(next(token_ids)) for _ in range(record["num_tokens"])))
        parts.append(f"prompt computed {record['num_prompt_computed']}")
        if record["num_cached"]:
            parts.append(f"cached {record['num_cached']}")
        if record["num_drafted"]:
            parts.append(f"accepted {record['num_accepted']} of {record['num_drafted']}")
        if record["num_preemptions"]:
            parts.append(f"preemptions {record['num_preemptions']}, recomputed {record['num_recomputed']}")
        if record["finish_reason"]:
            parts.append(FinishReason(record["finish_reason"]).name)
        lines.append(f"{names[record['request_key']]}: " + "; ".join(parts))
    if update.draft_state is not DraftState.ACTIVE:
        lines.append(f"no drafts: {update.draft_state.name}")
    return lines


def rendered(text: str) -> str:
    script = Script()
    lines = []
    for line in text.splitlines():
        if line.startswith("    "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines += ["    " + output for output in script.run(line)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_plans_are_as_written(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text()
    actual = rendered(text)
    if request.config.getoption("--update-golden", default=False):
        path.write_text(actual)
    else:
        assert actual == text


def test_there_are_scripts() -> None:
    assert len(list(GOLDEN.glob("*.txt"))) >= 8
