"""The scheduler once more in plain Python: slow, obvious, and equal to the real one in every plan and update.

Tests drive both with the same calls. Where the two differ, one of them misreads the rules; this one is written so
that a reader can tell which.
"""

from __future__ import annotations

import numpy as np

from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.errors import ContextLengthExceeded, DeadlineInfeasible, DuplicateRequest, QueueFull
from foreword.scheduler.reference_planner import MAX_OVERTAKEN, ReferencePlanner
from foreword.scheduler.reference_sequence import ReferenceSequence
from foreword.scheduler.request import Request
from foreword.scheduler.step import (
    SEQUENCE_UPDATE,
    Drafts,
    DraftState,
    FinishReason,
    SchedulerLoad,
    StepKind,
    StepPlan,
    StepResult,
    StepUpdate,
)


class ReferenceScheduler(ReferencePlanner):
    """Same calls, plans, updates and errors as `Scheduler`, whose stub documents them."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.num_added = 0
        self.ended: list[ReferenceSequence] = []
        self.step_start_ns = 0
        self.measured_tokens = 0  # of the step under way
        self.measured = (0, 0, 0)  # steps, their tokens, their nanoseconds

    # Requests

    def add(self, request: Request, now_ns: int) -> None:
        """Queue a request."""
        self.now_ns = max(self.now_ns, now_ns)
        prompt = request.prompt_token_ids.tolist()
        if not prompt or min(prompt) < 0 or request.stopping.max_output_tokens < 1:
            raise ValueError("malformed request")
        if abs(request.priority) > 100:
            raise ValueError("priority")
        if not 1 <= request.num_outputs <= self.config.max_num_waiting:
            raise ValueError("number of outputs")
        outputs = [request.output(i) for i in range(request.num_outputs)]
        if any(output.request_key in self.sequences for output in outputs):
            raise DuplicateRequest("active")
        max_tokens = len(prompt) + request.stopping.max_output_tokens
        if max_tokens > self.config.max_model_len or self._num_blocks_for(max_tokens - 1) > self.config.num_blocks:
            raise ContextLengthExceeded("too long")
        if request.deadline_ns and request.deadline_ns <= self.now_ns + self._wait_ns(request):
            raise DeadlineInfeasible("too late")
        waiting = self._waiting()
        capacity = self.config.max_num_waiting + self.config.max_num_sequences
        if len(waiting) + len(outputs) > self.config.max_num_waiting:
            raise QueueFull("requests")
        if len(self.sequences) + len(outputs) > capacity:
            raise QueueFull("requests")
        num_tokens = len(outputs) * len(prompt)
        if waiting and sum(s.num_prompt for s in waiting) + num_tokens > self.config.max_num_waiting_tokens:
            raise QueueFull("tokens")
        leader = None
        for output in outputs:
            s = ReferenceSequence(output, self.num_added, list(prompt), leader=leader)
            self.sequences[output.request_key] = s
            self.num_added += 1
            self.waiting.open_flow(output)
            if leader is None:
                leader = s
                self.waiting.push(s, self.now_ns)

    def _wait_ns(self, request: Request) -> int:
        """Time for the tokens that go before a new request, as far as past steps tell."""
        _, num_measured, duration_ns = self.measured
        if not num_measured:
            return 0
        prefills = [s for s in self._running() if s.is_prefill and s.request.priority >= request.priority]
        num_running = sum(s.prefill_end - s.num_computed for s in prefills)
        return (num_running + self.waiting.num_tokens_before(request)) * duration_ns // num_measured

    def _queue_followers(self, leader: ReferenceSequence) -> None:
        """Its prompt is computed or never will be: those that waited for it are on their own."""
        for s in self._active():
            if s.leader is leader:
                s.leader = None
                if not s.is_paused:
                    self.waiting.push(s, self.now_ns)

    def cancel(self, request_key: int) -> bool:
        """End a request."""
        if (s := self._find(request_key)) is None:
            return False
        self._end(s, FinishReason.CANCELLED)
        return True

    def pause(self, request_key: int) -> bool:
        """Stop scheduling a sequence."""
        if (s := self._find(request_key)) is None:
            return False
        if not s.is_paused:
            s.is_paused = True
            if not s.num_planned:
                s.drafts = []
            if s.row is None and s.num_overtaken < MAX_OVERTAKEN:
                self.waiting.discard(s)
                s.num_admitted_before = self.num_admitted_ever
        return True

    def resume(self, request_key: int) -> bool:
        """Undo `pause`."""
        if (s := self._find(request_key)) is None:
            return False
        if s.is_paused and s.row is None and not s.leader and s not in self.waiting.members:
            num_admitted = self.num_admitted_ever - s.num_admitted_before
            s.num_overtaken = min(MAX_OVERTAKEN, s.num_overtaken + num_admitted)
            self.waiting.push(s, self.now_ns)
        s.is_paused = False
        return True

    # Schedule

    @property
    def can_schedule(self) -> bool:
        """Another plan may be made."""
        return not self.open or (len(self.open) <= self.config.lookahead and not self.is_starved)

    def schedule(self, now_ns: int) -> StepPlan:
        """Decide the next step."""
        if not self.can_schedule:
            raise RuntimeError("step is open")
        self.now_ns = max(self.now_ns, now_ns)
        self._measure()
        advanced = self._advance()
        for s in sorted(self._active(), key=lambda s: (s.request.deadline_ns, s.order)):
            if s.request.deadline_ns and s.request.deadline_ns <= self.now_ns:
                self._end(s, FinishReason.DEADLINE)
        self.step_id += 1
        plan = self._plan_all()
        self.step_start_ns = self.now_ns
        is_measured = 2 * plan.num_tokens >= self.config.max_num_batched_tokens
        self.measured_tokens = plan.num_tokens if is_measured else 0
        self._retreat(advanced)
        self.open.append((plan, self.planned))
        return plan

    def _advance(self) -> list[tuple[ReferenceSequence, int, int]]:
        """Let the sequences of the open plan look as its result will leave them, with -1 for the token it draws.

        Those whose drafts it checks, that its result ends, or that draw by their last token have to wait for it.
        Returns what to undo.
        """
        advanced = []
        for plan, planned in self.open:
            for b, s in enumerate(planned):
                num_tokens, num_logits = int(np.diff(plan.query_offsets)[b]), int(np.diff(plan.logits_offsets)[b])
                is_last = num_logits == 1 and s.num_output + 1 == s.request.stopping.max_output_tokens
                s.is_awaited = num_logits > 1 or is_last or (num_logits == 1 and s.request.needs_last_token)
                if not s.is_awaited and not s.finish_reason:
                    s.num_computed += num_tokens
                    s.tokens += [-1] * num_logits
                    advanced.append((s, num_tokens, num_logits))
        return advanced

    def _retreat(self, advanced: list[tuple[ReferenceSequence, int, int]]) -> None:
        for s, num_tokens, num_logits in advanced:
            s.num_computed -= num_tokens
            del s.tokens[len(s.tokens) - num_logits :]
        for s in self.sequences.values():
            s.is_awaited = False

    def _measure(self) -> None:
        """The last step has taken until now, if it was at least half full and there was no pause after it."""
        duration_ns = self.now_ns - self.step_start_ns
        if self.measured_tokens and duration_ns:
            num_steps, num_tokens, total_ns = self.measured
            self.measured = (num_steps + 1, num_tokens + self.measured_tokens, total_ns + duration_ns)
            if num_steps + 1 == 16:
                self.measured = (8, self.measured[1] // 2, self.measured[2] // 2)
        self.measured_tokens = 0

    def _end(self, s: ReferenceSequence, reason: FinishReason) -> None:
        s.finish_reason = reason
        s.leader = None
        self._queue_followers(s)
        self.ended.append(s)
        self.waiting.discard(s)
        if s.row is not None and not s.num_planned:
            self._release(s)

    # Apply

    def apply(self, result: StepResult | None) -> StepUpdate:
        """Take a step's result."""
        if not self.open:
            raise ValueError("no open step")
        plan, planned = self.open[0]
        if (result is None and planned) or (result is not None and result.step_id != plan.step_id):
            raise ValueError("not the result of this plan")
        offsets = [0] if result is None else result.token_offsets.tolist()
        token_ids = [] if result is None else result.token_ids.tolist()
        logprobs = [] if result is None else result.logprobs.tolist()
        failed = [] if result is None else result.failed.tolist()
        constraint_reasons = [0] * len(failed)
        if result is not None and result.constraint_reasons is not None:
            constraint_reasons = result.constraint_reasons.tolist()
        if len(constraint_reasons) != len(failed):
            raise ValueError("wrong shape")
        drafts = None if result is None else result.drafts
        self._check_result(plan, offsets, token_ids, failed)
        self._check_drafts(plan, drafts, offsets)
        updates: list[tuple[int, ...]] = []
        update_token_ids: list[int] = []
        update_logprobs: list[float] = []
        result_indices: list[int] = []
        scored_indices: list[int] = []
        reported_before = list(self.ended)
        for b, s in enumerate(planned):
            s.num_planned -= 1
            if s.finish_reason:
                continue
            scored_indices += range(plan.scored_offsets[b], plan.scored_offsets[b + 1])
            start, end = offsets[b], offsets[b + 1]
            record = self._commit(s, plan, b, token_ids[start:end], failed[b], constraint_reasons[b])
            self.waiting.charge(s, record[2])
            if s.num_computed >= s.num_prompt or s.finish_reason:
                self._queue_followers(s)
            updates.append(record)
            if drafts is not None and not s.is_paused and not s.finish_reason and not s.num_planned:
                num_left = s.request.stopping.max_output_tokens - s.num_output
                s.drafter = 0 if drafts.drafters is None else int(drafts.drafters[b])
                s.drafts = drafts.token_ids[drafts.offsets[b] : drafts.offsets[b + 1]].tolist()[: num_left - 1]
            num_kept = record[2]
            update_token_ids += token_ids[start : start + num_kept]
            update_logprobs += logprobs[start : start + num_kept]
            result_indices += range(start, start + num_kept)
            if s.finish_reason:
                self.ended.append(s)
                s.is_reported = True
        for s in reported_before:
            if not s.is_reported:
                updates.append(s.update(StepKind.NONE, 0, 0, 0))
                s.is_reported = True
        for s in self.ended:
            if s.row is not None and not s.num_planned:
                self._release(s)
        for s in self.ended:
            if not s.num_planned:
                self.waiting.close_flow(s.request)
                del self.sequences[s.request.request_key]
        self.ended = [s for s in self.ended if s.num_planned]
        del self.open[0]
        if not self.has_work:
            self.measured_tokens = 0
        return StepUpdate(
            plan.step_id,
            np.array(updates, SEQUENCE_UPDATE),
            np.array(update_token_ids, np.int32),
            np.array(update_logprobs, np.float32),
            self._draft_state(),
            np.array(result_indices, np.int32),
            np.array(scored_indices, np.int32),
        )

    def _draft_state(self) -> DraftState:
        if self.num_drafts_planned or not self.num_drafts_dropped:
            return DraftState.ACTIVE
        return DraftState.CACHE_PRESSURE if self.draft_budget else DraftState.PREFILL_PRESSURE

    def _commit(
        self, s: ReferenceSequence, plan: StepPlan, b: int, accepted: list[int], failed: bool, constraint_reason: int
    ) -> tuple[int, ...]:
        kind = StepKind.PREFILL if s.is_prefill else StepKind.VERIFY if s.drafts else StepKind.DECODE
        num_drafted = len(s.drafts)
        start, end = s.num_computed, s.num_computed + int(np.diff(plan.query_offsets)[b])
        s.num_steps += 1
        s.num_prefill_chunks += start < s.num_prompt
        s.num_recomputed += max(0, min(end, s.num_computed_max) - start)
        num_scored = int(np.diff(plan.scored_offsets)[b])
        s.num_scored += num_scored
        num_kept = 0
        for token_id in accepted:
            s.tokens.append(token_id)
            num_kept += 1
            s.finish_reason = self._finish_reason(s)
            if s.finish_reason:
                break
        if failed:
            s.finish_reason = FinishReason.FAILED
        is_stopped = s.finish_reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        if constraint_reason and num_kept == len(accepted) and not is_stopped:
            s.finish_reason = FinishReason(constraint_reason)
        num_accepted = min(num_kept, max(0, len(accepted) - 1))
        s.num_computed = end - num_drafted + num_accepted
        s.num_computed_max = max(s.num_computed_max, s.num_computed)
        s.num_prompt_computed = min(s.num_computed, s.num_prompt)
        s.drafts = []
        if not failed and not s.request.bypass_prefix_cache:
            self._cache_full_blocks(s)
        return s.update(kind, num_kept, num_drafted, num_accepted, num_scored)

    def _cache_full_blocks(self, s: ReferenceSequence) -> None:
        for i in range(s.num_cached_blocks, s.num_computed // self.config.block_size):
            end = (i + 1) * self.config.block_size
            block = self.blocks.cache(s.blocks[i], s.request.cache_salt, s.tokens[:end])
            if block != s.blocks[i]:
                s.blocks[i] = block
                s.num_sent_blocks = min(s.num_sent_blocks, i)
            s.num_cached_blocks += 1

    def _finish_reason(self, s: ReferenceSequence) -> FinishReason:
        stopping = s.request.stopping
        if s.num_output > stopping.min_output_tokens:
            if s.tokens[-1] in stopping.eos_token_ids:
                return FinishReason.EOS
            if s.tokens[-1] in stopping.stop_token_ids:
                return FinishReason.STOP_TOKEN
        if len(s.tokens) == self.config.max_model_len:
            return FinishReason.CONTEXT_LIMIT
        return FinishReason.LENGTH if s.num_output == stopping.max_output_tokens else FinishReason.NONE

    def _check_result(self, plan: StepPlan, offsets: list[int], token_ids: list[int], failed: list[bool]) -> None:
        num_sequences = plan.num_sequences
        if len(offsets) != num_sequences + 1 or len(failed) != num_sequences or offsets[-1] != len(token_ids):
            raise ValueError("wrong shape")
        if any(token_id < 0 for token_id in token_ids):
            raise ValueError("negative token")
        for b, num_logits in enumerate(np.diff(plan.logits_offsets).tolist()):
            num_logits = 0 if failed[b] else num_logits
            if not min(1, num_logits) <= offsets[b + 1] - offsets[b] <= num_logits:
                raise ValueError("wrong number of tokens")

    def _check_drafts(self, plan: StepPlan, drafts: Drafts | None, token_offsets: list[int]) -> None:
        if drafts is None:
            return
        counts = np.diff(drafts.offsets)
        if len(counts) != plan.num_sequences or drafts.offsets[0] or drafts.offsets[-1] != len(drafts.token_ids):
            raise ValueError("wrong shape")
        if (counts < 0).any() or (drafts.token_ids < 0).any() or counts[np.diff(token_offsets) == 0].any():
            raise ValueError("wrong drafts")

    # State

    @property
    def has_work(self) -> bool:
        """A `schedule` would lead to a plan or an update."""
        return bool(self.ended or self.waiting.members) or any(s.is_ready for s in self._active())

    @property
    def next_deadline_ns(self) -> int:
        """Earliest deadline; 0 for none."""
        return min((s.request.deadline_ns for s in self._active() if s.request.deadline_ns), default=0)

    def load(self) -> SchedulerLoad:
        """Gauges of the present state."""
        waiting = self._waiting()
        running = self._running()
        return SchedulerLoad(
            num_running=len(running),
            num_waiting=len(waiting),
            num_waiting_tokens=sum(s.num_prompt for s in waiting),
            num_paused=sum(s.is_paused for s in running),
            num_free_blocks=self.blocks.num_free,
            num_cached_blocks=len(self.blocks.blocks),
            num_blocks=self.config.num_blocks,
        )

    def check_invariants(self) -> None:
        """Every block and every row is held or free."""
        self.blocks.check_invariants([block for s in self._running() for block in s.blocks])
        rows = [s.row for s in self._running() if s.row is not None]
        assert sorted(rows + self.free_rows) == list(range(self.config.max_num_sequences))

    def _find(self, request_key: int) -> ReferenceSequence | None:
        s = self.sequences.get(request_key)
        return None if s is None or s.finish_reason else s
