"""The scheduler's two steps over C state: `schedule` writes a plan, `apply` takes its result.

Both cores run without the GIL and allocate nothing.
"""

cimport cython
from libc.stdint cimport INT32_MAX
from libc.stdlib cimport free, malloc

from foreword.scheduler.admission cimport check_bounds, check_deadline, check_queue, check_request
from foreword.scheduler.commit cimport CANCELLED, DEADLINE, FAILED, commit, report
from foreword.scheduler.heap_forest cimport EMPTY
from foreword.scheduler.planner cimport MAX_OVERTAKEN

from foreword.scheduler.errors import DuplicateRequest
from foreword.scheduler.step import DraftState, SchedulerLoad, StepResult

cdef enum:
    UNKNOWN_TOKEN = -1


@cython.final
cdef class Scheduler:
    def __cinit__(self, config):
        cdef int num_rows = config.max_num_sequences
        if config.num_blocks * config.block_size > INT32_MAX:
            raise ValueError(f"num_blocks * block_size must be at most {INT32_MAX}: slots are int32")
        self.config = config
        self.max_model_len = config.max_model_len
        self.block_size = config.block_size
        self.lookahead = config.lookahead
        self.prefix_cache = PrefixCache(config.num_blocks, config.block_size, config.hash_key)
        self.table = SequenceTable(num_rows + config.max_num_waiting, self.prefix_cache)
        self.sequences = self.table.sequences
        self.planner = Planner(self.table, config)
        self.rows = self.planner.rows
        self.waiting = self.planner.waiting
        self.steps = tuple(
            [StepBuffers(num_rows, config.max_num_batched_tokens, self.table.capacity,
                         num_rows * config.max_blocks_per_sequence)
             for _ in range(1 + config.lookahead)]
        )
        self.deadlines = HeapForest(self.table.capacity)
        self.first_deadline = EMPTY
        self.throughput = Throughput(config.max_num_batched_tokens)
        self.planned = <int*>malloc(len(self.steps) * num_rows * sizeof(int))
        self.ended = <int*>malloc(self.table.capacity * sizeof(int))
        if self.planned == NULL or self.ended == NULL:
            raise MemoryError("scheduler")

    def __dealloc__(self):
        free(self.planned)
        free(self.ended)

    # Requests

    def add(self, request, now_ns):
        self.now_ns = max(self.now_ns, now_ns)
        prompt = check_request(request, self.config)
        outputs = [request.output(i) for i in range(request.num_outputs)]
        for output in outputs:
            if self.table.find(output.request_key) >= 0:
                raise DuplicateRequest(f"request {output.request_key} is active", request_key=output.request_key)
        check_bounds(request, self.config)
        if request.deadline_ns:
            num_tokens = self.rows.num_prefill_tokens_of(request.priority)
            num_tokens += self.waiting.num_tokens_before(request.tenant, request.priority)
            check_deadline(request, self.now_ns, num_tokens, self.throughput.duration_of(num_tokens))
        check_queue(
            request, self.config, self.planner.num_waiting, self.planner.num_waiting_tokens, self.table.num_free
        )
        cdef int entry, leader = -1
        cdef Sequence* s
        for output in outputs:
            entry = self.table.add(output, prompt)
            s = &self.sequences[entry]
            s.flow = self.waiting.open_flow(output.tenant, output.priority)
            if s.deadline_ns:
                self.first_deadline = self.deadlines.push(self.first_deadline, entry, s.deadline_ns, s.order)
            if leader < 0:
                leader = entry
            else:
                self.follow(entry, leader)
            self.planner.wait(entry, self.now_ns)

    def cancel(self, request_key):
        cdef int entry = self.find_active(request_key)
        if entry < 0:
            return False
        self.end(entry, CANCELLED)
        return True

    def pause(self, request_key):
        cdef int entry = self.find_active(request_key)
        if entry < 0:
            return False
        cdef Sequence* s = &self.sequences[entry]
        if not s.is_paused:
            s.is_paused = True
            if not s.num_planned:
                s.num_draft = 0
            if s.row >= 0:
                self.planner.num_paused += 1
            elif s.num_overtaken < MAX_OVERTAKEN:  # who may not be overtaken any more keeps its place
                self.waiting.remove(entry)
                s.num_admitted_before = self.planner.num_admitted_ever
        return True

    def resume(self, request_key):
        cdef int entry = self.find_active(request_key)
        if entry < 0:
            return False
        cdef Sequence* s = &self.sequences[entry]
        if s.is_paused:
            s.is_paused = False
            if s.row >= 0:
                self.planner.num_paused -= 1
            elif s.leader < 0 and not self.waiting.holds(entry):
                s.num_overtaken = <int>min(
                    <int64_t>MAX_OVERTAKEN, s.num_overtaken + self.planner.num_admitted_ever - s.num_admitted_before
                )
                self.waiting.push(entry, self.now_ns)
        return True

    cdef int find_active(self, object request_key) except -2:
        cdef int entry = self.table.find(request_key)
        return -1 if entry >= 0 and self.sequences[entry].update.finish_reason else entry

    cdef void follow(self, int entry, int leader) noexcept nogil:
        """Let an output wait for its prompt, which `leader` computes: then it finds the full blocks in the cache."""
        cdef Sequence* s = &self.sequences[entry]
        s.leader = leader
        s.follower = self.sequences[leader].follower
        self.sequences[leader].follower = entry

    cdef void leave_leader(self, int entry) noexcept nogil:
        """Take an output that ends while it follows from the list of its leader's followers."""
        cdef int before = self.sequences[entry].leader
        if before < 0:
            return
        while self.sequences[before].follower != entry:
            before = self.sequences[before].follower
        self.sequences[before].follower = self.sequences[entry].follower
        self.sequences[entry].leader = self.sequences[entry].follower = -1

    cdef int queue_followers(self, int leader) except -1 nogil:
        """Queue the outputs that waited for a prompt, now that it is computed or its sequence has ended."""
        cdef int entry = self.sequences[leader].follower
        cdef Sequence* s
        while entry >= 0:
            s = &self.sequences[entry]
            self.leave_leader(entry)
            if not s.is_paused:
                self.waiting.push(entry, self.now_ns)
            entry = self.sequences[leader].follower
        return 0

    cdef int end(self, int entry, int finish_reason) except -1 nogil:
        """End a sequence outside of a result. One that is being computed keeps its row until the result is there."""
        cdef Sequence* s = &self.sequences[entry]
        s.update.finish_reason = finish_reason
        self.leave_leader(entry)
        self.queue_followers(entry)
        self.first_deadline = self.deadlines.remove(self.first_deadline, entry)
        self.ended[self.num_ended] = entry
        self.num_ended += 1
        if s.row < 0:
            self.waiting.remove(entry)
            self.planner.num_waiting -= 1
            self.planner.num_waiting_tokens -= s.num_prompt
        elif not s.num_planned:
            self.planner.release_row(entry)
        return 0

    # Schedule

    @property
    def can_schedule(self):
        return self.num_open == 0 or (self.num_open < len(self.steps) and not self.planner.is_starved)

    def schedule(self, now_ns):
        if not self.can_schedule:
            raise RuntimeError("the last plan has not been applied")
        self.now_ns = max(self.now_ns, now_ns)
        cdef StepBuffers before = self.step_of(self.step_id)
        cdef const int* planned_before = self.planned_in(self.step_id)
        self.step_id += 1
        cdef StepBuffers step = self.step_of(self.step_id)
        self.planner.begin(step, self.planned_in(self.step_id), self.num_open, self.now_ns)
        with nogil:
            self.throughput.finish(self.now_ns)
            if self.num_open:
                self.advance(before, planned_before)
            while self.first_deadline != EMPTY and self.sequences[self.first_deadline].deadline_ns <= self.now_ns:
                self.end(self.first_deadline, DEADLINE)
            self.planner.plan_all()
            if self.num_open:
                self.retreat(before, planned_before)
            self.throughput.start(self.now_ns, step.num_tokens)
        self.num_open += 1
        cdef int i
        cdef const int* entries = self.planner.admitted
        admitted = tuple(
            [(self.sequences[entries[i]].row, self.table.requests[entries[i]]) for i in range(self.planner.num_admitted)]
        )
        offsets, token_ids = self.table.outputs(entries, self.planner.num_admitted)
        return step.plan(self.step_id, admitted, offsets, token_ids, self.planner.num_preempted)

    cdef StepBuffers step_of(self, int64_t step_id):
        return self.steps[step_id % len(self.steps)]

    cdef int* planned_in(self, int64_t step_id) noexcept nogil:
        return self.planned + (step_id % (1 + self.lookahead)) * self.rows.num_rows

    cdef void advance(self, StepBuffers step, const int* planned) noexcept nogil:
        """Let the sequences of the open plan look as its result will leave them, the token that it draws unknown.

        Left out of the next plan is one whose drafts it checks, that its result ends, or that draws by its last token.
        """
        cdef int b, num_logits
        cdef Sequence* s
        for b in range(step.num_sequences):
            s = &self.sequences[planned[b]]
            num_logits = step.logits_offsets[b + 1] - step.logits_offsets[b]
            s.is_awaited = num_logits > 1 or (
                num_logits == 1 and (s.needs_last_token or s.num_tokens + 1 == s.max_tokens)
            )
            if s.is_awaited or s.update.finish_reason:
                continue
            s.num_ahead = step.query_offsets[b + 1] - step.query_offsets[b]
            self.rows.num_prefill_tokens -= max(0, min(s.num_ahead, s.prefill_end - s.num_computed))
            s.num_computed += s.num_ahead
            if num_logits:
                s.token_ids[s.num_tokens] = UNKNOWN_TOKEN
                s.num_tokens += 1

    cdef void retreat(self, StepBuffers step, const int* planned) noexcept nogil:
        """Undo `advance`."""
        cdef int b
        cdef Sequence* s
        for b in range(step.num_sequences):
            s = &self.sequences[planned[b]]
            s.is_awaited = False
            if s.num_ahead:
                s.num_tokens -= step.logits_offsets[b + 1] - step.logits_offsets[b]
                s.num_computed -= s.num_ahead
                self.rows.num_prefill_tokens += max(0, min(s.num_ahead, s.prefill_end - s.num_computed))
                s.num_ahead = 0

    # Apply

    def apply(self, result):
        if not self.num_open:
            raise ValueError("there is no plan to apply a result to")
        cdef int64_t step_id = self.step_id - self.num_open + 1
        cdef StepBuffers step = self.step_of(step_id)
        if result is None:
            if step.num_sequences:
                raise ValueError(f"plan {step_id} has {step.num_sequences} sequences and needs a result")
        elif not isinstance(result, StepResult):
            raise ValueError(f"result must be a StepResult or None, got {type(result).__name__}")
        elif result.step_id != step_id:
            raise ValueError(f"result.step_id must be {step_id}, got {result.step_id}")
        else:
            step.read_result(result)
        with nogil:
            self.apply_all(step, self.planned_in(step_id))
        self.forget_ended()
        self.num_open -= 1
        if not self.has_work:
            self.throughput.drop()
        return step.update(step_id, self.draft_state())

    cdef object draft_state(self):
        if self.planner.num_drafts_planned or not self.planner.num_drafts_dropped:
            return DraftState.ACTIVE
        return DraftState.CACHE_PRESSURE if self.planner.draft_budget else DraftState.PREFILL_PRESSURE

    cdef int apply_all(self, StepBuffers step, const int* planned) except -1 nogil:
        """Commit the planned sequences in order, then report those that a cancel or a deadline ended."""
        cdef int b, i, entry, num_prefill_tokens, num_ended_before = self.num_ended
        cdef bint has_filled_block
        cdef Sequence* s
        step.num_updates = step.num_update_tokens = step.num_update_scored = 0
        for b in range(step.num_sequences):
            entry = planned[b]
            s = &self.sequences[entry]
            s.num_planned -= 1
            if s.update.finish_reason:
                continue
            num_prefill_tokens = s.prefill_end - s.num_computed
            commit(s, step, b, self.max_model_len)
            if num_prefill_tokens > 0:
                self.rows.num_prefill_tokens -= min(num_prefill_tokens, s.num_computed + num_prefill_tokens - s.prefill_end)
            self.waiting.charge(s.flow, s.update.num_tokens)
            has_filled_block = s.num_computed >= (s.num_cached_blocks + 1) * self.block_size
            if has_filled_block and not s.bypasses_cache and s.update.finish_reason != FAILED:
                self.rows.cache_full_blocks(s)
            if s.follower >= 0 and (s.num_computed >= s.num_prompt or s.update.finish_reason):
                self.queue_followers(entry)
            if s.update.finish_reason:
                self.first_deadline = self.deadlines.remove(self.first_deadline, entry)
                self.ended[self.num_ended] = entry
                self.num_ended += 1
                s.is_reported = True
        for i in range(num_ended_before):
            s = &self.sequences[self.ended[i]]
            if not s.is_reported:
                report(s, step)
                s.is_reported = True
        for i in range(self.num_ended):
            s = &self.sequences[self.ended[i]]
            if s.row >= 0 and s.num_planned == 0:
                self.planner.release_row(self.ended[i])
        self.rows.compact()
        return 0

    cdef int forget_ended(self) except -1:
        """Forget the ended sequences, except those that an open plan still computes."""
        cdef int i, entry, num_kept = 0
        for i in range(self.num_ended):
            entry = self.ended[i]
            if self.sequences[entry].num_planned:
                self.ended[num_kept] = entry
                num_kept += 1
            else:
                self.waiting.close_flow(self.sequences[entry].flow)
                self.table.remove(entry)
        self.num_ended = num_kept
        return 0

    # State

    @property
    def has_work(self):
        return self.rows.num_running > self.planner.num_paused or self.waiting.size > 0 or self.num_ended > 0

    @property
    def next_deadline_ns(self):
        return 0 if self.first_deadline == EMPTY else self.sequences[self.first_deadline].deadline_ns

    def load(self):
        return SchedulerLoad(
            num_running=self.rows.num_running,
            num_waiting=self.planner.num_waiting,
            num_waiting_tokens=self.planner.num_waiting_tokens,
            num_paused=self.planner.num_paused,
            num_free_blocks=self.rows.pool.num_free,
            num_cached_blocks=self.prefix_cache.num_cached,
            num_blocks=self.rows.pool.num_blocks,
        )

    def check_invariants(self):
        cdef Sequence* s
        self.rows.check_invariants()
        self.waiting.check_invariants()
        num_waiting = num_waiting_tokens = num_paused = num_deadlines = num_rows = 0
        assert len(self.table.entries) + self.table.num_free == self.table.capacity, "an entry is lost"
        for entry in self.table.entries.values():
            s = &self.sequences[entry]
            num_rows += s.row >= 0
            num_paused += s.row >= 0 and s.is_paused
            assert s.num_prompt <= s.num_tokens <= s.max_tokens, "a sequence has too few or too many tokens"
            assert s.num_computed <= s.num_tokens, "a sequence has computed tokens that it does not have"
            assert s.num_planned <= self.num_open, "a sequence is planned outside of a step"
            assert s.leader < 0 or s.row < 0, "an output computes its prompt beside its leader"
            assert s.leader < 0 or not self.sequences[s.leader].update.finish_reason, "a leader has ended"
            if s.update.finish_reason:
                assert s.leader < 0 and s.follower < 0, "an ended sequence leads or follows"
                assert s.row < 0 or s.num_planned, "an ended sequence holds a row"
                continue
            num_deadlines += s.deadline_ns != 0
            if s.row < 0:
                assert s.num_blocks == 0, "a waiting sequence holds blocks"
                num_waiting += 1
                num_waiting_tokens += s.num_prompt
                if self.waiting.holds(entry):
                    assert s.leader < 0, "an output waits beside its leader"
                    assert not s.is_paused or s.num_overtaken == MAX_OVERTAKEN, "a paused sequence waits for a row"
                else:
                    assert s.is_paused or s.leader >= 0, "the waiting queue has lost a request"
        assert num_rows == self.rows.num_running, "a row is lost"
        assert num_paused == self.planner.num_paused, "num_paused is wrong"
        assert num_waiting == self.planner.num_waiting, "num_waiting is wrong"
        assert num_waiting_tokens == self.planner.num_waiting_tokens, "num_waiting_tokens is wrong"
        assert num_deadlines == self.deadlines.size, "the deadlines have lost or kept a request"
