"""Free stack and reference counts of the blocks of the KV cache."""

cimport cython
from libc.stdlib cimport calloc, free, malloc


@cython.final
cdef class BlockPool:
    def __cinit__(self, int num_blocks):
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.free_stack = <int*>malloc(num_blocks * sizeof(int))
        self.ref_counts = <int*>calloc(num_blocks, sizeof(int))
        if self.free_stack == NULL or self.ref_counts == NULL:
            raise MemoryError("block pool")
        self.num_blocks = self.num_free = num_blocks
        cdef int i
        for i in range(num_blocks):
            self.free_stack[i] = num_blocks - 1 - i

    def __dealloc__(self):
        free(self.free_stack)
        free(self.ref_counts)

    cpdef int allocate(self) noexcept nogil:
        if self.num_free == 0:
            return -1
        self.num_free -= 1
        cdef int block = self.free_stack[self.num_free]
        self.ref_counts[block] = 1
        return block

    cpdef int retain(self, int block) except -1 nogil:
        self.check_held(block)
        self.ref_counts[block] += 1
        return self.ref_counts[block]

    cpdef int release(self, int block) except -1 nogil:
        self.check_held(block)
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self.free_stack[self.num_free] = block
            self.num_free += 1
        return self.ref_counts[block]

    cpdef int ref_count(self, int block) except -1 nogil:
        if not 0 <= block < self.num_blocks:
            with gil:
                raise IndexError(f"block {block} is outside the pool of {self.num_blocks}")
        return self.ref_counts[block]

    cdef int check_held(self, int block) except -1 nogil:
        if self.ref_count(block) == 0:
            with gil:
                raise ValueError(f"block {block} is free")
        return 0
