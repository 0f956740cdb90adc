"""What the next step computes.

A step serves `running` in order of (priority, arrival): first a token for every decoding sequence, then prompt chunks,
and before a chunk what waits with a higher priority; in the end all that waits. Before all of them it admits what takes
the place of others. Drafts get what none of them can use. Blocks are taken as tokens are planned. A decoding sequence
that finds no block takes those of the last in order, which is never one that this step has planned already.
"""

cimport cython
from libc.stdint cimport INT32_MIN
from libc.stdlib cimport free, malloc

from foreword.scheduler.row_table cimport is_before


cdef inline bint is_ready(Sequence* s) noexcept nogil:
    """Whether a sequence may be part of the next plan, if it holds a row."""
    return s.row >= 0 and not s.is_paused and not s.is_awaited and not s.update.finish_reason


@cython.final
cdef class Planner:
    def __cinit__(self, SequenceTable table, config):
        cdef int num_rows = config.max_num_sequences
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.block_size = config.block_size
        self.table = table
        self.sequences = table.sequences
        self.rows = RowTable(table, num_rows, config.max_blocks_per_sequence)
        self.pool = self.rows.pool
        self.waiting = WaitingQueue(table, config)
        self.victims = Victims(self.rows, self.waiting)
        self.prefills = <int*>malloc(num_rows * sizeof(int))
        self.admitted = <int*>malloc(num_rows * sizeof(int))
        if self.prefills == NULL or self.admitted == NULL:
            raise MemoryError("planner")

    def __dealloc__(self):
        free(self.prefills)
        free(self.admitted)

    cdef void begin(self, StepBuffers step, int* planned, int num_open, int64_t now_ns):
        self.step = step
        self.planned = planned
        self.num_open = num_open
        self.now_ns = now_ns

    cdef int plan_all(self) except -1 nogil:
        self.step.clear()
        self.is_starved = False
        self.num_admitted = self.num_prefills = self.num_promised = self.num_preempted = self.num_passed = 0
        self.num_drafts_planned = self.num_drafts_dropped = 0
        self.is_overtaking_over = False
        self.rows.compact()
        self.find_prefills()
        if self.waiting.size:
            self.preempt_for_waiting()
        self.draft_budget = <int>max(
            0, self.num_tokens_left() - self.rows.num_running - self.num_prompt_tokens()
        )
        self.num_blocks_for_prompts = self.count_blocks_for_prompts()
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

    cdef int64_t count_blocks_for_prompts(self) noexcept nogil:
        """Blocks that prompts could take next, if the budget allowed it: of waiting ones as many as they can be at most."""
        cdef int64_t num_blocks = self.num_reserved()
        if self.rows.num_free:
            num_blocks += self.waiting.num_tokens() // self.block_size + self.waiting.size
        return num_blocks

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
        """Slots behind its next token that it holds or that neither running sequences nor prompts can need."""
        cdef int num_blocks = s.num_blocks + (s.num_computed == s.num_blocks * self.block_size)
        num_blocks += <int>max(0, self.pool.num_free - num_running - self.num_blocks_for_prompts)
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
                num_reserved = self.num_reserved()
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
        self.planned[self.step.num_sequences] = entry
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

    cdef int wait(self, int entry, int64_t now_ns) except -1 nogil:
        """Count a sequence as waiting and, unless it is paused or follows another, queue it at its old place."""
        cdef Sequence* s = &self.sequences[entry]
        self.num_waiting += 1
        self.num_waiting_tokens += s.num_prompt
        if s.is_paused:
            s.num_admitted_before = self.num_admitted_ever
        elif s.leader < 0:
            self.waiting.push(entry, now_ns)
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
        return self.wait(entry, self.now_ns)

    cdef int release_row(self, int entry) except -1 nogil:
        self.num_paused -= self.sequences[entry].is_paused
        self.waiting.release(entry)
        return self.rows.release(&self.sequences[entry])
