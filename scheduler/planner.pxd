"""Makes the plan of a step: who takes part with how many tokens, who gets a row, who loses it."""

from libc.stdint cimport int64_t

from foreword.scheduler.block_pool cimport BlockPool
from foreword.scheduler.row_table cimport RowTable
from foreword.scheduler.sequence_table cimport Sequence, SequenceTable
from foreword.scheduler.step_buffers cimport StepBuffers
from foreword.scheduler.victims cimport Victims
from foreword.scheduler.waiting_queue cimport WaitingQueue


cdef enum:
    MAX_OVERTAKEN = 4  # admissions that may pass a request that does not fit, and such requests passed in a step


cdef class Planner:
    cdef int max_num_batched_tokens
    cdef int block_size

    cdef SequenceTable table
    cdef Sequence* sequences  # of the table
    cdef RowTable rows
    cdef BlockPool pool  # of the rows
    cdef WaitingQueue waiting  # entries without a row that may run and follow no other
    cdef Victims victims  # of the rows
    cdef int num_waiting  # entries without a row, paused ones and followers too
    cdef int64_t num_waiting_tokens  # their prompt tokens
    cdef int num_paused  # paused entries that hold a row
    cdef int64_t num_admitted_ever

    cdef StepBuffers step  # of the plan, as all that follows
    cdef int* planned  # [max_num_sequences] its entries
    cdef int64_t now_ns
    cdef int num_open  # plans before it that have not been applied
    cdef bint is_starved  # it lacks a sequence that must preempt another, which an open plan forbids
    cdef int* admitted  # [max_num_sequences] entries that got a row
    cdef int num_admitted
    cdef int* prefills  # [max_num_sequences] entries of sequences that have not computed what they knew at admission
    cdef int num_prefills
    cdef int num_promised  # blocks that those lack who were admitted before the others were planned
    cdef int[MAX_OVERTAKEN] passed  # entries that did not fit
    cdef int num_passed
    cdef bint is_overtaking_over
    cdef int draft_budget  # drafts that it may have
    cdef int64_t num_blocks_for_prompts  # free ones that drafts leave to them
    cdef int num_drafts_planned
    cdef int num_drafts_dropped
    cdef int num_preempted

    cdef void begin(self, StepBuffers step, int* planned, int num_open, int64_t now_ns)
    cdef int plan_all(self) except -1 nogil
    cdef int wait(self, int entry, int64_t now_ns) except -1 nogil  # count one without a row, and queue it if it may run
    cdef int release_row(self, int entry) except -1 nogil

    cdef void find_prefills(self) noexcept nogil
    cdef int64_t num_prompt_tokens(self) noexcept nogil
    cdef int64_t count_blocks_for_prompts(self) noexcept nogil
    cdef int num_tokens_left(self) noexcept nogil
    cdef int num_reserved(self) noexcept nogil
    cdef int preempt_for_waiting(self) except -1 nogil
    cdef bint admit_over_others(self, int entry, bint is_overdue) except -1 nogil
    cdef int schedule_decodes(self) except -1 nogil
    cdef int num_draft_slots(self, Sequence* s, int num_running) noexcept nogil
    cdef int schedule_prompts(self) except -1 nogil
    cdef int schedule_prefill(self, int entry) except -1 nogil
    cdef int schedule_admissions(self, int above, int num_reserved) except -1 nogil
    cdef int admit(self, int entry, int max_tokens) except -1 nogil
    cdef int plan(self, int entry, int num_tokens) except -1 nogil
    cdef bint make_room(self, int entry) except -1 nogil
    cdef int preempt_paused(self, Sequence* s) except -1 nogil
    cdef int preempt(self, int entry) except -1 nogil
