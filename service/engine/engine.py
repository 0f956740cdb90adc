"""Scheduler and device in one loop."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from foreword.scheduler.errors import InvalidField
from foreword.scheduler.request import Request
from foreword.scheduler.scheduler import Scheduler
from foreword.scheduler.step import DraftState, SchedulerLoad, StepForecast, StepPlan, StepResult, StepUpdate
from foreword.service.engine.messages import DraftCounts, EngineInfo, StepHeader, StepReport


class Runner(Protocol):
    """Computes steps on a device."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""


@runtime_checkable
class AsynchronousRunner(Runner, Protocol):
    """Computes steps on a device that works while the host does something else."""

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step behind those begun before; the returned function waits for its result."""


class _OpenStep(NamedTuple):
    """A step that was begun; `finish` waits for its result, `None` when there is nothing to compute."""

    plan: StepPlan
    start_ns: int
    schedule_end_ns: int
    finish: Callable[[], StepResult] | None


class StepFault(Exception):
    """A step raised an exception (its cause); the engine's state is not to be used any more.

    Attributes:
        step_id: the step, 0 if it was not planned yet.
        request_keys: sequences that were in the step.
    """

    def __init__(self, step_id: int, request_keys: list[int], cause: Exception) -> None:
        super().__init__(f"step {step_id} failed: {type(cause).__name__}")
        self.step_id = step_id
        self.request_keys = request_keys


class Engine:
    """Generates tokens for many requests at once; synchronous, owned by one thread.

    Attributes:
        info: facts about the engine.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, info: EngineInfo) -> None:
        self.info = info
        self._scheduler = scheduler
        if isinstance(runner, AsynchronousRunner):
            self._launch = runner.launch
        elif scheduler.config.lookahead:
            raise ValueError("a scheduler with lookahead needs a runner with `launch`")
        else:
            self._launch = lambda plan: functools.partial(runner.execute, plan)
        self._open: deque[_OpenStep] = deque()
        self._end_ns = 0
        self._has_drafts = False
        self._draft_state = DraftState.NO_GAIN if info.drafter else DraftState.DISABLED
        self._request_keys = np.zeros(scheduler.config.max_num_sequences, np.int64)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidField: a token id is not in the vocabulary, the prompt is empty, or it asks for too many outputs.
            DuplicateRequest: its key is active.
            ContextLengthExceeded: prompt and output cannot fit.
            QueueFull: a bound of the waiting queue is reached.
            DeadlineInfeasible: its deadline has passed.
        """
        self._check_token_ids("prompt_token_ids", request.prompt_token_ids)
        self._check_token_ids("stopping.eos_token_ids", request.stopping.eos_token_ids)
        self._check_token_ids("stopping.stop_token_ids", request.stopping.stop_token_ids)
        self._check_token_ids("sampling.logit_bias", [token_id for token_id, _ in request.sampling.logit_bias])
        self._check_token_ids("sampling.allowed_token_ids", request.sampling.allowed_token_ids)
        self._check_token_ids("sampling.banned_token_ids", request.sampling.banned_token_ids)
        if not len(request.prompt_token_ids):
            raise InvalidField("prompt_token_ids", "must hold at least one token")
        max_outputs = self._scheduler.config.max_num_waiting
        if not 1 <= request.num_outputs <= max_outputs:
            raise InvalidField(
                "sampling.output_count", f"must be 1 to {max_outputs}, as many as may wait in this server"
            )
        self._scheduler.add(request, time.monotonic_ns())

    def cancel(self, request_key: int) -> bool:
        """End a request; a step reports it as cancelled. False when the key is not active."""
        return self._scheduler.cancel(request_key)

    def pause(self, request_key: int) -> bool:
        """Stop scheduling a sequence until `resume`. False when the key is not active."""
        return self._scheduler.pause(request_key)

    def resume(self, request_key: int) -> bool:
        """Undo `pause`. False when the key is not active."""
        return self._scheduler.resume(request_key)

    def step(self) -> StepReport | None:
        """Run one step; None when there was nothing to do. The report's arrays are valid until the next call.

        Where the scheduler looks ahead, the next step is begun before the result of this one is waited for, except
        while the device proposes drafts.

        Raises:
            StepFault: the scheduler or the device raised an exception.
        """
        report = None
        while report is None:
            is_idle = not self._open
            while self._scheduler.can_schedule and self._is_worth_a_plan:
                self._begin_step()
            report = self._finish_step(self._open.popleft())
            if is_idle and not self._open:  # an empty plan behind another one only means that all wait for a result
                break
        return report

    @property
    def _is_worth_a_plan(self) -> bool:
        """One plan is made in any case, another behind it only if that one computes something.

        While drafts come with the results a plan waits for them: a sequence that is planned already would lose its own.
        """
        if not self._open:
            return True
        return self._open[-1].plan.num_sequences > 0 and self._scheduler.has_work and not self._has_drafts

    def _begin_step(self) -> None:
        plan: StepPlan | None = None
        try:
            start_ns = time.monotonic_ns()
            plan = self._scheduler.schedule(start_ns)
            schedule_end_ns = time.monotonic_ns()
            self._note_admitted(plan)
            finish = self._launch(plan) if plan.num_sequences else None
            self._open.append(_OpenStep(plan, start_ns, schedule_end_ns, finish))
        except Exception as cause:
            raise self._step_fault(plan, cause) from cause

    def _finish_step(self, step: _OpenStep) -> StepReport | None:
        plan = step.plan
        try:
            result = step.finish() if step.finish else None
            update = self._scheduler.apply(result)
        except Exception as cause:
            raise self._step_fault(plan, cause) from cause
        self._has_drafts = result is not None and result.drafts is not None
        if result is None and not len(update.sequences):
            return None
        start_ns = max(step.start_ns, self._end_ns)
        self._end_ns = time.monotonic_ns()
        sequences = update.sequences
        verified = sequences[sequences["num_drafted"] > 0]
        header = StepHeader(
            step_id=plan.step_id,
            start_ns=start_ns,
            end_ns=self._end_ns,
            draft_duration_ns=result.draft_duration_ns if result else 0,
            model_duration_ns=result.model_duration_ns if result else 0,
            num_sequences=plan.num_sequences,
            num_tokens=plan.num_tokens,
            load=self._scheduler.load(),
            draft_state=self._draft_state_after(result, update),
            schedule_duration_ns=step.schedule_end_ns - step.start_ns,
            num_prefill_sequences=plan.num_prefill_sequences,
            num_prefill_tokens=plan.num_prefill_tokens,
            num_drafted=int(update.sequences["num_drafted"].sum()),
            num_accepted=int(update.sequences["num_accepted"].sum()),
            drafted=_by_place(verified["num_drafted"]),
            accepted=_by_place(verified["num_accepted"]),
            emitted=_by_place(verified["num_tokens"]),
            forecast=result.forecast if result else StepForecast(),
            num_output_tokens=len(update.token_ids),
            num_preempted=plan.num_preempted,
            num_finished=int(np.count_nonzero(update.sequences["finish_reason"])),
            drafts=_count_drafts(update.sequences),
        )
        self._draft_state = header.draft_state
        scores, prompt_scores = (result.scores, result.prompt_scores) if result else (None, None)
        return StepReport(
            header,
            update.sequences,
            update.token_ids,
            update.logprobs,
            scores and scores.take(update.result_indices),
            prompt_scores and prompt_scores.take(update.scored_indices),
        )

    def _draft_state_after(self, result: StepResult | None, update: StepUpdate) -> DraftState:
        """What keeps the device from proposing, else what kept the scheduler from taking what it had proposed."""
        state = result.draft_state if result else self._draft_state
        return update.draft_state if state is DraftState.ACTIVE else state

    @property
    def has_work(self) -> bool:
        """True while a step could have something to do."""
        return self._scheduler.has_work

    @property
    def next_deadline_ns(self) -> int:
        """Earliest deadline of all active requests, on the monotonic clock; 0 for none."""
        return self._scheduler.next_deadline_ns

    def load(self) -> SchedulerLoad:
        """Gauges of the present state."""
        return self._scheduler.load()

    def _check_token_ids(self, field: str, token_ids: npt.ArrayLike) -> None:
        """An id outside the vocabulary would make the device read or write outside its arrays."""
        ids = np.asarray(token_ids)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.info.vocab_size:
            raise InvalidField(field, f"ids must be in [0, {self.info.vocab_size})")

    def _note_admitted(self, plan: StepPlan) -> None:
        for row, request in plan.admitted:
            self._request_keys[row] = request.request_key

    def _step_fault(self, plan: StepPlan | None, cause: Exception) -> StepFault:
        if plan is None:
            return StepFault(0, [], cause)
        return StepFault(plan.step_id, self._request_keys[plan.rows].tolist(), cause)


def _count_drafts(sequences: npt.NDArray[np.void]) -> tuple[DraftCounts, ...]:
    checked = sequences[sequences["num_drafted"] > 0]
    return tuple(
        DraftCounts(drafter, int(own["num_drafted"].sum()), int(own["num_accepted"].sum()))
        for drafter in np.unique(checked["drafter"]).tolist()
        for own in [checked[checked["drafter"] == drafter]]
    )


def _by_place(counts: npt.NDArray[np.int32]) -> tuple[int, ...]:
    """Element k: how many of the counts are above k, up to the greatest of them."""
    if not len(counts):
        return ()
    return tuple(np.cumsum(np.bincount(counts)[::-1])[-2::-1].tolist())
