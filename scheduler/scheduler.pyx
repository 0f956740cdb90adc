"""The scheduler's two steps over C state: `schedule` writes a plan, `apply` takes its result.

A step serves `running` in order of (priority, arrival): first a token for every decoding sequence, then prompt chunks,
then admissions from `waiting`, which has the same order. Blocks are taken as tokens are planned. A decoding sequence
that finds no block takes those of the last in order, which is never one that this step has planned already. Both cores
run without the GIL and allocate nothing.
"""

from libc.stdint cimport INT32_MAX
from libc.stdlib cimport free, malloc

from foreword.scheduler.admission cimport check_bounds, check_queue, check_request
from foreword.scheduler.commit cimport CANCELLED, DEADLINE, FAILED, commit, report

from foreword.scheduler.errors import DuplicateRequest
from foreword.scheduler.step import SchedulerLoad, StepResult

cdef enum:
    MAX_OVERTAKEN = 4  # admissions that may pass a request that does not fit, and such requests passed in a step


cdef class Scheduler:
    def __cinit__(self, config):
        cdef int num_rows = config.max_num_sequences
        if config.num_blocks * config.block_size > INT32_MAX:
            raise ValueError(f"num_blocks * block_size must be at most {INT32_MAX}: slots are int32")
        self.config = config
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_model_len = config.max_model_len
        self.block_size = config.block_size
        self.prefix_cache = PrefixCache(config.num_blocks, config.block_size, config.hash_key)
        self.table = SequenceTable(num_rows + config.max_num_waiting, self.prefix_cache)
        self.sequences = self.table.sequences
        self.rows = RowTable(self.table, num_rows, config.max_blocks_per_sequence)
        self.pool = self.rows.pool
        self.step = StepBuffers(
            num_rows, config.max_num_batched_tokens, self.table.capacity, num_rows * config.max_blocks_per_sequence
        )
        self.waiting = IndexedHeap(self.table.capacity)
        self.deadlines = IndexedHeap(self.table.capacity)
        self.planned = <int*>malloc(num_rows * sizeof(int))
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
        check_bounds(request, self.config, self.now_ns)
        check_queue(request, self.config, self.num_waiting, self.num_waiting_tokens, self.table.num_free)
        cdef int entry, leader = -1
        cdef Sequence* s
        for output in outputs:
            entry = self.table.add(output, prompt)
            s = &self.sequences[entry]
            if s.deadline_ns:
                self.deadlines.push(entry, s.deadline_ns, s.order)
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
            if not s.is_planned:
                s.num_draft = 0
            if s.row < 0:
                self.waiting.remove(entry)
            else:
                self.num_paused += 1
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
            elif s.leader < 0:
                self.queue(entry)
        return True

    cdef int find_active(self, object request_key) except -2:
        cdef int entry = self.table.find(request_key)
        return -1 if entry >= 0 and self.sequences[entry].update.finish_reason else entry

    cdef int queue(self, int entry) except -1 nogil:
        cdef Sequence* s = &self.sequences[entry]
        return self.waiting.push(entry, -<int64_t>s.priority, s.order)

    cdef int wait(self, int entry) except -1 nogil:
        """Count a sequence as waiting and, unless it is paused or follows another, queue it at its old place."""
        cdef Sequence* s = &self.sequences[entry]
        self.num_waiting += 1
        self.num_waiting_tokens += s.num_prompt
        if not s.is_paused and s.leader < 0:
            self.queue(entry)
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
                self.queue(entry)
            entry = self.sequences[leader].follower
        return 0

    cdef int end(self, int entry, int finish_reason) except -1 nogil:
        """End a sequence outside of a result. One that is being computed keeps its row until the result is there."""
        cdef Sequence* s = &self.sequences[entry]
        s.update.finish_reason = finish_reason
        self.leave_leader(entry)
        self.queue_followers(entry)
        self.deadlines.remove(entry)
        self.ended[self.num_ended] = entry
        self.num_ended += 1
        if s.row < 0:
            self.waiting.remove(entry)
            self.num_waiting -= 1
            self.num_waiting_tokens -= s.num_prompt
        elif not s.is_planned:
            self.release_row(s)
            self.rows.compact()
        return 0

    # Schedule

    def schedule(self, now_ns):
        if self.is_step_open:
            raise RuntimeError("the last plan has not been applied")
        self.now_ns = max(self.now_ns, now_ns)
        with nogil:
            self.schedule_all()
        self.step_id += 1
        self.is_step_open = True
        cdef int i
        admitted = tuple(
            [(self.sequences[self.admitted[i]].row, self.table.requests[self.admitted[i]])
             for i in range(self.num_admitted)]
        )
        offsets, token_ids = self.table.outputs(self.admitted, self.num_admitted)
        return self.step.plan(self.step_id, admitted, offsets, token_ids)

    cdef int schedule_all(self) except -1 nogil:
        self.step.clear()
        self.num_admitted = self.num_prefills = self.num_preempted = 0
        while self.deadlines.size and self.deadlines.top_major() <= self.now_ns:
            self.end(self.deadlines.pop(), DEADLINE)
        self.schedule_decodes()
        cdef int num_reserved = self.schedule_prefills()
        if self.num_preempted:
            self.rows.compact()
        else:
            self.schedule_admissions(num_reserved)
        return 0

    cdef int schedule_decodes(self) except -1 nogil:
        """Plan one token for every decoding sequence, and its drafts where they cost no other sequence anything."""
        cdef int i, num_draft, entry
        cdef int draft_budget = self.max_num_batched_tokens - self.rows.num_running
        cdef Sequence* s
        for i in range(self.rows.num_running):
            entry = self.rows.running[i]
            s = &self.sequences[entry]
            if s.row < 0:
                continue
            if s.num_computed < s.prefill_end:
                self.prefills[self.num_prefills] = i
                self.num_prefills += 1
                continue
            if s.is_paused or (s.num_computed == s.num_blocks * self.block_size and not self.make_room(i)):
                continue
            if s.num_draft:
                num_draft = min(s.num_draft, draft_budget, self.num_draft_slots(s))
                draft_budget -= num_draft
                s.num_draft = num_draft
            self.plan(entry, 1 + s.num_draft)
        return 0

    cdef int num_draft_slots(self, Sequence* s) noexcept nogil:
        """Slots behind its next token that it holds or that no running sequence can need in this step."""
        cdef int num_blocks = max(s.num_blocks, s.num_computed // self.block_size + 1)
        num_blocks += max(0, self.pool.num_free - self.rows.num_running)
        return num_blocks * self.block_size - s.num_computed - 1

    cdef int schedule_prefills(self) except -1 nogil:
        """Plan prompt chunks of running sequences; returns the blocks that their prompts still need after this step."""
        cdef int i, num_tokens, entry, num_reserved = 0
        cdef Sequence* s
        for i in range(self.num_prefills):
            entry = self.rows.running[self.prefills[i]]
            s = &self.sequences[entry]
            if s.row < 0:
                continue
            if not s.is_paused:
                if self.step.num_sequences == 0 and s.num_computed == self.rows.num_tokens_in_reach(s):
                    if not self.make_room(self.prefills[i]):
                        continue
                num_tokens = min(
                    s.num_tokens - s.num_computed,
                    self.max_num_batched_tokens - self.step.num_tokens,
                    self.rows.num_tokens_in_reach(s) - s.num_computed,
                )
                if num_tokens > 0:
                    self.plan(entry, num_tokens)
            num_reserved += self.rows.num_blocks_for(s.prefill_end) - s.num_blocks
        return num_reserved

    cdef int schedule_admissions(self, int num_reserved) except -1 nogil:
        """Give waiting requests rows as long as the blocks for all their tokens are free.

        The blocks that running prompts need and one for every running sequence stay untouched: what is admitted into
        them would soon be preempted. Only the last one admitted gets less than all its tokens, when the budget ends.
        """
        cdef int i, entry, num_free, num_passed = 0
        cdef int[MAX_OVERTAKEN] passed
        cdef bint is_overtaking_over = False
        cdef Sequence* s
        while self.waiting.size and self.step.num_tokens < self.max_num_batched_tokens and not is_overtaking_over:
            entry = self.waiting.pop()
            s = &self.sequences[entry]
            if self.step.num_sequences == 0:  # all rows are paused: they keep nobody from running
                self.preempt_paused(s)
                num_free = self.pool.num_free
            else:
                num_free = self.pool.num_free - num_reserved - self.rows.num_running
            # Every sequence takes a block, so nobody looks for hits while none is to be had.
            if self.rows.num_free == 0 or num_free < 1 or self.rows.match(s) > num_free:
                passed[num_passed] = entry
                num_passed += 1
                is_overtaking_over = (
                    self.rows.num_free == 0 or num_passed == MAX_OVERTAKEN or s.num_overtaken == MAX_OVERTAKEN
                )
                continue
            self.admit(entry)
            for i in range(num_passed):
                self.sequences[passed[i]].num_overtaken += 1
                if self.sequences[passed[i]].num_overtaken == MAX_OVERTAKEN:
                    is_overtaking_over = True
        for i in range(num_passed):
            self.queue(passed[i])
        return 0

    cdef int admit(self, int entry) except -1 nogil:
        cdef Sequence* s = &self.sequences[entry]
        self.num_waiting -= 1
        self.num_waiting_tokens -= s.num_prompt
        s.prefill_end = s.num_tokens
        s.num_overtaken = 0
        if s.update.first_scheduled_ns == 0:
            s.update.first_scheduled_ns = self.now_ns
        self.rows.insert(entry)
        s.update.num_prompt_computed = min(s.num_computed, s.num_prompt)
        if s.update.num_preemptions == 0:
            s.update.num_cached = s.num_computed
        self.admitted[self.num_admitted] = entry
        self.num_admitted += 1
        return self.plan(entry, min(s.num_tokens - s.num_computed, self.max_num_batched_tokens - self.step.num_tokens))

    cdef int plan(self, int entry, int num_tokens) except -1 nogil:
        """Add a sequence to the plan with its next `num_tokens` tokens, drafts included."""
        cdef Sequence* s = &self.sequences[entry]
        self.rows.grow(s, s.num_computed + num_tokens)
        self.planned[self.step.num_sequences] = entry
        s.is_planned = True
        self.step.add(s, self.rows.generations[s.row], self.rows.block_table(s), self.block_size, num_tokens)
        return 0

    # Preemption

    cdef bint make_room(self, int position) except -1 nogil:
        """See that a block is free for `running[position]`; false when the sequence itself had to go."""
        cdef int victim
        while self.pool.num_free == 0:
            victim = self.pick_victim(position)
            self.preempt(self.rows.running[victim])
            if victim == position:
                return False
        return True

    cdef int pick_victim(self, int position) noexcept nogil:
        """The last paused sequence, else the last from `position` on that has a new token since its last preemption."""
        cdef int i, unpaused = -1, without_progress = -1
        cdef Sequence* s
        for i in range(self.rows.num_running - 1, -1, -1):
            s = &self.sequences[self.rows.running[i]]
            if s.row < 0:
                continue
            if s.is_paused:
                return i
            if i < position:
                continue
            if s.update.num_preemptions and s.num_tokens == s.prefill_end:
                without_progress = max(without_progress, i)
            else:
                unpaused = max(unpaused, i)
        return unpaused if unpaused >= 0 else without_progress

    cdef int preempt_paused(self, Sequence* s) except -1 nogil:
        """Preempt paused sequences from the end until `s` finds a row and blocks."""
        cdef int i
        for i in range(self.rows.num_running - 1, -1, -1):
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
        s.num_computed = s.num_draft = 0
        self.num_preempted += 1
        self.release_row(s)
        return self.wait(entry)

    cdef int release_row(self, Sequence* s) except -1 nogil:
        self.num_paused -= s.is_paused
        return self.rows.release(s)

    # Apply

    def apply(self, result):
        if not self.is_step_open:
            raise ValueError("there is no plan to apply a result to")
        if result is None:
            if self.step.num_sequences:
                raise ValueError(f"plan {self.step_id} has {self.step.num_sequences} sequences and needs a result")
        elif not isinstance(result, StepResult):
            raise ValueError(f"result must be a StepResult or None, got {type(result).__name__}")
        elif result.step_id != self.step_id:
            raise ValueError(f"result.step_id must be {self.step_id}, got {result.step_id}")
        else:
            self.step.read_result(result)
        with nogil:
            self.apply_all()
        cdef int i
        for i in range(self.num_ended):
            self.table.remove(self.ended[i])
        self.num_ended = 0
        self.is_step_open = False
        return self.step.update(self.step_id)

    cdef int apply_all(self) except -1 nogil:
        """Commit the planned sequences in order, then report those that a cancel or a deadline ended."""
        cdef int b, i, entry, num_ended_before = self.num_ended, num_released = 0
        cdef bint has_filled_block
        cdef Sequence* s
        self.step.num_updates = self.step.num_update_tokens = self.step.num_update_scored = 0
        for b in range(self.step.num_sequences):
            entry = self.planned[b]
            s = &self.sequences[entry]
            s.is_planned = False
            if s.update.finish_reason:
                continue
            commit(s, self.step, b, self.max_model_len)
            has_filled_block = s.num_computed >= (s.num_cached_blocks + 1) * self.block_size
            if has_filled_block and not s.bypasses_cache and s.update.finish_reason != FAILED:
                self.rows.cache_full_blocks(s)
            if s.follower >= 0 and (s.num_computed >= s.num_prompt or s.update.finish_reason):
                self.queue_followers(entry)
            if s.update.finish_reason:
                self.deadlines.remove(entry)
                self.ended[self.num_ended] = entry
                self.num_ended += 1
        for i in range(num_ended_before):
            report(&self.sequences[self.ended[i]], self.step)
        for i in range(self.num_ended):
            s = &self.sequences[self.ended[i]]
            if s.row >= 0:
                self.release_row(s)
                num_released += 1
        if num_released:
            self.rows.compact()
        return 0

    # State

    @property
    def has_work(self):
        return self.rows.num_running > self.num_paused or self.waiting.size > 0 or self.num_ended > 0

    @property
    def next_deadline_ns(self):
        return self.deadlines.top_major()

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
        num_waiting = num_waiting_tokens = num_schedulable = num_paused = num_deadlines = num_rows = 0
        assert len(self.table.entries) + self.table.num_free == self.table.capacity, "an entry is lost"
        for entry in self.table.entries.values():
            s = &self.sequences[entry]
            num_rows += s.row >= 0
            num_paused += s.row >= 0 and s.is_paused
            assert s.num_prompt <= s.num_tokens <= s.max_tokens, "a sequence has too few or too many tokens"
            assert s.num_computed <= s.num_tokens, "a sequence has computed tokens that it does not have"
            assert s.is_planned <= self.is_step_open, "a sequence is planned outside of a step"
            assert s.leader < 0 or s.row < 0, "an output computes its prompt beside its leader"
            assert s.leader < 0 or not self.sequences[s.leader].update.finish_reason, "a leader has ended"
            if s.update.finish_reason:
                assert s.leader < 0 and s.follower < 0, "an ended sequence leads or follows"
                assert s.row < 0 or s.is_planned, "an ended sequence holds a row"
                continue
            num_deadlines += s.deadline_ns != 0
            if s.row < 0:
                assert s.num_blocks == 0, "a waiting sequence holds blocks"
                num_waiting += 1
                num_waiting_tokens += s.num_prompt
                num_schedulable += not s.is_paused and s.leader < 0
        assert num_rows == self.rows.num_running, "a row is lost"
        assert num_paused == self.num_paused, "num_paused is wrong"
        assert num_waiting == self.num_waiting, "num_waiting is wrong"
        assert num_waiting_tokens == self.num_waiting_tokens, "num_waiting_tokens is wrong"
        assert num_schedulable == self.waiting.size, "the waiting queue has lost or kept a request"
        assert num_deadlines == self.deadlines.size, "the deadlines have lost or kept a request"
