"""Which blocks of the KV cache hold which prefixes of sequences."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from foreword.scheduler.sip_hash cimport Hash128


cdef enum:
    NO_PARENT = -1  # of the first block of a sequence
    NOT_CACHED = -2


cdef struct CacheSalt:  # its bytes follow it in memory
    int64_t num_references  # sequences and first blocks
    size_t length


cdef struct CachedBlock:
    Hash128 hash  # of its parent's hash and its tokens
    CacheSalt* salt  # of a first block
    int32_t parent  # the block before it, NO_PARENT or NOT_CACHED


cdef CacheSalt* new_salt(bytes salt) except? NULL  # with one reference; NULL for the empty one
cdef void release_salt(CacheSalt* salt) noexcept nogil


cdef class PrefixCache:
    cdef readonly int num_blocks
    cdef readonly int block_size
    cdef readonly int num_cached
    cdef public uint64_t hash_mask
    cdef Hash128 key
    cdef CachedBlock* blocks  # [num_blocks]
    cdef int32_t* token_ids  # [num_blocks, block_size]
    cdef int* table  # [table_mask + 1] open addressing with linear probing: a cached block, or -1
    cdef uint64_t table_mask
    cdef char* message  # [16 + 4 * block_size] that is being hashed

    cdef Hash128 root(self, bytes salt)  # parent hash of first blocks
    cdef Hash128 hash_block(self, Hash128 parent, const int32_t* token_ids) noexcept nogil
    # The block that holds these tokens behind `parent` (or first, under this salt), -1 for none.
    cdef int find(self, Hash128 hash, int parent, CacheSalt* salt, const int32_t* token_ids) noexcept nogil
    cdef void insert(
        self, int block, Hash128 hash, int parent, CacheSalt* salt, const int32_t* token_ids
    ) noexcept nogil
    cdef void remove(self, int block) noexcept nogil
    cdef int check_invariants(self) except -1
