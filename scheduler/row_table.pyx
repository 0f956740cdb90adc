"""Rows of the batch and the blocks they hold."""

from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memmove

from foreword.scheduler.prefix_cache cimport NO_PARENT, NOT_CACHED


cdef class RowTable:
    """Rows `0 .. num_rows - 1`, each with a block table; a row released last is given out first."""

    def __cinit__(self, SequenceTable table, int num_rows, int max_blocks_per_sequence):
        self.table = table
        self.sequences = table.sequences
        self.num_rows = self.num_free = num_rows
        self.cache = table.cache
        self.block_size = self.cache.block_size
        self.max_blocks_per_sequence = max_blocks_per_sequence
        self.pool = BlockPool(self.cache)
        self.running = <int*>malloc(num_rows * sizeof(int))
        self.free_rows = <int*>malloc(num_rows * sizeof(int))
        self.generations = <int32_t*>calloc(num_rows, sizeof(int32_t))
        self.block_tables = <int32_t*>calloc(<size_t>num_rows * max_blocks_per_sequence, sizeof(int32_t))
        self.hits = <int32_t*>malloc(max_blocks_per_sequence * sizeof(int32_t))
        if (
            self.running == NULL
            or self.free_rows == NULL
            or self.generations == NULL
            or self.block_tables == NULL
            or self.hits == NULL
        ):
            raise MemoryError(f"{num_rows} block tables of {max_blocks_per_sequence} entries")
        cdef int i
        for i in range(num_rows):
            self.free_rows[i] = num_rows - 1 - i

    def __dealloc__(self):
        free(self.running)
        free(self.free_rows)
        free(self.generations)
        free(self.block_tables)
        free(self.hits)

    cdef int num_blocks_for(self, int num_tokens) noexcept nogil:
        return (num_tokens + self.block_size - 1) // self.block_size

    cdef int64_t num_prefill_tokens_of(self, int priority) noexcept nogil:
        cdef int i
        cdef int64_t num_tokens = 0
        cdef Sequence* s
        for i in range(self.num_listed):
            s = &self.sequences[self.running[i]]
            if s.row >= 0 and s.priority >= priority:
                num_tokens += max(0, s.prefill_end - s.num_computed)
        return num_tokens

    cdef int32_t* block_table(self, Sequence* s) noexcept nogil:
        return self.block_tables + <size_t>s.row * self.max_blocks_per_sequence

    cdef int num_promised_to(self, Sequence* s) noexcept nogil:
        return max(0, self.num_blocks_for(s.prefill_end) - s.num_blocks)

    cdef int num_tokens_in_reach(self, Sequence* s) noexcept nogil:
        return (s.num_blocks + self.pool.num_free) * self.block_size

    cdef int find_cached(self, Sequence* s, int index, int parent) noexcept nogil:
        """The cached block that equals its full block `index`, which follows the cached block `parent`; -1 for none."""
        cdef const int32_t* token_ids = s.token_ids + <size_t>index * self.block_size
        if s.num_hashed_blocks == index:
            s.block_hashes[index + 1] = self.cache.hash_block(s.block_hashes[index], token_ids)
            s.num_hashed_blocks += 1
        return self.cache.find(s.block_hashes[index + 1], parent, s.salt, token_ids)

    cdef int match(self, Sequence* s) noexcept nogil:
        """Hits are free blocks too, unless another sequence holds them. The last token, which is computed to go on
        from, is never a hit, nor is one that a prompt token to be scored follows."""
        cdef int block = NO_PARENT
        cdef int num_reusable = s.num_scored if s.num_scored < s.num_prompt else s.num_tokens
        cdef int num_taken = self.num_blocks_for(s.num_tokens)
        cdef int max_hits = 0 if s.bypasses_cache else (num_reusable - 1) // self.block_size
        self.num_hits = 0
        while self.num_hits < max_hits:
            block = self.find_cached(s, self.num_hits, block)
            if block < 0:
                break
            num_taken -= self.pool.ref_counts[block] > 0
            self.hits[self.num_hits] = block
            self.num_hits += 1
        return num_taken

    cdef int insert(self, int entry) except -1 nogil:
        cdef Sequence* s = &self.sequences[entry]
        cdef int low = 0, high = self.num_listed, middle
        while low < high:
            middle = (low + high) // 2
            if is_before(&self.sequences[self.running[middle]], s):
                low = middle + 1
            else:
                high = middle
        memmove(&self.running[low + 1], &self.running[low], (self.num_listed - low) * sizeof(int))
        self.running[low] = entry
        self.num_listed += 1
        self.num_running += 1
        self.num_free -= 1
        s.row = self.free_rows[self.num_free]
        self.generations[s.row] += 1
        cdef int i
        for i in range(self.num_hits):
            self.pool.retain(self.hits[i])
            self.block_table(s)[i] = self.hits[i]
        s.num_blocks = s.num_cached_blocks = self.num_hits
        s.num_computed = self.num_hits * self.block_size
        s.prefill_end = s.num_tokens
        self.num_prefill_tokens += s.prefill_end - s.num_computed
        return 0

    cdef int grow(self, Sequence* s, int num_tokens) except -1 nogil:
        cdef int32_t* block_table = self.block_table(s)
        while s.num_blocks * self.block_size < num_tokens:
            block_table[s.num_blocks] = self.pool.allocate()
            if block_table[s.num_blocks] < 0:
                with gil:
                    raise AssertionError("planned more tokens than there are blocks for")
            s.num_blocks += 1
        return 0

    cdef int cache_full_blocks(self, Sequence* s) except -1 nogil:
        """Where the cache has an equal block, the sequence holds that one from now on and frees its own: so all that
        follows has a cached parent, which stays as long as the sequence does."""
        cdef int32_t* block_table = self.block_table(s)
        cdef int i, parent, block
        while s.num_computed >= (s.num_cached_blocks + 1) * self.block_size:
            i = s.num_cached_blocks
            parent = block_table[i - 1] if i else NO_PARENT
            block = self.find_cached(s, i, parent)
            if block < 0:
                self.cache.insert(
                    block_table[i], s.block_hashes[i + 1], parent, s.salt, s.token_ids + <size_t>i * self.block_size
                )
            else:
                self.pool.retain(block)
                self.pool.release(block_table[i])
                block_table[i] = block
                s.num_sent_blocks = min(s.num_sent_blocks, i)
            s.num_cached_blocks += 1
        return 0

    cdef int release(self, Sequence* s) except -1 nogil:
        cdef int32_t* block_table = self.block_table(s)
        while s.num_blocks:
            s.num_blocks -= 1
            self.pool.release(block_table[s.num_blocks])
        s.num_cached_blocks = s.num_sent_blocks = 0
        self.free_rows[self.num_free] = s.row
        self.num_free += 1
        self.num_running -= 1
        self.num_prefill_tokens -= max(0, s.prefill_end - s.num_computed)
        s.row = -1
        return 0

    cdef void compact(self) noexcept nogil:
        cdef int i, num_kept = 0
        if self.num_listed == self.num_running:
            return
        for i in range(self.num_listed):
            if self.sequences[self.running[i]].row >= 0:
                self.running[num_kept] = self.running[i]
                num_kept += 1
        self.num_listed = num_kept

    cdef int check_invariants(self) except -1:
        cdef Sequence* s
        cdef int i, j, block, parent, num_full
        holders = {}
        self.cache.check_invariants()
        self.pool.check_invariants()
        rows = [self.free_rows[i] for i in range(self.num_free)]
        cdef int64_t num_prefill_tokens = 0
        for i in range(self.num_listed):
            s = &self.sequences[self.running[i]]
            assert i == 0 or is_before(&self.sequences[self.running[i - 1]], s), "running sequences are out of order"
            if s.row < 0:
                continue
            rows.append(s.row)
            num_prefill_tokens += max(0, s.prefill_end - s.num_computed)
            assert s.num_blocks <= self.max_blocks_per_sequence, "a block table is too long"
            assert s.num_computed <= s.num_blocks * self.block_size, "tokens are computed outside of held blocks"
            num_full = 0 if s.bypasses_cache else s.num_computed // self.block_size
            # One that failed while a plan computes it keeps what it has filled out of the cache.
            assert s.update.finish_reason or s.num_cached_blocks == num_full, "a full block is not cached, or one that is not full is"
            parent = NO_PARENT
            for j in range(s.num_blocks):
                block = self.block_table(s)[j]
                holders[block] = holders.get(block, 0) + 1
                if j < s.num_cached_blocks:
                    assert self.find_cached(s, j, parent) == block, "a cached block holds other tokens"
                else:
                    assert self.cache.blocks[block].parent == NOT_CACHED, "a cached block could be written to"
                    assert self.pool.ref_count(block) == 1, "a block that can be written to is shared"
                parent = block
        assert sorted(rows) == list(range(self.num_rows)), "a row is lost or held twice"
        assert self.num_running == self.num_rows - self.num_free, "num_running is wrong"
        assert self.num_prefill_tokens == num_prefill_tokens, "num_prefill_tokens is wrong"
        for i in range(self.pool.num_blocks):
            assert self.pool.ref_count(i) == holders.get(i, 0), f"block {i} has a wrong reference count"
        return 0
