"""Rows of the batch: which sequences hold one, in which order, with which blocks of the KV cache."""

from libc.stdint cimport int32_t, int64_t

from foreword.scheduler.block_pool cimport BlockPool
from foreword.scheduler.prefix_cache cimport PrefixCache
from foreword.scheduler.sequence_table cimport Sequence, SequenceTable


cdef inline bint is_before(Sequence* a, Sequence* b) noexcept nogil:
    """Which of two sequences is served first: the one of higher priority, then the older one."""
    return a.priority > b.priority or (a.priority == b.priority and a.order < b.order)


cdef class RowTable:
    cdef int num_rows
    cdef int block_size
    cdef int max_blocks_per_sequence
    cdef Sequence* sequences  # of the sequence table
    cdef SequenceTable table  # keeps them alive
    cdef PrefixCache cache
    cdef BlockPool pool
    cdef int* running  # [num_rows] entries in the order in which they are served; those without a row are skipped
    cdef int num_listed  # in `running`
    cdef int num_running  # of those, entries that hold a row
    cdef int64_t num_prefill_tokens  # that they knew when they got their rows and have not computed yet
    cdef int* free_rows  # [num_rows]; the first num_free are free, the last of them goes next
    cdef int num_free
    cdef int32_t* generations  # [num_rows] how often a row was given out
    cdef int32_t* block_tables  # [num_rows, max_blocks_per_sequence]
    cdef int32_t* hits  # [max_blocks_per_sequence] cached blocks that the sequence last matched starts with
    cdef int num_hits

    cdef int num_blocks_for(self, int num_tokens) noexcept nogil
    cdef int32_t* block_table(self, Sequence* s) noexcept nogil  # of its row
    cdef int num_promised_to(self, Sequence* s) noexcept nogil  # blocks that it lacks for what it knew when it got its row
    cdef int num_tokens_in_reach(self, Sequence* s) noexcept nogil  # that its blocks and the free ones hold
    cdef int64_t num_prefill_tokens_of(self, int priority) noexcept nogil  # of those, at this priority or above
    cdef int match(self, Sequence* s) noexcept nogil  # look for its hits; returns how many free blocks it would take
    cdef int insert(self, int entry) except -1 nogil  # give the sequence last matched a row and its hits; a row is free
    cdef int grow(self, Sequence* s, int num_tokens) except -1 nogil  # to blocks for so many tokens
    cdef int cache_full_blocks(self, Sequence* s) except -1 nogil  # those it has filled since the last call
    cdef int release(self, Sequence* s) except -1 nogil  # take row and blocks; the entry stays listed until `compact`
    cdef int find_cached(self, Sequence* s, int index, int parent) noexcept nogil
    cdef void compact(self) noexcept nogil  # drop entries without a row from `running`; before the next `insert`
    cdef int check_invariants(self) except -1
