"""State of the scheduler and the parts of its two steps.

Entries index `table`. A cancelled or expired sequence joins `ended` and is forgotten once `apply` has reported it.
"""

from libc.stdint cimport int32_t, int64_t

from foreword.scheduler.block_pool cimport BlockPool
from foreword.scheduler.heap_forest cimport HeapForest
from foreword.scheduler.prefix_cache cimport PrefixCache
from foreword.scheduler.row_table cimport RowTable
from foreword.scheduler.sequence_table cimport Sequence, SequenceTable
from foreword.scheduler.step_buffers cimport StepBuffers
from foreword.scheduler.throughput cimport Throughput
from foreword.scheduler.victims cimport Victims
from foreword.scheduler.waiting_queue cimport WaitingQueue


cdef enum:
    MAX_OVERTAKEN = 4  # admissions that may pass a request that does not fit, and such requests passed in a step


cdef class Scheduler:
    cdef readonly object config
    cdef int max_num_batched_tokens
    cdef int max_model_len
    cdef int block_size
    cdef int lookahead

    cdef readonly PrefixCache prefix_cache
    cdef SequenceTable table
    cdef Sequence* sequences  # of the table
    cdef RowTable rows
    cdef BlockPool pool  # of the rows
    cdef WaitingQueue waiting  # entries without a row that may run and follow no other
    cdef Victims victims  # of the rows
    cdef HeapForest deadlines  # entries that have a deadline
    cdef int first_deadline  # root of the deadlines
    cdef int num_waiting  # entries without a row, paused ones and followers too
    cdef int64_t num_waiting_tokens  # their prompt tokens
    cdef int num_paused  # paused entries that hold a row
    cdef int64_t num_admitted_ever

    cdef Throughput throughput
    cdef tuple steps  # StepBuffers of the open plans and the next one
    cdef StepBuffers step  # of the last plan
    cdef int64_t step_id
    cdef int64_t now_ns  # latest time seen
    cdef int num_open  # plans that have not been applied
    cdef bint is_starved  # the last plan lacks a sequence that must preempt another, which an open plan forbids
    cdef int* planned  # [len(steps), max_num_sequences] entries of the plans
    cdef int* admitted  # [max_num_sequences] entries that got a row in this step
    cdef int num_admitted
    cdef int* prefills  # [max_num_sequences] entries of sequences that have not computed what they knew at admission
    cdef int num_prefills
    cdef int num_promised  # blocks that those lack who were admitted before the others were planned
    cdef int[MAX_OVERTAKEN] passed  # entries that did not fit in this step
    cdef int num_passed
    cdef bint is_overtaking_over  # in this step
    cdef int draft_budget  # drafts that this step may plan
    cdef int num_drafts_planned
    cdef int num_drafts_dropped
    cdef int num_preempted  # in this step
    cdef int* ended  # [table.capacity] entries to report and forget
    cdef int num_ended

    cdef int schedule_all(self) except -1 nogil
    cdef void find_prefills(self) noexcept nogil
    cdef int64_t num_prompt_tokens(self) noexcept nogil
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
    cdef int release_row(self, int entry) except -1 nogil

    cdef int* planned_in(self, int64_t step_id) noexcept nogil
    cdef void advance(self, StepBuffers step, const int* planned) noexcept nogil
    cdef void retreat(self, StepBuffers step, const int* planned) noexcept nogil
    cdef int apply_all(self, StepBuffers step, const int* planned) except -1 nogil
    cdef int forget_ended(self) except -1
    cdef object draft_state(self)

    cdef int wait(self, int entry) except -1 nogil
    cdef void follow(self, int entry, int leader) noexcept nogil
    cdef void leave_leader(self, int entry) noexcept nogil
    cdef int queue_followers(self, int leader) except -1 nogil
    cdef int end(self, int entry, int finish_reason) except -1 nogil
    cdef int find_active(self, object request_key) except -2
