"""Rows of the batch and the blocks they hold."""

from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memmove


cdef inline bint is_before(Sequence* a, Sequence* b) noexcept nogil:
    """Higher priority first, then the older request."""
    return a.priority > b.priority or (a.priority == b.priority and a.order < b.order)


cdef class RowTable:
    """Rows `0 .. num_rows - 1`, each with a block table; a row released last is given out first."""

    def __cinit__(self, SequenceTable table, int num_rows, int num_blocks, int block_size, int max_blocks_per_sequence):
        self.table = table
        self.sequences = table.sequences
        self.num_rows = self.num_free = num_rows
        self.block_size = block_size
        self.max_blocks_per_sequence = max_blocks_per_sequence
        self.pool = BlockPool(num_blocks)
        self.running = <int*>malloc(num_rows * sizeof(int))
        self.free_rows = <int*>malloc(num_rows * sizeof(int))
        self.generations = <int32_t*>calloc(num_rows, sizeof(int32_t))
        self.block_tables = <int32_t*>calloc(<size_t>num_rows * max_blocks_per_sequence, sizeof(int32_t))
        if self.running == NULL or self.free_rows == NULL or self.generations == NULL or self.block_tables == NULL:
            raise MemoryError(f"{num_rows} block tables of {max_blocks_per_sequence} entries")
        cdef int i
        for i in range(num_rows):
            self.free_rows[i] = num_rows - 1 - i

    def __dealloc__(self):
        free(self.running)
        free(self.free_rows)
        free(self.generations)
        free(self.block_tables)

    cdef int num_blocks_for(self, int num_tokens) noexcept nogil:
        return (num_tokens + self.block_size - 1) // self.block_size

    cdef int32_t* block_table(self, Sequence* s) noexcept nogil:
        return self.block_tables + <size_t>s.row * self.max_blocks_per_sequence

    cdef int num_tokens_in_reach(self, Sequence* s) noexcept nogil:
        return (s.num_blocks + self.pool.num_free) * self.block_size

    cdef void insert(self, int entry) noexcept nogil:
        cdef Sequence* s = &self.sequences[entry]
        cdef int low = 0, high = self.num_running, middle
        while low < high:
            middle = (low + high) // 2
            if is_before(&self.sequences[self.running[middle]], s):
                low = middle + 1
            else:
                high = middle
        memmove(&self.running[low + 1], &self.running[low], (self.num_running - low) * sizeof(int))
        self.running[low] = entry
        self.num_running += 1
        self.num_free -= 1
        s.row = self.free_rows[self.num_free]
        self.generations[s.row] += 1

    cdef int grow(self, Sequence* s, int num_tokens, StepBuffers step) except -1 nogil:
        cdef int32_t* block_table = self.block_table(s)
        cdef int32_t* update
        while s.num_blocks * self.block_size < num_tokens:
            block_table[s.num_blocks] = self.pool.allocate()
            if block_table[s.num_blocks] < 0:
                with gil:
                    raise AssertionError("planned more tokens than there are blocks for")
            update = step.block_table_updates + 3 * step.num_block_table_updates
            update[0], update[1], update[2] = s.row, s.num_blocks, block_table[s.num_blocks]
            step.num_block_table_updates += 1
            s.num_blocks += 1
        return 0

    cdef int release(self, Sequence* s) except -1 nogil:
        cdef int32_t* block_table = self.block_table(s)
        while s.num_blocks:
            s.num_blocks -= 1
            self.pool.release(block_table[s.num_blocks])
        self.free_rows[self.num_free] = s.row
        self.num_free += 1
        s.row = -1
        return 0

    cdef void compact(self) noexcept nogil:
        cdef int i, num_kept = 0
        for i in range(self.num_running):
            if self.sequences[self.running[i]].row >= 0:
                self.running[num_kept] = self.running[i]
                num_kept += 1
        self.num_running = num_kept

    cdef int check_invariants(self) except -1:
        cdef Sequence* s
        cdef int i, j, block
        holders = {}
        rows = [self.free_rows[i] for i in range(self.num_free)]
        for i in range(self.num_running):
            s = &self.sequences[self.running[i]]
            rows.append(s.row)
            assert i == 0 or is_before(&self.sequences[self.running[i - 1]], s), "running sequences are out of order"
            assert s.num_blocks <= self.max_blocks_per_sequence, "a block table is too long"
            assert s.num_computed <= s.num_blocks * self.block_size, "tokens are computed outside of held blocks"
            for j in range(s.num_blocks):
                block = self.block_table(s)[j]
                holders[block] = holders.get(block, 0) + 1
        assert sorted(rows) == list(range(self.num_rows)), "a row is lost or held twice"
        assert self.pool.num_free + len(holders) == self.pool.num_blocks, "a block is lost"
        for i in range(self.pool.num_blocks):
            assert self.pool.ref_count(i) == holders.get(i, 0), f"block {i} has a wrong reference count"
        free_blocks = {self.pool.free_stack[i] for i in range(self.pool.num_free)}
        assert len(free_blocks) == self.pool.num_free, "a block is free twice"
        assert free_blocks.isdisjoint(holders), "a held block is free"
        return 0
