"""State of the scheduler and the parts of its two steps.

Entries index `table`, positions index `rows.running`. A cancelled or expired sequence joins `ended` and is forgotten
once `apply` has reported it.
"""

from libc.stdint cimport int32_t, int64_t

from foreword.scheduler.block_pool cimport BlockPool
from foreword.scheduler.indexed_heap cimport IndexedHeap
from foreword.scheduler.prefix_cache cimport PrefixCache
from foreword.scheduler.row_table cimport RowTable
from foreword.scheduler.sequence_table cimport Sequence, SequenceTable
from foreword.scheduler.step_buffers cimport StepBuffers


cdef class Scheduler:
    cdef readonly object config
    cdef int max_num_batched_tokens
    cdef int max_model_len
    cdef int block_size

    cdef readonly PrefixCache prefix_cache
    cdef SequenceTable table
    cdef Sequence* sequences  # of the table
    cdef RowTable rows
    cdef BlockPool pool  # of the rows
    cdef IndexedHeap waiting  # entries without a row that may run, and follow no other, by (priority, order)
    cdef IndexedHeap deadlines  # entries that have a deadline
    cdef int num_waiting  # entries without a row, paused ones and followers too
    cdef int64_t num_waiting_tokens  # their prompt tokens
    cdef int num_paused  # paused entries that hold a row

    cdef StepBuffers step
    cdef int64_t step_id
    cdef int64_t now_ns  # latest time seen
    cdef bint is_step_open  # scheduled and not applied yet
    cdef int* planned  # [max_num_sequences] entries of the plan
    cdef int* admitted  # [max_num_sequences] entries that got a row in this step
    cdef int num_admitted
    cdef int* prefills  # [max_num_sequences] positions of sequences that have not computed what they knew at admission
    cdef int num_prefills
    cdef int num_preempted  # in this step
    cdef int* ended  # [table.capacity] entries to report and forget
    cdef int num_ended

    cdef int schedule_all(self) except -1 nogil
    cdef int schedule_decodes(self) except -1 nogil
    cdef int schedule_prefills(self) except -1 nogil
    cdef int schedule_admissions(self, int num_reserved) except -1 nogil
    cdef int num_draft_slots(self, Sequence* s) noexcept nogil
    cdef int admit(self, int entry) except -1 nogil
    cdef int plan(self, int entry, int num_tokens) except -1 nogil

    cdef bint make_room(self, int position) except -1 nogil
    cdef int pick_victim(self, int position) noexcept nogil
    cdef int preempt_paused(self, Sequence* s) except -1 nogil
    cdef int preempt(self, int entry) except -1 nogil
    cdef int release_row(self, Sequence* s) except -1 nogil

    cdef int apply_all(self) except -1 nogil

    cdef int queue(self, int entry) except -1 nogil
    cdef int wait(self, int entry) except -1 nogil
    cdef void follow(self, int entry, int leader) noexcept nogil
    cdef void leave_leader(self, int entry) noexcept nogil
    cdef int queue_followers(self, int leader) except -1 nogil
    cdef int end(self, int entry, int finish_reason) except -1 nogil
    cdef int find_active(self, object request_key) except -2
