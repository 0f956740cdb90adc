"""A tree of blocks, found through a hash table with linear probing and deletion by shifting back.

Knuth, The Art of Computer Programming, volume 3, section 6.4: algorithms L and R. At most half of the table is in use.
"""

cimport cython
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy

from foreword.scheduler.sip_hash cimport read_key, sip_hash


cdef CacheSalt* new_salt(bytes salt) except? NULL:
    if not salt:
        return NULL
    cdef CacheSalt* copy = <CacheSalt*>malloc(sizeof(CacheSalt) + len(salt))
    if copy == NULL:
        raise MemoryError("cache salt")
    copy.num_references = 1
    copy.length = len(salt)
    memcpy(copy + 1, <const char*>salt, len(salt))
    return copy


cdef void release_salt(CacheSalt* salt) noexcept nogil:
    if salt != NULL:
        salt.num_references -= 1
        if salt.num_references == 0:
            free(salt)


cdef inline bint is_same_salt(CacheSalt* a, CacheSalt* b) noexcept nogil:
    if a == b:
        return True
    return a != NULL and b != NULL and a.length == b.length and memcmp(a + 1, b + 1, a.length) == 0


@cython.final
cdef class PrefixCache:
    def __cinit__(self, int num_blocks, int block_size, bytes key):
        cdef uint64_t table_size = 2
        while table_size < 2 * <uint64_t>num_blocks:
            table_size *= 2
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.key = read_key(key)
        self.hash_mask = ~<uint64_t>0
        self.table_mask = table_size - 1
        self.blocks = <CachedBlock*>calloc(num_blocks, sizeof(CachedBlock))
        self.token_ids = <int32_t*>malloc(<size_t>num_blocks * block_size * sizeof(int32_t))
        self.table = <int*>malloc(table_size * sizeof(int))
        self.message = <char*>malloc(sizeof(Hash128) + block_size * sizeof(int32_t))
        if self.blocks == NULL or self.token_ids == NULL or self.table == NULL or self.message == NULL:
            raise MemoryError(f"prefix cache of {num_blocks} blocks")
        cdef uint64_t i
        for i in range(<uint64_t>num_blocks):
            self.blocks[i].parent = NOT_CACHED
        for i in range(table_size):
            self.table[i] = -1

    def __dealloc__(self):
        cdef int i
        if self.blocks != NULL:
            for i in range(self.num_blocks):
                release_salt(self.blocks[i].salt)
        free(self.blocks)
        free(self.token_ids)
        free(self.table)
        free(self.message)

    cdef Hash128 root(self, bytes salt):
        return sip_hash(self.key, salt, len(salt))

    cdef Hash128 hash_block(self, Hash128 parent, const int32_t* token_ids) noexcept nogil:
        cdef size_t num_bytes = self.block_size * sizeof(int32_t)
        memcpy(self.message, &parent, sizeof(Hash128))
        memcpy(self.message + sizeof(Hash128), token_ids, num_bytes)
        cdef Hash128 result = sip_hash(self.key, self.message, sizeof(Hash128) + num_bytes)
        result.low &= self.hash_mask
        result.high &= self.hash_mask
        return result

    cdef int find(self, Hash128 hash, int parent, CacheSalt* salt, const int32_t* token_ids) noexcept nogil:
        cdef uint64_t slot = hash.low & self.table_mask
        cdef int block = self.table[slot]
        cdef CachedBlock* b
        while block >= 0:
            b = &self.blocks[block]
            if (
                b.hash.low == hash.low
                and b.hash.high == hash.high
                and b.parent == parent
                and is_same_salt(b.salt, salt if parent == NO_PARENT else NULL)
                and memcmp(self.token_ids + <size_t>block * self.block_size, token_ids, self.block_size * 4) == 0
            ):
                return block
            slot = (slot + 1) & self.table_mask
            block = self.table[slot]
        return -1

    cdef void insert(
        self, int block, Hash128 hash, int parent, CacheSalt* salt, const int32_t* token_ids
    ) noexcept nogil:
        cdef uint64_t slot = hash.low & self.table_mask
        while self.table[slot] >= 0:
            slot = (slot + 1) & self.table_mask
        self.table[slot] = block
        self.blocks[block].hash = hash
        self.blocks[block].parent = parent
        if parent == NO_PARENT and salt != NULL:
            salt.num_references += 1
            self.blocks[block].salt = salt
        memcpy(self.token_ids + <size_t>block * self.block_size, token_ids, self.block_size * sizeof(int32_t))
        self.num_cached += 1

    cdef void remove(self, int block) noexcept nogil:
        cdef uint64_t hole = self.blocks[block].hash.low & self.table_mask
        cdef uint64_t slot, home
        while self.table[hole] != block:
            hole = (hole + 1) & self.table_mask
        slot = hole
        while True:
            slot = (slot + 1) & self.table_mask
            if self.table[slot] < 0:
                break
            home = self.blocks[self.table[slot]].hash.low & self.table_mask
            if ((slot - home) & self.table_mask) >= ((slot - hole) & self.table_mask):
                self.table[hole] = self.table[slot]
                hole = slot
        self.table[hole] = -1
        release_salt(self.blocks[block].salt)
        self.blocks[block].salt = NULL
        self.blocks[block].parent = NOT_CACHED
        self.num_cached -= 1

    cdef int check_invariants(self) except -1:
        cdef CachedBlock* b
        cdef Hash128 parent, expected
        cdef int32_t* token_ids
        cdef uint64_t i
        cdef int block, num_cached = 0
        entries = [self.table[i] for i in range(self.table_mask + 1) if self.table[i] >= 0]
        assert len(entries) == len(set(entries)) == self.num_cached, "the table has lost or doubled a block"
        for block in range(self.num_blocks):
            b = &self.blocks[block]
            if b.parent == NOT_CACHED:
                assert b.salt == NULL, "a block outside of the cache keeps a salt"
                continue
            num_cached += 1
            token_ids = self.token_ids + <size_t>block * self.block_size
            if b.parent == NO_PARENT:
                parent = self.root(b"" if b.salt == NULL else (<char*>(b.salt + 1))[: b.salt.length])
            else:
                assert self.blocks[b.parent].parent != NOT_CACHED, f"block {block} has lost its parent"
                assert b.salt == NULL, "only first blocks keep a salt"
                parent = self.blocks[b.parent].hash
            expected = self.hash_block(parent, token_ids)
            assert b.hash.low == expected.low and b.hash.high == expected.high, f"block {block} has a wrong hash"
            assert self.find(b.hash, b.parent, b.salt, token_ids) == block, f"block {block} is not found"
        assert num_cached == self.num_cached, "num_cached is wrong"
        return 0
