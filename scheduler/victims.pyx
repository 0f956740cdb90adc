"""Whom a preemption hits, and whom it spares."""

cimport cython
from libc.stdlib cimport free, malloc

from foreword.scheduler.row_table cimport is_before

cdef enum:
    MAX_DOUBLINGS = 30


cdef inline bint has_progress(Sequence* s) noexcept nogil:
    """Whether it has gained a token since its last preemption."""
    return s.update.num_preemptions == 0 or s.num_tokens > s.prefill_end


cdef inline bint has_earned_its_row(Sequence* s) noexcept nogil:
    """Whether it has gained what it costs to preempt it: nothing, 1, 3, 7 tokens and so on, twice as many each time.

    So a sequence of n tokens gives way log2 n times at most, and what is computed again is bounded.
    """
    cdef int num_doublings = min(s.update.num_preemptions, MAX_DOUBLINGS)
    return s.num_tokens - s.prefill_end >= (1 << num_doublings) - 1


@cython.final
cdef class Victims:
    def __cinit__(self, RowTable rows not None, WaitingQueue waiting not None):
        self.rows = rows
        self.sequences = rows.sequences
        self.waiting = waiting
        self.entries = <int*>malloc(rows.num_rows * sizeof(int))
        if self.entries == NULL:
            raise MemoryError("victims")

    def __dealloc__(self):
        free(self.entries)

    cdef int for_running(self, Sequence* s) noexcept nogil:
        """The last paused sequence, else the last from `s` on that has a new token since its last preemption."""
        cdef int i, with_progress = -1, without_progress = -1
        cdef Sequence* v
        for i in range(self.rows.num_listed - 1, -1, -1):
            v = &self.sequences[self.rows.running[i]]
            if v.row < 0:
                continue
            if v.is_paused:
                return self.rows.running[i]
            if is_before(v, s):
                continue
            if has_progress(v):
                with_progress = max(with_progress, i)
            else:
                without_progress = max(without_progress, i)
        return self.rows.running[with_progress if with_progress >= 0 else without_progress]

    cdef bint for_waiting(self, Sequence* s, bint is_overdue, int num_reserved, int num_open) noexcept nogil:
        cdef int i = self.rows.num_listed
        cdef int crowded = self.crowded_flow(s.priority) if is_overdue else -1
        cdef bint is_enough
        cdef Sequence* v
        self.num_entries = 0
        self.num_free_blocks = self.rows.pool.num_free - num_reserved - self.rows.num_running
        self.num_crowded = self.waiting.flows[crowded].num_rows if crowded >= 0 else 0
        is_enough = self.fits(s)
        while not is_enough and i > 0:
            i -= 1
            v = &self.sequences[self.rows.running[i]]
            if self.gives_way(v, s, crowded, num_open):
                self.take(v, crowded)
                self.entries[self.num_entries] = self.rows.running[i]
                self.num_entries += 1
                is_enough = self.fits(s)
        if is_enough:
            self.spare(s, crowded)
        for i in range(self.num_entries):
            self.put_back(&self.sequences[self.entries[i]], crowded)
        return is_enough

    cdef int crowded_flow(self, int priority) noexcept nogil:
        """The flow that holds most rows of a priority, of several the one with the newest; -1 when none holds two."""
        cdef int i, crowded = -1, most = 1
        cdef Sequence* v
        for i in range(self.rows.num_listed - 1, -1, -1):
            v = &self.sequences[self.rows.running[i]]
            if v.priority == priority and self.waiting.flows[v.flow].num_rows > most:
                crowded, most = v.flow, self.waiting.flows[v.flow].num_rows
        return crowded

    cdef bint gives_way(self, Sequence* v, Sequence* s, int crowded, int num_open) noexcept nogil:
        """Never one that has ended or that this step has planned."""
        if v.row < 0 or v.update.finish_reason or v.num_planned > num_open or not has_earned_its_row(v):
            return False
        return v.priority < s.priority or (v.flow == crowded and self.num_crowded > 1)

    cdef bint fits(self, Sequence* s) noexcept nogil:
        if self.rows.num_free + self.num_entries == 0 or self.num_free_blocks < 1:
            return False
        return self.rows.match(s) <= self.num_free_blocks

    cdef void take(self, Sequence* v, int crowded) noexcept nogil:
        """Count as if it had no row: a block is free when all that hold it are gone."""
        cdef const int32_t* block_table = self.rows.block_table(v)
        cdef int* ref_counts = self.rows.pool.ref_counts
        cdef int i
        for i in range(v.num_blocks):
            ref_counts[block_table[i]] -= 1
            self.num_free_blocks += ref_counts[block_table[i]] == 0
        self.num_free_blocks += self.rows.num_promised_to(v) + 1
        self.num_crowded -= v.flow == crowded

    cdef void put_back(self, Sequence* v, int crowded) noexcept nogil:
        cdef const int32_t* block_table = self.rows.block_table(v)
        cdef int* ref_counts = self.rows.pool.ref_counts
        cdef int i
        for i in range(v.num_blocks):
            self.num_free_blocks -= ref_counts[block_table[i]] == 0
            ref_counts[block_table[i]] += 1
        self.num_free_blocks -= self.rows.num_promised_to(v) + 1
        self.num_crowded += v.flow == crowded

    cdef void spare(self, Sequence* s, int crowded) noexcept nogil:
        """Drop from the choice whom the later ones make unnecessary. Without the last one it is not enough."""
        cdef int i, j, entry
        for i in range(self.num_entries - 2, -1, -1):
            entry = self.entries[i]
            self.put_back(&self.sequences[entry], crowded)
            self.num_entries -= 1
            if self.fits(s):
                for j in range(i, self.num_entries):
                    self.entries[j] = self.entries[j + 1]
            else:
                self.num_entries += 1
                self.take(&self.sequences[entry], crowded)
