"""The scheduler's two steps over C state: `schedule` writes a plan, `apply` takes its result.

A step serves `running` in order of (priority, arrival): first a token for every decoding sequence, then prompt chunks,
and before a chunk what waits with a higher priority; in the end all that waits. Drafts get what none of them can use. Blocks are taken as tokens are
planned. A decoding sequence that finds no block takes those of the last in order, which is never one that this step has
planned already. Both cores run without the GIL and allocate nothing.
"""

cimport cython
from libc.stdint cimport INT32_MAX, INT32_MIN
from libc.stdlib cimport free, malloc

from foreword.scheduler.admission cimport check_bounds, check_deadline, check_queue, check_request
from foreword.scheduler.commit cimport CANCELLED, DEADLINE, FAILED, commit, report
from foreword.scheduler.heap_forest cimport EMPTY
from foreword.scheduler.row_table cimport is_before

from foreword.scheduler.errors import DuplicateRequest
from foreword.scheduler.step import DraftState, SchedulerLoad, StepResult

cdef enum:
    UNKNOWN_TOKEN = -1


cdef inline bint is_ready(Sequence* s) noexcept nogil:
    """Whether a sequence may be part of the next plan, if it holds a row."""
    return s.row >= 0 and not s.is_paused and not s.is_awaited and not s.update.finish_reason


@cython.final
cdef class Scheduler:
    def __cinit__(self, config):
        cdef int num_rows = config.max_num_sequences
        if config.num_blocks * config.block_size > INT32_MAX:
            raise ValueError(f"num_blocks * block_size must be at most {INT32_MAX}: slots are int32")
        self.config = config
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_model_len = config.max_model_len
        self.block_size = config.block_size
        self.lookahead = config.lookahead
        self.prefix_cache = PrefixCache(config.num_blocks, config.block_size, config.hash_key)
        self.table = SequenceTable(num_rows + config.max_num_waiting, self.prefix_cache)
        self.sequences = self.table.sequences
        self.rows = RowTable(self.table, num_rows, config.max_blocks_per_sequence)
        self.pool = self.rows.pool
        self.steps = tuple(
            [StepBuffers(num_rows, config.max_num_batched_tokens, self.table.capacity,
                         num_rows * config.max_blocks_per_sequence)
             for _ in range(1 + config.lookahead)]
        )
        self.step = self.steps[0]
        self.waiting = WaitingQueue(self.table, config)
        self.victims = Victims(self.rows, self.waiting)
        self.deadlines = HeapForest(self.table.capacity)
        self.first_deadline = EMPTY
        self.throughput = Throughput(config.max_num_batched_tokens)
        self.planned = <int*>malloc(len(self.steps) * num_rows * sizeof(int))
        self.prefills = <int*>malloc(num_rows * sizeof(int))
        self.admitted = <int*>malloc(num_rows * sizeof(int))
        self.ended = <int*>malloc(self.table.capacity * sizeof(int))
        if self.planned == NULL or self.prefills == NULL or self.admitted == NULL or self.ended == NULL:
            raise MemoryError("scheduler")

    def __dealloc__(self):
        free(self.planned)
        free(self.prefills)
        free(self.admitted)
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
        check_queue(request, self.config, self.num_waiting, self.num_waiting_tokens, self.table.num_free)
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
            self.wait(entry)

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
                self.num_paused += 1
            elif s.num_overtaken < MAX_OVERTAKEN:  # who may not be overtaken any more keeps its place
                self.waiting.remove(entry)
                s.num_admitted_before = self.num_admitted_ever
        return True

    def resume(self, request_key):
        cdef int entry = self.find_active(request_key)
        if entry < 0:
            return False
        cdef Sequence* s = &self.sequences[entry]
        if s.is_paused:
            s.is_paused = False
            if s.row >= 0:
                self.num_paused -= 1
            elif s.leader < 0 and not self.waiting.holds(entry):
                s.num_overtaken = <int>min(
                    <int64_t>MAX_OVERTAKEN, s.num_overtaken + self.num_admitted_ever - s.num_admitted_before
                )
                self.waiting.push(entry, self.now_ns)
        return True

    cdef int find_active(self, object request_key) except -2:
        cdef int entry = self.table.find(request_key)
        return -1 if entry >= 0 and self.sequences[entry].update.finish_reason else entry

    cdef int wait(self, int entry) except -1 nogil:
        """Count a sequence as waiting and, unless it is paused or follows another, queue it at its old place."""
        cdef Sequence* s = &self.sequences[entry]
        self.num_waiting += 1
        self.num_waiting_tokens += s.num_prompt
        if s.is_paused:
            s.num_admitted_before = self.num_admitted_ever
        elif s.leader < 0:
            self.waiting.push(entry, self.now_ns)
        return 0

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
            self.num_waiting -= 1
            self.num_waiting_tokens -= s.num_prompt
        elif not s.num_planned:
            self.release_row(entry)
        return 0

    # Schedule

    @property
    def can_schedule(self):
        return self.num_open == 0 or (self.num_open < len(self.steps) and not self.is_starved)

    def schedule(self, now_ns):
        if not self.can_schedule:
            raise RuntimeError("the last plan has not been applied")
        self.now_ns = max(self.now_ns, now_ns)
        cdef StepBuffers before = self.step
        cdef const int* planned_before = self.planned_in(self.step_id)
        self.step_id += 1
        self.step = self.steps[self.step_id % len(self.steps)]
        with nogil:
            self.throughput.finish(self.now_ns)
            if self.num_open:
                self.advance(before, planned_before)
            self.schedule_all()
            if self.num_open:
                self.retreat(before, planned_before)
            self.throughput.start(self.now_ns, self.step.num_tokens)
        self.num_open += 1
        cdef int i
        admitted = tuple(
            [(self.sequences[self.admitted[i]].row, self.table.requests[self.admitted[i]])
             for i in range(self.num_admitted)]
        )
        offsets, token_ids = self.table.outputs(self.admitted, self.num_admitted)
        return self.step.plan(self.step_id, admitted, offsets, token_ids, self.num_preempted)

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

    cdef int schedule_all(self) except -1 nogil:
        self.step.clear()
        self.is_starved = False
        self.num_admitted = self.num_prefills = self.num_promised = self.num_preempted = self.num_passed = 0
        self.num_drafts_planned = self.num_drafts_dropped = 0
        self.is_overtaking_over = False
        while self.first_deadline != EMPTY and self.sequences[self.first_deadline].deadline_ns <= self.now_ns:
            self.end(self.first_deadline, DEADLINE)
        self.rows.compact()
        self.find_prefills()
        if self.waiting.size:
            self.preempt_for_waiting()
        self.draft_budget = <int>max(
            0, self.num_tokens_left() - self.rows.num_running - self.num_prompt_tokens()
        )
        self.schedule_decodes()
        self.schedule_prompts()
        self.rows.compact()
        return 0

    cdef void find_prefills(self) noexcept nogil:
        """List the sequences that have not computed what they knew at admission."""
        cdef int i
        cdef Sequence* s
        if self.rows.num_prefill_tokens == 0:
            return
        for i in range(self.rows.num_running):
            s = &self.sequences[self.rows.running[i]]
            if s.num_computed < s.prefill_end:
                self.prefills[self.num_prefills] = self.rows.running[i]
                self.num_prefills += 1

    cdef int64_t num_prompt_tokens(self) noexcept nogil:
        """Tokens of prompts that could be computed next, if the budget allowed it."""
        cdef int i
        cdef int64_t num_tokens = self.waiting.num_tokens() if self.rows.num_free else 0
        cdef Sequence* s
        for i in range(self.num_prefills):
            s = &self.sequences[self.prefills[i]]
            if is_ready(s):
                num_tokens += s.prefill_end - s.num_computed
        return num_tokens

    cdef int num_tokens_left(self) noexcept nogil:
        """Of the step's budget."""
        return self.max_num_batched_tokens - self.step.num_tokens

    cdef int num_reserved(self) noexcept nogil:
        """Blocks that running sequences lack for what they knew when they were admitted."""
        cdef int i, num_blocks = self.num_promised
        for i in range(self.num_prefills):
            if self.sequences[self.prefills[i]].row >= 0:
                num_blocks += self.rows.num_promised_to(&self.sequences[self.prefills[i]])
        return num_blocks

    cdef int preempt_for_waiting(self) except -1 nogil:
        """Admit what waits with a higher priority than running sequences in their place, before those are planned; and
        for a tenant that has no row and whose priority has aged, one request in the place of the tenant with the most."""
        cdef int entry, lowest
        cdef bint is_overdue = False
        while self.rows.num_running:
            lowest = self.sequences[self.rows.running[self.rows.num_running - 1]].priority
            if is_overdue:
                entry = self.waiting.first_overdue(self.now_ns, lowest)
            else:
                entry = self.waiting.first(self.now_ns, lowest)
            if entry >= 0 and self.admit_over_others(entry, is_overdue):
                continue
            if is_overdue:
                break
            is_overdue = True
        return 0

    cdef bint admit_over_others(self, int entry, bint is_overdue) except -1 nogil:
        """Preempt as few as possible for a waiting sequence, and nobody unless it can be computed in this step."""
        cdef Sequence* s = &self.sequences[entry]
        cdef Sequence* p
        cdef int i, num_tokens
        if not self.victims.for_waiting(s, is_overdue, self.num_reserved(), self.num_open):
            return False
        num_tokens = self.num_tokens_left() - self.rows.num_running + self.victims.num_entries
        for i in range(self.num_prefills):
            p = &self.sequences[self.prefills[i]]
            if is_ready(p) and is_before(p, s):
                num_tokens -= p.prefill_end - p.num_computed
        if self.victims.num_entries == 0 or num_tokens <= 0:
            return False
        if self.num_open:
            self.is_starved = True
            return False
        for i in range(self.victims.num_entries):
            self.preempt(self.victims.entries[i])
        self.rows.compact()
        self.rows.match(s)
        self.waiting.remove(entry)
        self.admit(entry, num_tokens)
        self.num_promised += self.rows.num_promised_to(s)
        return True

    cdef int schedule_decodes(self) except -1 nogil:
        """Plan one token for every decoding sequence, and its drafts where they cost no other sequence anything."""
        cdef int i, num_draft, entry
        cdef int num_running = self.rows.num_running
        cdef Sequence* s
        for i in range(num_running):
            entry = self.rows.running[i]
            s = &self.sequences[entry]
            if not is_ready(s) or s.num_computed < s.prefill_end:
                continue
            if s.num_computed == s.num_blocks * self.block_size and not self.make_room(entry):
                continue
            if s.num_draft:
                num_draft = min(
                    s.num_draft, self.draft_budget - self.num_drafts_planned, self.num_draft_slots(s, num_running)
                )
                self.num_drafts_planned += num_draft
                self.num_drafts_dropped += s.num_draft - num_draft
                s.num_draft = num_draft
            self.plan(entry, 1 + s.num_draft)
        return 0

    cdef int num_draft_slots(self, Sequence* s, int num_running) noexcept nogil:
        """Slots behind its next token that it holds or that no running sequence can need in this step."""
        cdef int num_blocks = s.num_blocks + (s.num_computed == s.num_blocks * self.block_size)
        num_blocks += max(0, self.pool.num_free - num_running)
        return num_blocks * self.block_size - s.num_computed - 1

    cdef int schedule_prompts(self) except -1 nogil:
        """Plan prompt chunks of running sequences, and admit what waits: before a sequence all of higher priority."""
        cdef int i, num_blocks, num_reserved = self.num_reserved()
        cdef Sequence* s
        for i in range(self.num_prefills):
            s = &self.sequences[self.prefills[i]]
            if not is_ready(s) or s.num_planned > self.num_open:  # this step has preempted it and admitted it again
                continue
            self.schedule_admissions(s.priority, num_reserved)
            num_blocks = s.num_blocks
            self.schedule_prefill(self.prefills[i])
            num_reserved -= s.num_blocks - num_blocks
        self.schedule_admissions(INT32_MIN, num_reserved)
        for i in range(self.num_passed):
            self.waiting.put_back(self.passed[i])
        return 0

    cdef int schedule_prefill(self, int entry) except -1 nogil:
        cdef Sequence* s = &self.sequences[entry]
        cdef int num_tokens
        if self.step.num_sequences == 0 and s.num_computed == self.rows.num_tokens_in_reach(s):
            if not self.make_room(entry):
                return 0
        num_tokens = min(
            s.num_tokens - s.num_computed,
            self.num_tokens_left(),
            self.rows.num_tokens_in_reach(s) - s.num_computed,
        )
        if num_tokens > 0:
            self.plan(entry, num_tokens)
        return 0

    cdef int schedule_admissions(self, int above, int num_reserved) except -1 nogil:
        """Give waiting requests of a priority above `above` rows as long as the blocks for all their tokens are free.

        The blocks that running prompts need and one for every running sequence stay untouched: what is admitted into
        them would soon be preempted. Only the last one admitted gets less than all its tokens, when the budget ends.
        """
        cdef int i, entry, num_free
        cdef Sequence* s
        if self.num_preempted:
            return 0
        while self.num_tokens_left() > 0 and not self.is_overtaking_over:
            entry = self.waiting.pop(self.now_ns, above)
            if entry < 0:
                break
            s = &self.sequences[entry]
            if self.step.num_sequences == 0 and self.num_open == 0 and above == INT32_MIN:
                # All rows are paused: they keep nobody from running.
                self.preempt_paused(s)
                num_free = self.pool.num_free
            else:
                num_free = self.pool.num_free - num_reserved - self.rows.num_running
            # Every sequence takes a block, so nobody looks for hits while none is to be had.
            if self.rows.num_free == 0 or num_free < 1 or self.rows.match(s) > num_free:
                if self.num_open and self.step.num_sequences == 0:
                    self.is_starved = True
                self.passed[self.num_passed] = entry
                self.num_passed += 1
                self.is_overtaking_over = (
                    self.rows.num_free == 0 or self.num_passed == MAX_OVERTAKEN or s.num_overtaken == MAX_OVERTAKEN
                )
                continue
            self.admit(entry, self.num_tokens_left())
            for i in range(self.num_passed):
                self.sequences[self.passed[i]].num_overtaken += 1
                if self.sequences[self.passed[i]].num_overtaken == MAX_OVERTAKEN:
                    self.is_overtaking_over = True
        return 0

    cdef int admit(self, int entry, int max_tokens) except -1 nogil:
        cdef Sequence* s = &self.sequences[entry]
        self.num_waiting -= 1
        self.num_waiting_tokens -= s.num_prompt
        if s.update.first_scheduled_ns == 0:
            s.update.first_scheduled_ns = self.now_ns
        self.waiting.admit(entry, self.now_ns)
        self.rows.insert(entry)
        s.update.num_prompt_computed = min(s.num_computed, s.num_prompt)
        if s.update.num_preemptions == 0:
            s.update.num_cached = s.num_computed
            self.waiting.charge(s.flow, s.num_prompt - s.num_computed)
        self.num_paused += s.is_paused
        self.admitted[self.num_admitted] = entry
        self.num_admitted += 1
        self.num_admitted_ever += 1
        return self.plan(entry, min(s.num_tokens - s.num_computed, max_tokens))

    cdef int plan(self, int entry, int num_tokens) except -1 nogil:
        """Add a sequence to the plan with its next `num_tokens` tokens, drafts included."""
        cdef Sequence* s = &self.sequences[entry]
        if s.num_computed + num_tokens > s.num_blocks * self.block_size:
            self.rows.grow(s, s.num_computed + num_tokens)
        self.planned_in(self.step_id)[self.step.num_sequences] = entry
        s.num_planned += 1
        self.step.add(s, self.rows.generations[s.row], self.rows.block_table(s), self.block_size, num_tokens)
        return 0

    # Preemption

    cdef bint make_room(self, int entry) except -1 nogil:
        """See that a block is free for a sequence; false when the sequence itself had to go, or has to wait until no
        plan is open: none loses blocks that are in use."""
        cdef int victim
        if self.pool.num_free == 0 and self.num_open:
            self.is_starved = True
            return False
        while self.pool.num_free == 0:
            victim = self.victims.for_running(&self.sequences[entry])
            self.preempt(victim)
            if victim == entry:
                return False
        return True

    cdef int preempt_paused(self, Sequence* s) except -1 nogil:
        """Preempt paused sequences from the end until `s` finds a row and blocks."""
        cdef int i
        for i in range(self.rows.num_listed - 1, -1, -1):
            if self.rows.num_free and self.rows.match(s) <= self.pool.num_free:
                break
            self.preempt(self.rows.running[i])
        self.rows.compact()
        return 0

    cdef int preempt(self, int entry) except -1 nogil:
        """Take a sequence's row and blocks; it waits with its output so far as part of its prompt."""
        cdef Sequence* s = &self.sequences[entry]
        s.update.num_preemptions += 1
        s.update.num_prompt_computed = 0
        if s.num_tokens > s.prefill_end:
            s.num_overtaken = 0  # it was served; one that gained nothing lets nobody more pass
        self.release_row(entry)
        s.num_computed = s.num_draft = 0
        self.num_preempted += 1
        return self.wait(entry)

    cdef int release_row(self, int entry) except -1 nogil:
        self.num_paused -= self.sequences[entry].is_paused
        self.waiting.release(entry)
        return self.rows.release(&self.sequences[entry])

    # Apply

    def apply(self, result):
        if not self.num_open:
            raise ValueError("there is no plan to apply a result to")
        cdef int64_t step_id = self.step_id - self.num_open + 1
        cdef StepBuffers step = self.steps[step_id % len(self.steps)]
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
        if self.num_drafts_planned or not self.num_drafts_dropped:
            return DraftState.ACTIVE
        return DraftState.CACHE_PRESSURE if self.draft_budget else DraftState.PREFILL_PRESSURE

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
                self.release_row(self.ended[i])
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
        return self.rows.num_running > self.num_paused or self.waiting.size > 0 or self.num_ended > 0

    @property
    def next_deadline_ns(self):
        return 0 if self.first_deadline == EMPTY else self.sequences[self.first_deadline].deadline_ns

    def load(self):
        return SchedulerLoad(
            num_running=self.rows.num_running,
            num_waiting=self.num_waiting,
            num_waiting_tokens=self.num_waiting_tokens,
            num_paused=self.num_paused,
            num_free_blocks=self.pool.num_free,
            num_cached_blocks=self.prefix_cache.num_cached,
            num_blocks=self.pool.num_blocks,
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
        assert num_paused == self.num_paused, "num_paused is wrong"
        assert num_waiting == self.num_waiting, "num_waiting is wrong"
        assert num_waiting_tokens == self.num_waiting_tokens, "num_waiting_tokens is wrong"
        assert num_deadlines == self.deadlines.size, "the deadlines have lost or kept a request"
