"""What a step of the reference scheduler computes, as `Planner` decides it, in plain Python."""

from __future__ import annotations

from collections import Counter

import numpy as np

from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.reference_blocks import ReferenceBlocks
from foreword.scheduler.reference_queue import ReferenceQueue
from foreword.scheduler.reference_sequence import ReferenceSequence
from foreword.scheduler.request import MIN_PRIORITY
from foreword.scheduler.step import StepPlan

MAX_OVERTAKEN = 4


class ReferencePlanner:
    """State of the sequences, and the rules of a plan."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.now_ns = 0
        self.sequences: dict[int, ReferenceSequence] = {}
        self.blocks = ReferenceBlocks(config.num_blocks, config.block_size)
        self.free_rows = list(reversed(range(config.max_num_sequences)))
        self.generations = [0] * config.max_num_sequences
        self.waiting: ReferenceQueue[ReferenceSequence] = ReferenceQueue(config)
        self.num_admitted_ever = 0
        self.step_id = 0
        self.open: list[tuple[StepPlan, list[ReferenceSequence]]] = []
        self.is_starved = False
        self.planned: list[ReferenceSequence] = []
        self.admitted: list[ReferenceSequence] = []
        self.passed: list[ReferenceSequence] = []
        self.block_table_updates: list[tuple[int, int, int]] = []
        self.num_budget = 0
        self.num_preempted = 0
        self.draft_budget = 0
        self.num_blocks_for_prompts = 0
        self.num_drafts_planned = 0
        self.num_drafts_dropped = 0

    def _plan_all(self) -> StepPlan:
        self.planned, self.admitted, self.block_table_updates = [], [], []
        self.is_starved = False
        self.num_budget = self.config.max_num_batched_tokens
        self.num_preempted = 0
        prefills = [s for s in self._running() if s.is_prefill]
        self._preempt_for_waiting(prefills)
        self._set_draft_budget(prefills)
        self._schedule_decodes([s for s in self._running() if not s.is_prefill])
        self._schedule_prompts(prefills)
        return self._plan()

    def _set_draft_budget(self, prefills: list[ReferenceSequence]) -> None:
        """Drafts get what neither running sequences nor prompts that could be computed in this step can use.

        Waiting prompts may take a block more each than their tokens fill.
        """
        num_tokens = sum(s.prefill_end - s.num_computed for s in prefills if s.can_be_planned)
        self.num_blocks_for_prompts = self._num_reserved(self._running())
        if self.free_rows:
            num_waiting_tokens = sum(len(s.tokens) for s in self.waiting.members)
            num_tokens += num_waiting_tokens
            self.num_blocks_for_prompts += num_waiting_tokens // self.config.block_size + len(self.waiting.members)
        self.draft_budget = max(0, self.num_budget - len(self._running()) - num_tokens)
        self.num_drafts_planned = self.num_drafts_dropped = 0

    def _preempt_for_waiting(self, prefills: list[ReferenceSequence]) -> None:
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

    def _admit_over_others(self, s: ReferenceSequence, is_overdue: bool, prefills: list[ReferenceSequence]) -> bool:
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

    def _victims(self, s: ReferenceSequence, is_overdue: bool) -> list[ReferenceSequence]:
        """As few as possible, from the last one on; none where it needs none, and where all would not be enough."""
        running = self._running()
        flows = Counter((v.request.tenant, v.request.priority) for v in running)
        crowded, most = None, 1
        for v in reversed(running):
            flow = v.request.tenant, v.request.priority
            if is_overdue and v.request.priority == s.request.priority and flows[flow] > most:
                crowded, most = flow, flows[flow]
        victims: list[ReferenceSequence] = []
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

    def _would_fit(self, s: ReferenceSequence, victims: list[ReferenceSequence]) -> bool:
        """Whether it finds a row and blocks for all its tokens without these, and without what others need."""
        others = [other for other in self._running() if other not in victims]
        held = {block for other in others for block in other.blocks}
        num_reserved = self._num_reserved(others)
        num_free = self.config.num_blocks - len(held) - num_reserved - len(others)
        num_taken = self._num_blocks_for(len(s.tokens)) - sum(block in held for block in self._hits(s))
        return len(others) < self.config.max_num_sequences and num_taken <= num_free

    def _schedule_decodes(self, decodes: list[ReferenceSequence]) -> None:
        num_running = len(self._running())
        for s in decodes:
            if not s.can_be_planned or not (self._num_in_reach(s) or self._make_room(s)):
                continue
            num_blocks = max(len(s.blocks), self._num_blocks_for(s.num_computed + 1))
            num_blocks += max(0, self.blocks.num_free - num_running - self.num_blocks_for_prompts)
            num_slots = num_blocks * self.config.block_size - s.num_computed - 1
            num_proposed = len(s.drafts)
            s.drafts = s.drafts[: min(self.draft_budget - self.num_drafts_planned, num_slots)]
            self.num_drafts_planned += len(s.drafts)
            self.num_drafts_dropped += num_proposed - len(s.drafts)
            self._schedule(s, 1 + len(s.drafts))

    def _schedule_prompts(self, prefills: list[ReferenceSequence]) -> None:
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
                num_free = self.blocks.num_free - self._num_reserved(running) - len(running)
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

    def _num_taken(self, s: ReferenceSequence) -> int:
        """Blocks that are free now and would not be, were it admitted: hits too, unless somebody holds them."""
        num_held = sum(self.blocks.num_holders[block] > 0 for block in self._hits(s))
        return self._num_blocks_for(len(s.tokens)) - num_held

    def _hits(self, s: ReferenceSequence) -> list[int]:
        if s.request.bypass_prefix_cache:
            return []
        return self.blocks.hits(s.request.cache_salt, s.tokens if s.is_scored else s.tokens[: s.num_scored])

    def _admit(self, s: ReferenceSequence, max_tokens: int) -> None:
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

    def _schedule(self, s: ReferenceSequence, num_tokens: int) -> None:
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

    def _make_room(self, s: ReferenceSequence) -> bool:
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

    def _preempt(self, s: ReferenceSequence) -> None:
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

    def _release(self, s: ReferenceSequence) -> None:
        assert s.row is not None
        for block in reversed(s.blocks):
            self.blocks.release(block)
        self.free_rows.append(s.row)
        s.row, s.blocks, s.num_sent_blocks, s.num_cached_blocks = None, [], 0, 0

    def _active(self) -> list[ReferenceSequence]:
        return [s for s in self.sequences.values() if not s.finish_reason]

    def _waiting(self) -> list[ReferenceSequence]:
        return [s for s in self._active() if s.row is None]

    def _running(self) -> list[ReferenceSequence]:
        return sorted((s for s in self.sequences.values() if s.row is not None), key=lambda s: s.place)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _num_reserved(self, sequences: list[ReferenceSequence]) -> int:
        """Blocks that these lack for what they knew when they were admitted."""
        return sum(max(0, self._num_blocks_for(s.prefill_end) - len(s.blocks)) for s in sequences if s.is_prefill)

    def _num_in_reach(self, s: ReferenceSequence) -> int:
        """Tokens for which it has slots, or could get them without a preemption."""
        return (len(s.blocks) + self.blocks.num_free) * self.config.block_size - s.num_computed
