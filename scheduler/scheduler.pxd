"""State of the scheduler and the parts of its two steps.

Entries index `table`. A cancelled or expired sequence joins `ended` and is forgotten once `apply` has reported it.
"""

from libc.stdint cimport int32_t, int64_t

from foreword.scheduler.heap_forest cimport HeapForest
from foreword.scheduler.planner cimport Planner
from foreword.scheduler.prefix_cache cimport PrefixCache
from foreword.scheduler.row_table cimport RowTable
from foreword.scheduler.sequence_table cimport Sequence, SequenceTable
from foreword.scheduler.step_buffers cimport StepBuffers
from foreword.scheduler.throughput cimport Throughput
from foreword.scheduler.waiting_queue cimport WaitingQueue


cdef class Scheduler:
    cdef readonly object config
    cdef int max_model_len
    cdef int block_size
    cdef int lookahead

    cdef readonly PrefixCache prefix_cache
    cdef SequenceTable table
    cdef Sequence* sequences  # of the table
    cdef Planner planner
    cdef RowTable rows  # of the planner
    cdef WaitingQueue waiting  # of the planner
    cdef HeapForest deadlines  # entries that have a deadline
    cdef int first_deadline  # root of the deadlines

    cdef Throughput throughput
    cdef tuple steps  # StepBuffers of the open plans and the next one
    cdef int64_t step_id
    cdef int64_t now_ns  # latest time seen
    cdef int num_open  # plans that have not been applied
    cdef int* planned  # [len(steps), max_num_sequences] entries of the plans
    cdef int* ended  # [table.capacity] entries to report and forget
    cdef int num_ended

    cdef StepBuffers step_of(self, int64_t step_id)
    cdef int* planned_in(self, int64_t step_id) noexcept nogil
    cdef void advance(self, StepBuffers step, const int* planned) noexcept nogil
    cdef void retreat(self, StepBuffers step, const int* planned) noexcept nogil
    cdef int apply_all(self, StepBuffers step, const int* planned) except -1 nogil
    cdef int forget_ended(self) except -1
    cdef object draft_state(self)

    cdef void follow(self, int entry, int leader) noexcept nogil
    cdef void leave_leader(self, int entry) noexcept nogil
    cdef int queue_followers(self, int leader) except -1 nogil
    cdef int end(self, int entry, int finish_reason) except -1 nogil
    cdef int find_active(self, object request_key) except -2
