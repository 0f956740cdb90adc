"""Which running sequences lose their rows and blocks to others: of the lowest priority, of these the newest, go first."""

from libc.stdint cimport int32_t

from foreword.scheduler.row_table cimport RowTable
from foreword.scheduler.sequence_table cimport Sequence
from foreword.scheduler.waiting_queue cimport Flow, WaitingQueue


cdef class Victims:
    cdef RowTable rows
    cdef Sequence* sequences  # of the rows
    cdef WaitingQueue waiting
    cdef int* entries  # [num_rows] those last chosen for a waiting sequence, in the order in which they were
    cdef int num_entries
    cdef int num_free_blocks  # while they are chosen: that a waiting sequence could take without them
    cdef int num_crowded  # while they are chosen: rows that the flow with the most of them keeps

    cdef int for_running(self, Sequence* s) noexcept nogil  # one for a sequence that needs a block, which may be itself
    # Choose them for a waiting sequence to be admitted; false when even all that would give way are not enough. One that
    # is overdue may take rows of its own priority too. The blocks reserved and one for every running sequence are left.
    cdef bint for_waiting(self, Sequence* s, bint is_overdue, int num_reserved, int num_open) noexcept nogil

    cdef int crowded_flow(self, int priority) noexcept nogil
    cdef bint gives_way(self, Sequence* v, Sequence* s, int crowded, int num_open) noexcept nogil
    cdef bint fits(self, Sequence* s) noexcept nogil
    cdef void take(self, Sequence* v, int crowded) noexcept nogil
    cdef void put_back(self, Sequence* v, int crowded) noexcept nogil
    cdef void spare(self, Sequence* s, int crowded) noexcept nogil
