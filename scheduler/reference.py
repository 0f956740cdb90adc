"""The scheduler once more in plain Python: slow, obvious, and equal to the real one in every plan and update.

Tests drive both with the same calls. Where the two differ, one of them misreads the rules; this one is written so
that a reader can tell which.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.errors import ContextLengthExceeded, DeadlineInfeasible, DuplicateRequest, QueueFull
from foreword.scheduler.reference_blocks import ReferenceBlocks
from foreword.scheduler.request import Request
from foreword.scheduler.step import (
    SEQUENCE_UPDATE,
    Drafts,
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
    row: int | None = None
    blocks: list[int] = field(default_factory=list)
    num_sent_blocks: int = 0
    num_cached_blocks: int = 0
    num_computed: int = 0
    num_computed_max: int = 0
    prefill_end: int = 0
    leader: _Sequence | None = None  # the output of the same request that computes the prompt
    is_paused: bool = False
    num_scheduled: int = 0  # tokens in the plan that has not been applied
    num_overtaken: int = 0
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
    def rank(self) -> tuple[int, int]:
        """Sorts sequences in the order in which they are served."""
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
        return not self.is_paused and not self.is_following

    @property
    def is_following(self) -> bool:
        """True until its leader has computed the prompt or has ended."""
        leader = self.leader
        return leader is not None and not leader.finish_reason and leader.num_computed_max < leader.num_prompt

    @property
    def has_progress(self) -> bool:
        """False when it gained no token since it resumed after a preemption."""
        return self.num_preemptions == 0 or len(self.tokens) > self.prefill_end

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
        self.is_step_open = False
        self.planned: list[_Sequence] = []
        self.admitted: list[_Sequence] = []
        self.block_table_updates: list[tuple[int, int, int]] = []
        self.num_budget = 0
        self.has_preempted = False

    # Requests

    def add(self, request: Request, now_ns: int) -> None:
        """Queue a request."""
        self.now_ns = max(self.now_ns, now_ns)
        prompt = request.prompt_token_ids.tolist()
        if not prompt or min(prompt) < 0 or request.stopping.max_output_tokens < 1:
            raise ValueError("malformed request")
        if not 1 <= request.num_outputs <= self.config.max_num_waiting:
            raise ValueError("number of outputs")
        outputs = [request.output(i) for i in range(request.num_outputs)]
        if any(output.request_key in self.sequences for output in outputs):
            raise DuplicateRequest("active")
        max_tokens = len(prompt) + request.stopping.max_output_tokens
        if max_tokens > self.config.max_model_len or self._num_blocks_for(max_tokens - 1) > self.config.num_blocks:
            raise ContextLengthExceeded("too long")
        if request.deadline_ns and request.deadline_ns <= self.now_ns:
            raise DeadlineInfeasible("passed")
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
            leader = leader or s
            self.sequences[output.request_key] = s
            self.num_added += 1

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
        s.is_paused = True
        if not s.num_scheduled:
            s.drafts = []
        return True

    def resume(self, request_key: int) -> bool:
        """Undo `pause`."""
        if (s := self._find(request_key)) is None:
            return False
        s.is_paused = False
        return True

    # Schedule

    def schedule(self, now_ns: int) -> StepPlan:
        """Decide the next step."""
        if self.is_step_open:
            raise RuntimeError("step is open")
        self.now_ns = max(self.now_ns, now_ns)
        self.planned, self.admitted, self.block_table_updates = [], [], []
        self.num_budget = self.config.max_num_batched_tokens
        self.has_preempted = False
        for s in sorted(self._active(), key=lambda s: (s.request.deadline_ns, s.order)):
            if s.request.deadline_ns and s.request.deadline_ns <= self.now_ns:
                self._end(s, FinishReason.DEADLINE)
        running = self._running()
        self._schedule_decodes([s for s in running if not s.is_prefill])
        prefills = [s for s in running if s.is_prefill and s.row is not None]
        self._schedule_prefills(prefills)
        if not self.has_preempted:
            self._schedule_admissions(sum(self._num_blocks_for(s.prefill_end) - len(s.blocks) for s in prefills))
        self.step_id += 1
        self.is_step_open = True
        return self._plan()

    def _schedule_decodes(self, decodes: list[_Sequence]) -> None:
        num_running = len(self._running())
        draft_budget = self.config.max_num_batched_tokens - num_running
        for s in decodes:
            if s.is_paused or s.row is None or not (self._num_in_reach(s) or self._make_room(s)):
                continue
            num_blocks = max(len(s.blocks), self._num_blocks_for(s.num_computed + 1))
            num_blocks += max(0, self.blocks.num_free - num_running)
            num_slots = num_blocks * self.config.block_size - s.num_computed - 1
            s.drafts = s.drafts[: min(draft_budget, num_slots)]
            draft_budget -= len(s.drafts)
            self._schedule(s, 1 + len(s.drafts))

    def _schedule_prefills(self, prefills: list[_Sequence]) -> None:
        for s in prefills:
            if s.is_paused or s.row is None:
                continue
            if not self.planned and self._num_in_reach(s) == 0 and not self._make_room(s):
                continue
            num_tokens = min(len(s.tokens) - s.num_computed, self.num_budget, self._num_in_reach(s))
            if num_tokens:
                self._schedule(s, num_tokens)

    def _schedule_admissions(self, num_reserved: int) -> None:
        passed: list[_Sequence] = []
        for s in sorted((s for s in self._waiting() if s.is_ready), key=lambda s: s.rank):
            if not self.planned:
                while not self.free_rows or self._num_taken(s) > self.blocks.num_free:
                    self._preempt(self._running()[-1])
                num_free = self.blocks.num_free
            else:
                num_free = self.blocks.num_free - num_reserved - len(self._running())
            if any(p.num_overtaken == MAX_OVERTAKEN for p in passed) or len(passed) == MAX_OVERTAKEN:
                break
            if self.num_budget == 0 or not self.free_rows:
                break
            if self._num_taken(s) > num_free:
                passed.append(s)
                continue
            self._admit(s)
            for p in passed:
                p.num_overtaken += 1

    def _num_taken(self, s: _Sequence) -> int:
        """Blocks that are free now and would not be, were it admitted: hits too, unless somebody holds them."""
        num_held = sum(self.blocks.num_holders[block] > 0 for block in self._hits(s))
        return self._num_blocks_for(len(s.tokens)) - num_held

    def _hits(self, s: _Sequence) -> list[int]:
        if s.request.bypass_prefix_cache:
            return []
        return self.blocks.hits(s.request.cache_salt, s.tokens if s.is_scored else s.tokens[: s.num_scored])

    def _admit(self, s: _Sequence) -> None:
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
        s.prefill_end = len(s.tokens)
        s.num_overtaken = 0
        s.first_scheduled_ns = s.first_scheduled_ns or self.now_ns
        self.admitted.append(s)
        self._schedule(s, min(len(s.tokens) - s.num_computed, self.num_budget))

    def _schedule(self, s: _Sequence, num_tokens: int) -> None:
        assert s.row is not None
        while len(s.blocks) * self.config.block_size < s.num_computed + num_tokens:
            s.blocks.append(self.blocks.take())
        for i in range(s.num_sent_blocks, len(s.blocks)):
            self.block_table_updates.append((s.row, i, s.blocks[i]))
        s.num_sent_blocks = len(s.blocks)
        s.num_scheduled = num_tokens
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
        )

    # Preemption

    def _make_room(self, s: _Sequence) -> bool:
        while not self.blocks.num_free:
            running = self._running()
            paused = [v for v in running if v.is_paused]
            behind = [v for v in running if v.rank >= s.rank]
            with_progress = [v for v in behind if v.has_progress]
            victim = (paused or with_progress or behind)[-1]
            self._preempt(victim)
            if victim is s:
                return False
        return True

    def _preempt(self, s: _Sequence) -> None:
        self.has_preempted = True
        s.num_preemptions += 1
        s.num_computed = s.num_prompt_computed = 0
        s.drafts = []
        self._release(s)

    def _release(self, s: _Sequence) -> None:
        assert s.row is not None
        for block in reversed(s.blocks):
            self.blocks.release(block)
        self.free_rows.append(s.row)
        s.row, s.blocks, s.num_sent_blocks, s.num_cached_blocks = None, [], 0, 0

    def _end(self, s: _Sequence, reason: FinishReason) -> None:
        s.finish_reason = reason
        self.ended.append(s)
        if s.row is not None and not s.num_scheduled:
            self._release(s)

    # Apply

    def apply(self, result: StepResult | None) -> StepUpdate:
        """Take a step's result."""
        if not self.is_step_open:
            raise ValueError("no open step")
        if (result is None and self.planned) or (result is not None and result.step_id != self.step_id):
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
        self._check_result(offsets, token_ids, failed)
        self._check_drafts(drafts, offsets)
        updates: list[tuple[int, ...]] = []
        update_token_ids: list[int] = []
        update_logprobs: list[float] = []
        result_indices: list[int] = []
        scored_indices: list[int] = []
        num_scored = 0
        finished: list[_Sequence] = []
        for b, s in enumerate(self.planned):
            first_scored, num_scored = num_scored, num_scored + self._num_to_score(s)
            if s.finish_reason:
                continue
            scored_indices += range(first_scored, num_scored)
            start, end = offsets[b], offsets[b + 1]
            record = self._commit(s, token_ids[start:end], failed[b], constraint_reasons[b])
            updates.append(record)
            if drafts is not None and not s.is_paused and not s.finish_reason:
                num_left = s.request.stopping.max_output_tokens - s.num_output
                s.drafts = drafts.token_ids[drafts.offsets[b] : drafts.offsets[b + 1]].tolist()[: num_left - 1]
            num_kept = record[2]
            update_token_ids += token_ids[start : start + num_kept]
            update_logprobs += logprobs[start : start + num_kept]
            result_indices += range(start, start + num_kept)
            if s.finish_reason:
                finished.append(s)
        updates += [s.update(StepKind.NONE, 0, 0, 0) for s in self.ended]
        for s in self.planned:
            s.num_scheduled = 0
        for s in self.ended + finished:
            if s.row is not None:
                self._release(s)
            del self.sequences[s.request.request_key]
        self.ended = []
        self.is_step_open = False
        return StepUpdate(
            self.step_id,
            np.array(updates, SEQUENCE_UPDATE),
            np.array(update_token_ids, np.int32),
            np.array(update_logprobs, np.float32),
            np.array(result_indices, np.int32),
            np.array(scored_indices, np.int32),
        )

    def _num_to_score(self, s: _Sequence) -> int:
        """Prompt tokens that the plan has scored."""
        if s.is_scored:
            return 0
        return max(0, min(s.num_computed + s.num_scheduled + 1, s.num_prompt) - s.num_scored)

    def _commit(self, s: _Sequence, accepted: list[int], failed: bool, constraint_reason: int) -> tuple[int, ...]:
        kind = StepKind.PREFILL if s.is_prefill else StepKind.VERIFY if s.drafts else StepKind.DECODE
        num_drafted = len(s.drafts)
        start, end = s.num_computed, s.num_computed + s.num_scheduled
        s.num_steps += 1
        s.num_prefill_chunks += start < s.num_prompt
        s.num_recomputed += max(0, min(end, s.num_computed_max) - start)
        num_scored = self._num_to_score(s)
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

    def _check_result(self, offsets: list[int], token_ids: list[int], failed: list[bool]) -> None:
        if len(offsets) != len(self.planned) + 1 or len(failed) != len(self.planned) or offsets[-1] != len(token_ids):
            raise ValueError("wrong shape")
        if any(token_id < 0 for token_id in token_ids):
            raise ValueError("negative token")
        for b, s in enumerate(self.planned):
            is_complete = s.num_computed + s.num_scheduled >= len(s.tokens)
            num_logits = len(s.drafts) + 1 if is_complete and not failed[b] else 0
            if not min(1, num_logits) <= offsets[b + 1] - offsets[b] <= num_logits:
                raise ValueError("wrong number of tokens")

    def _check_drafts(self, drafts: Drafts | None, token_offsets: list[int]) -> None:
        if drafts is None:
            return
        counts = np.diff(drafts.offsets)
        if len(counts) != len(self.planned) or drafts.offsets[0] or drafts.offsets[-1] != len(drafts.token_ids):
            raise ValueError("wrong shape")
        if (counts < 0).any() or (drafts.token_ids < 0).any() or counts[np.diff(token_offsets) == 0].any():
            raise ValueError("wrong drafts")

    # State

    @property
    def has_work(self) -> bool:
        """A `schedule` would lead to a plan or an update."""
        return bool(self.ended) or any(s.is_ready for s in self._active())

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
        return sorted((s for s in self.sequences.values() if s.row is not None), key=lambda s: s.rank)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _num_in_reach(self, s: _Sequence) -> int:
        """Tokens for which it has slots, or could get them without a preemption."""
        return (len(s.blocks) + self.blocks.num_free) * self.config.block_size - s.num_computed
