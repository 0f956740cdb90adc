"""Free stack, eviction order and reference counts of the blocks of the KV cache."""

cimport cython
from libc.stdlib cimport calloc, free, malloc

from foreword.scheduler.prefix_cache cimport NO_PARENT, NOT_CACHED


@cython.final
cdef class BlockPool:
    def __cinit__(self, PrefixCache cache not None):
        cdef int i, num_blocks = cache.num_blocks
        self.cache = cache
        self.free_stack = <int*>malloc(num_blocks * sizeof(int))
        self.older = <int*>malloc((num_blocks + 1) * sizeof(int))
        self.newer = <int*>malloc((num_blocks + 1) * sizeof(int))
        self.ref_counts = <int*>calloc(num_blocks, sizeof(int))
        if self.free_stack == NULL or self.older == NULL or self.newer == NULL or self.ref_counts == NULL:
            raise MemoryError(f"pool of {num_blocks} blocks")
        self.num_blocks = self.num_free = self.num_stacked = num_blocks
        self.older[num_blocks] = self.newer[num_blocks] = num_blocks
        for i in range(num_blocks):
            self.free_stack[i] = num_blocks - 1 - i

    def __dealloc__(self):
        free(self.free_stack)
        free(self.older)
        free(self.newer)
        free(self.ref_counts)

    cpdef int allocate(self) noexcept nogil:
        cdef int block
        if self.num_free == 0:
            return -1
        if self.num_stacked:
            self.num_stacked -= 1
            block = self.free_stack[self.num_stacked]
        else:
            block = self.newer[self.num_blocks]
            unlink(self, block)
            self.cache.remove(block)
        self.num_free -= 1
        self.ref_counts[block] = 1
        return block

    cpdef int retain(self, int block) except -1 nogil:
        if self.ref_count(block) == 0:
            if self.cache.blocks[block].parent == NOT_CACHED:
                refuse_free(block)
            unlink(self, block)
            self.num_free -= 1
        self.ref_counts[block] += 1
        return self.ref_counts[block]

    cpdef int release(self, int block) except -1 nogil:
        if self.ref_count(block) == 0:
            refuse_free(block)
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self.num_free += 1
            if self.cache.blocks[block].parent == NOT_CACHED:
                self.free_stack[self.num_stacked] = block
                self.num_stacked += 1
            else:
                link_newest(self, block)
        return self.ref_counts[block]

    cpdef int ref_count(self, int block) except -1 nogil:
        if not 0 <= block < self.num_blocks:
            with gil:
                raise IndexError(f"block {block} is outside the pool of {self.num_blocks}")
        return self.ref_counts[block]

    cdef int check_invariants(self) except -1:
        cdef int i, parent
        stacked = {self.free_stack[i] for i in range(self.num_stacked)}
        ring = []
        i = self.newer[self.num_blocks]
        while i != self.num_blocks:
            assert self.older[self.newer[i]] == i, "the ring is broken"
            ring.append(i)
            i = self.newer[i]
        free_blocks = stacked.union(ring)
        assert len(free_blocks) == self.num_stacked + len(ring) == self.num_free, "a block is free twice"
        assert free_blocks == {i for i in range(self.num_blocks) if self.ref_counts[i] == 0}, "a block is lost"
        assert {i for i in free_blocks if self.cache.blocks[i].parent != NOT_CACHED} == set(ring), (
            "a cached block is stacked, or one that is not cached waits for its eviction"
        )
        evicted = set()
        for i in ring:
            evicted.add(i)
            parent = self.cache.blocks[i].parent
            assert parent == NO_PARENT or parent not in evicted, "a parent is evicted before its child"
        return 0


cdef inline void unlink(BlockPool pool, int block) noexcept nogil:
    pool.newer[pool.older[block]] = pool.newer[block]
    pool.older[pool.newer[block]] = pool.older[block]


cdef inline void link_newest(BlockPool pool, int block) noexcept nogil:
    cdef int end = pool.num_blocks
    pool.older[block] = pool.older[end]
    pool.newer[block] = end
    pool.newer[pool.older[end]] = block
    pool.older[end] = block


cdef int refuse_free(int block) except -1 nogil:
    with gil:
        raise ValueError(f"block {block} is free")
