"""Who may write to which block of the KV cache."""


cdef class BlockPool:
    cdef readonly int num_blocks
    cdef readonly int num_free
    cdef int* free_stack  # [num_blocks]; the first num_free entries are the free blocks, the last of them goes next
    cdef int* ref_counts  # [num_blocks]; block tables that hold the block, 0 for a free one

    cpdef int allocate(self) noexcept nogil  # a block with one reference, -1 when none is free
    cpdef int retain(self, int block) except -1 nogil  # one more table holds the block; returns its references
    cpdef int release(self, int block) except -1 nogil  # one table fewer; at 0 references the block is free
    cpdef int ref_count(self, int block) except -1 nogil
    cdef int check_held(self, int block) except -1 nogil
