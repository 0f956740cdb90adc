"""The scheduler once more in plain Python: slow, obvious, and equal to the real one in every plan and update.

Tests drive both with the same calls. Where the two differ, one of them misreads the rules; this one is written so
that a reader can tell which.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.errors import ContextLengthExceeded, DeadlineInfeasible, DuplicateRequest, QueueFull
from foreword.scheduler.reference_blocks import ReferenceBlocks
from foreword.scheduler.reference_queue import ReferenceQueue
from foreword.scheduler.request import MIN_PRIORITY, Request
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

MAX_OVERTAKEN = 4


@dataclass(eq=False)
class _Sequence:
    """A request and all that happened to it."""

    request: Request
    order: int
    tokens: list[int]
    drafts: list[int] = field(default_factory=list)
    drafter: int = 0
    row: int | None = None
    blocks: list[int] = field(default_factory=list)
    num_sent_blocks: int = 0
    num_cached_blocks: int = 0
    num_computed: int = 0
    num_computed_max: int = 0
    prefill_end: int = 0
    leader: _Sequence | None = None  # the output of the same request that computes the prompt, until it has or ends
    is_paused: bool = False
    num_scheduled: int = 0  # tokens in the last plan that it is part of
    num_planned: int = 0  # plans without a result yet that it is part of
    is_awaited: bool = False  # what it computes next depends on a result
    is_reported: bool = False  # its end is part of an update
    num_overtaken: int = 0
    num_admitted_before: int = 0  # of all requests, when it last paused without a row
    finish_reason: FinishReason = FinishReason.NONE
    first_scheduled_ns: int = 0
    num_prompt_computed: int = 0
    num_scored: int = 1  # leading prompt tokens that are scored, if any is to be
    num_cached: int = 0
    num_steps: int = 0
    num_prefill_chunks: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Sorts running sequences in the order in which they are served."""
        return -self.request.priority, self.order

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_prefill(self) -> bool:
        return self.num_computed < self.prefill_end

    @property
    def is_scored(self) -> bool:
        """No prompt token is to be scored any more."""
        return not self.request.want_prompt_logprobs or self.num_scored == self.num_prompt

    @property
    def is_ready(self) -> bool:
        """It may be scheduled."""
        return not self.is_paused and self.leader is None

    @property
    def can_be_planned(self) -> bool:
        """It may be part of the next plan, if it holds a row."""
        return self.row is not None and not (self.is_paused or self.is_awaited or self.finish_reason)

    @property
    def has_progress(self) -> bool:
        """False when it gained no token since it resumed after a preemption."""
        return self.num_preemptions == 0 or len(self.tokens) > self.prefill_end

    @property
    def has_earned_its_row(self) -> bool:
        """It gained as many tokens as it must before a waiting request may take its row: 0, 1, 3, 7 and so on."""
        return len(self.tokens) - self.prefill_end >= (1 << self.num_preemptions) - 1

    def update(
        self, step_kind: StepKind, num_tokens: int, num_drafted: int, num_accepted: int, num_scored: int = 0
    ) -> tuple[int, ...]:
        """Its record of dtype `SEQUENCE_UPDATE`."""
        return (
            self.request.request_key,
            self.first_scheduled_ns,
            num_tokens,
            self.num_prompt_computed,
            num_scored,
            self.num_cached,
            num_drafted,
            num_accepted,
            self.num_steps,
            self.num_prefill_chunks,
            self.num_preemptions,
            self.num_recomputed,
            step_kind,
            self.finish_reason,
            self.drafter if num_drafted else 0,
        )


class ReferenceScheduler:
    """Same calls, plans, updates and errors as `Scheduler`, whose stub documents them."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.now_ns = 0
        self.num_added = 0
        self.sequences: dict[int, _Sequence] = {}
        self.ended: list[_Sequence] = []
        self.blocks = ReferenceBlocks(config.num_blocks, config.block_size)
        self.free_rows = list(reversed(range(config.max_num_sequences)))
        self.generations = [0] * config.max_num_sequences
        self.step_id = 0
        self.open: list[tuple[StepPlan, list[_Sequence]]] = []
        self.is_starved = False
        self.planned: list[_Sequence] = []
        self.admitted: list[_Sequence] = []
        self.block_table_updates: list[tuple[int, int, int]] = []
        self.num_budget = 0
        self.num_preempted = 0
        self.waiting: ReferenceQueue[_Sequence] = ReferenceQueue(config)
        self.passed: list[_Sequence] = []
        self.num_admitted_ever = 0
        self.draft_budget = 0
        self.num_drafts_planned = 0
        self.num_drafts_dropped = 0
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
            s = _Sequence(output, self.num_added, list(prompt), leader=leader)
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

    def _queue_followers(self, leader: _Sequence) -> None:
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
        self.is_starved = False
        self.now_ns = max(self.now_ns, now_ns)
        self.planned, self.admitted, self.block_table_updates = [], [], []
        self._measure()
        self.num_budget = self.config.max_num_batched_tokens
        self.num_preempted = 0
        advanced = self._advance()
        for s in sorted(self._active(), key=lambda s: (s.request.deadline_ns, s.order)):
            if s.request.deadline_ns and s.request.deadline_ns <= self.now_ns:
                self._end(s, FinishReason.DEADLINE)
        prefills = [s for s in self._running() if s.is_prefill]
        self._preempt_for_waiting(prefills)
        self._set_draft_budget(prefills)
        self._schedule_decodes([s for s in self._running() if not s.is_prefill])
        self._schedule_prompts(prefills)
        self.step_id += 1
        num_tokens = self.config.max_num_batched_tokens - self.num_budget
        self.step_start_ns = self.now_ns
        self.measured_tokens = num_tokens if 2 * num_tokens >= self.config.max_num_batched_tokens else 0
        plan = self._plan()
        self._retreat(advanced)
        self.open.append((plan, self.planned))
        return plan

    def _advance(self) -> list[tuple[_Sequence, int, int]]:
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

    def _retreat(self, advanced: list[tuple[_Sequence, int, int]]) -> None:
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

    def _set_draft_budget(self, prefills: list[_Sequence]) -> None:
        """Drafts get what neither running sequences nor prompts that could be computed in this step can use."""
        num_tokens = sum(s.prefill_end - s.num_computed for s in prefills if s.can_be_planned)
        if self.free_rows:
            num_tokens += sum(len(s.tokens) for s in self.waiting.members)
        self.draft_budget = max(0, self.num_budget - len(self._running()) - num_tokens)
        self.num_drafts_planned = self.num_drafts_dropped = 0

    def _preempt_for_waiting(self, prefills: list[_Sequence]) -> None:
        """Waiting requests of a higher priority than running ones take their place, then those that are overdue."""
        is_overdue = False
        while running := self._running():
            lowest = running[-1].request.priority
            if is_overdue:
                holders = {(s.request.tenant, s.request.priority) for s in running}
                s = self.waiting.overdue(lowest, holders, self.now_ns)
            else:
                s = self.waiting.best([], lowest, self.now_ns)
            if s is None or not self._admit_over_others(s, is_overdue, prefills):
                if is_overdue:
                    return
                is_overdue = True

    def _admit_over_others(self, s: _Sequence, is_overdue: bool, prefills: list[_Sequence]) -> bool:
        victims = self._victims(s, is_overdue)
        before = [p for p in prefills if p.can_be_planned and p.place < s.place]
        num_tokens = self.num_budget - len(self._running()) + len(victims)
        num_tokens -= sum(p.prefill_end - p.num_computed for p in before)
        if not victims or num_tokens <= 0:
            return False
        if self.open:
            self.is_starved = True
            return False
        for v in victims:
            self._preempt(v)
        self._admit(s, num_tokens)
        return True

    def _victims(self, s: _Sequence, is_overdue: bool) -> list[_Sequence]:
        """As few as possible, from the last one on; none where it needs none, and where all would not be enough."""
        running = self._running()
        flows = Counter((v.request.tenant, v.request.priority) for v in running)
        crowded, most = None, 1
        for v in reversed(running):
            flow = v.request.tenant, v.request.priority
            if is_overdue and v.request.priority == s.request.priority and flows[flow] > most:
                crowded, most = flow, flows[flow]
        victims: list[_Sequence] = []
        for v in reversed(running):
            if self._would_fit(s, victims):
                break
            flow = v.request.tenant, v.request.priority
            if v.finish_reason or v.num_planned > len(self.open) or not v.has_earned_its_row:
                continue
            if v.request.priority < s.request.priority or (flow == crowded and flows[flow] > 1):
                flows[flow] -= 1
                victims.append(v)
        for v in reversed(victims[:-1]):
            others = [other for other in victims if other is not v]
            if self._would_fit(s, others):
                victims = others
        return victims if self._would_fit(s, victims) else []

    def _would_fit(self, s: _Sequence, victims: list[_Sequence]) -> bool:
        """Whether it finds a row and blocks for all its tokens without these, and without what others need."""
        others = [other for other in self._running() if other not in victims]
        held = {block for other in others for block in other.blocks}
        num_reserved = sum(self._num_blocks_for(p.prefill_end) - len(p.blocks) for p in others if p.is_prefill)
        num_free = self.config.num_blocks - len(held) - num_reserved - len(others)
        num_taken = self._num_blocks_for(len(s.tokens)) - sum(block in held for block in self._hits(s))
        return len(others) < self.config.max_num_sequences and num_taken <= num_free

    def _schedule_decodes(self, decodes: list[_Sequence]) -> None:
        num_running = len(self._running())
        for s in decodes:
            if not s.can_be_planned or not (self._num_in_reach(s) or self._make_room(s)):
                continue
            num_blocks = max(len(s.blocks), self._num_blocks_for(s.num_computed + 1))
            num_blocks += max(0, self.blocks.num_free - num_running)
            num_slots = num_blocks * self.config.block_size - s.num_computed - 1
            num_proposed = len(s.drafts)
            s.drafts = s.drafts[: min(self.draft_budget - self.num_drafts_planned, num_slots)]
            self.num_drafts_planned += len(s.drafts)
            self.num_drafts_dropped += num_proposed - len(s.drafts)
            self._schedule(s, 1 + len(s.drafts))

    def _schedule_prompts(self, prefills: list[_Sequence]) -> None:
        self.passed = []
        for s in prefills:
            if not s.can_be_planned or s in self.planned:
                continue
            self._schedule_admissions(above=s.request.priority)
            if not self.planned and self._num_in_reach(s) == 0 and not self._make_room(s):
                continue
            num_tokens = min(len(s.tokens) - s.num_computed, self.num_budget, self._num_in_reach(s))
            if num_tokens:
                self._schedule(s, num_tokens)
        self._schedule_admissions(above=MIN_PRIORITY - 1)

    def _schedule_admissions(self, above: int) -> None:
        if self.num_preempted:
            return
        while s := self.waiting.best(self.passed, above, self.now_ns):
            if not self.planned and above < MIN_PRIORITY and not self.open:
                while not self.free_rows or self._num_taken(s) > self.blocks.num_free:
                    self._preempt(self._running()[-1])
                num_free = self.blocks.num_free
            else:
                running = self._running()
                num_reserved = sum(self._num_blocks_for(p.prefill_end) - len(p.blocks) for p in running if p.is_prefill)
                num_free = self.blocks.num_free - num_reserved - len(running)
            if self.open and not self.planned and (not self.free_rows or self._num_taken(s) > num_free):
                self.is_starved = True
            if any(p.num_overtaken == MAX_OVERTAKEN for p in self.passed) or len(self.passed) == MAX_OVERTAKEN:
                break
            if self.num_budget == 0 or not self.free_rows:
                break
            if self._num_taken(s) > num_free:
                self.passed.append(s)
                continue
            self._admit(s, self.num_budget)
            for p in self.passed:
                p.num_overtaken += 1

    def _num_taken(self, s: _Sequence) -> int:
        """Blocks that are free now and would not be, were it admitted: hits too, unless somebody holds them."""
        num_held = sum(self.blocks.num_holders[block] > 0 for block in self._hits(s))
        return self._num_blocks_for(len(s.tokens)) - num_held

    def _hits(self, s: _Sequence) -> list[int]:
        if s.request.bypass_prefix_cache:
            return []
        return self.blocks.hits(s.request.cache_salt, s.tokens if s.is_scored else s.tokens[: s.num_scored])

    def _admit(self, s: _Sequence, max_tokens: int) -> None:
        self.waiting.admit(s, self.now_ns)
        s.row = self.free_rows.pop()
        self.generations[s.row] += 1
        s.blocks = self._hits(s)
        for block in s.blocks:
            self.blocks.hold(block)
        s.num_cached_blocks = len(s.blocks)
        s.num_computed = len(s.blocks) * self.config.block_size
        s.num_prompt_computed = min(s.num_computed, s.num_prompt)
        if s.num_preemptions == 0:
            s.num_cached = s.num_computed
            self.waiting.charge(s, s.num_prompt - s.num_computed)
        s.prefill_end = len(s.tokens)
        s.first_scheduled_ns = s.first_scheduled_ns or self.now_ns
        self.admitted.append(s)
        self.num_admitted_ever += 1
        self._schedule(s, min(len(s.tokens) - s.num_computed, max_tokens))

    def _schedule(self, s: _Sequence, num_tokens: int) -> None:
        assert s.row is not None
        while len(s.blocks) * self.config.block_size < s.num_computed + num_tokens:
            s.blocks.append(self.blocks.take())
        for i in range(s.num_sent_blocks, len(s.blocks)):
            self.block_table_updates.append((s.row, i, s.blocks[i]))
        s.num_sent_blocks = len(s.blocks)
        s.num_scheduled = num_tokens
        s.num_planned += 1
        self.num_budget -= num_tokens
        self.planned.append(s)

    def _plan(self) -> StepPlan:
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logits_indices: list[int] = []
        scored: list[tuple[int, int]] = []
        query_offsets, logits_offsets, scored_offsets = [0], [0], [0]
        for s in self.planned:
            known = s.tokens + s.drafts
            for position in range(s.num_computed, s.num_computed + s.num_scheduled):
                if position >= len(s.tokens) - 1:
                    logits_indices.append(len(token_ids))
                if not s.is_scored and s.num_scored <= position + 1 < s.num_prompt:
                    scored.append((len(token_ids), s.tokens[position + 1]))
                block, offset = divmod(position, self.config.block_size)
                token_ids.append(known[position])
                positions.append(position)
                slots.append(s.blocks[block] * self.config.block_size + offset)
            query_offsets.append(len(token_ids))
            logits_offsets.append(len(logits_indices))
            scored_offsets.append(len(scored))
        rows = [s.row for s in self.planned if s.row is not None]
        return StepPlan(
            step_id=self.step_id,
            rows=np.array(rows, np.int32),
            generations=np.array([self.generations[row] for row in rows], np.int32),
            query_offsets=np.array(query_offsets, np.int32),
            context_lens=np.array([s.num_computed + s.num_scheduled for s in self.planned], np.int32),
            token_ids=np.array(token_ids, np.int32),
            positions=np.array(positions, np.int32),
            slot_mapping=np.array(slots, np.int32),
            logits_indices=np.array(logits_indices, np.int32),
            logits_offsets=np.array(logits_offsets, np.int32),
            scored_indices=np.array([index for index, _ in scored], np.int32),
            scored_token_ids=np.array([token for _, token in scored], np.int32),
            scored_offsets=np.array(scored_offsets, np.int32),
            block_table_updates=np.array(self.block_table_updates, np.int32).reshape(-1, 3),
            admitted=tuple((s.row, s.request) for s in self.admitted if s.row is not None),
            output_offsets=np.cumsum([0] + [s.num_output for s in self.admitted]).astype(np.int32),
            output_token_ids=np.array([t for s in self.admitted for t in s.tokens[s.num_prompt :]], np.int32),
            num_prefill_sequences=sum(s.is_prefill for s in self.planned),
            num_prefill_tokens=sum(s.num_scheduled for s in self.planned if s.is_prefill),
            num_preempted=self.num_preempted,
        )

    # Preemption

    def _make_room(self, s: _Sequence) -> bool:
        if not self.blocks.num_free and self.open:
            self.is_starved = True
            return False
        while not self.blocks.num_free:
            running = self._running()
            paused = [v for v in running if v.is_paused]
            behind = [v for v in running if v.place >= s.place]
            with_progress = [v for v in behind if v.has_progress]
            victim = (paused or with_progress or behind)[-1]
            self._preempt(victim)
            if victim is s:
                return False
        return True

    def _preempt(self, s: _Sequence) -> None:
        self.num_preempted += 1
        s.num_preemptions += 1
        if len(s.tokens) > s.prefill_end:
            s.num_overtaken = 0
        s.num_computed = s.num_prompt_computed = 0
        s.drafts = []
        self._release(s)
        if s.is_paused:
            s.num_admitted_before = self.num_admitted_ever
        else:
            self.waiting.push(s, self.now_ns)

    def _release(self, s: _Sequence) -> None:
        assert s.row is not None
        for block in reversed(s.blocks):
            self.blocks.release(block)
        self.free_rows.append(s.row)
        s.row, s.blocks, s.num_sent_blocks, s.num_cached_blocks = None, [], 0, 0

    def _end(self, s: _Sequence, reason: FinishReason) -> None:
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
        self, s: _Sequence, plan: StepPlan, b: int, accepted: list[int], failed: bool, constraint_reason: int
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

    def _cache_full_blocks(self, s: _Sequence) -> None:
        for i in range(s.num_cached_blocks, s.num_computed // self.config.block_size):
            end = (i + 1) * self.config.block_size
            block = self.blocks.cache(s.blocks[i], s.request.cache_salt, s.tokens[:end])
            if block != s.blocks[i]:
                s.blocks[i] = block
                s.num_sent_blocks = min(s.num_sent_blocks, i)
            s.num_cached_blocks += 1

    def _finish_reason(self, s: _Sequence) -> FinishReason:
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

    def _find(self, request_key: int) -> _Sequence | None:
        s = self.sequences.get(request_key)
        return None if s is None or s.finish_reason else s

    def _active(self) -> list[_Sequence]:
        return [s for s in self.sequences.values() if not s.finish_reason]

    def _waiting(self) -> list[_Sequence]:
        return [s for s in self._active() if s.row is None]

    def _running(self) -> list[_Sequence]:
        return sorted((s for s in self.sequences.values() if s.row is not None), key=lambda s: s.place)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _num_in_reach(self, s: _Sequence) -> int:
        """Tokens for which it has slots, or could get them without a preemption."""
        return (len(s.blocks) + self.blocks.num_free) * self.config.block_size - s.num_computed
