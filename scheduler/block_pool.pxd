"""Who may write to which block of the KV cache."""

from foreword.scheduler.prefix_cache cimport PrefixCache


cdef class BlockPool:
    cdef readonly int num_blocks
    cdef readonly int num_free
    cdef PrefixCache cache
    cdef int* free_stack  # [num_blocks]; the first num_stacked are free and not cached, the last of them goes next
    cdef int num_stacked
    cdef int* older  # [num_blocks + 1] ring of the free blocks that are cached: neighbour that goes first;
    cdef int* newer  # [num_blocks + 1] its neighbour that goes later; num_blocks is where oldest and newest meet
    cdef int* ref_counts  # [num_blocks]; block tables that hold the block, 0 for a free one

    cpdef int allocate(self) noexcept nogil  # a block with one reference, -1 when none is free
    cpdef int retain(self, int block) except -1 nogil  # one more table holds the block; returns its references
    cpdef int release(self, int block) except -1 nogil  # one table fewer; at 0 references the block is free
    cpdef int ref_count(self, int block) except -1 nogil
    cdef int check_invariants(self) except -1
