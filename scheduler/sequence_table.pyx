"""Entries of active requests: allocated when a request is added, so that no step allocates memory."""

import numpy as np

cimport numpy as cnp
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from foreword.scheduler.prefix_cache cimport new_salt, release_salt

from foreword.scheduler.step import SEQUENCE_UPDATE

cnp.import_array()

if sizeof(SequenceUpdate) != SEQUENCE_UPDATE.itemsize:
    raise ImportError("SequenceUpdate and SEQUENCE_UPDATE differ in size")


cdef void free_parts(Sequence* s) noexcept:
    """Free what an entry owns and clear it."""
    free(s.token_ids)
    free(s.stop_token_ids)
    free(s.block_hashes)
    release_salt(s.salt)
    memset(s, 0, sizeof(Sequence))


cdef class SequenceTable:
    """Fixed-capacity table from request keys to the C state of their sequences."""

    def __cinit__(self, int capacity, PrefixCache cache not None):
        self.cache = cache
        self.sequences = <Sequence*>calloc(capacity, sizeof(Sequence))
        self.free_entries = <int*>malloc(capacity * sizeof(int))
        if self.sequences == NULL or self.free_entries == NULL:
            raise MemoryError("sequence table")
        self.capacity = self.num_free = capacity
        self.entries = {}
        self.requests = [None] * capacity
        cdef int i
        for i in range(capacity):
            self.free_entries[i] = capacity - 1 - i

    def __dealloc__(self):
        cdef int i
        if self.sequences != NULL:
            for i in range(self.capacity):
                free_parts(&self.sequences[i])
        free(self.sequences)
        free(self.free_entries)

    cdef int add(self, object request, cnp.ndarray prompt) except -1:
        stopping = request.stopping
        cdef tuple stop = stopping.eos_token_ids + stopping.stop_token_ids
        cdef int32_t num_prompt = <int32_t>cnp.PyArray_DIM(prompt, 0)
        cdef int32_t max_tokens = num_prompt + stopping.max_output_tokens
        cdef bytes salt = request.cache_salt.encode(errors="surrogateescape")  # see Request.output
        cdef int entry = self.free_entries[self.num_free - 1]
        cdef Sequence* s = &self.sequences[entry]
        s.token_ids = <int32_t*>malloc(max_tokens * sizeof(int32_t))
        s.stop_token_ids = <int32_t*>malloc((len(stop) + 1) * sizeof(int32_t))
        s.bypasses_cache = request.bypass_prefix_cache
        s.needs_last_token = request.needs_last_token
        if not s.bypasses_cache:
            s.block_hashes = <Hash128*>malloc((max_tokens // self.cache.block_size + 1) * sizeof(Hash128))
        if s.token_ids == NULL or s.stop_token_ids == NULL or (s.block_hashes == NULL and not s.bypasses_cache):
            free_parts(s)
            raise MemoryError(f"{max_tokens} tokens of a sequence")
        memcpy(s.token_ids, cnp.PyArray_DATA(prompt), num_prompt * sizeof(int32_t))
        cdef int i
        for i in range(len(stop)):
            s.stop_token_ids[i] = stop[i]
        if not s.bypasses_cache:
            s.salt = new_salt(salt)
            s.block_hashes[0] = self.cache.root(salt)

        s.num_eos = <int32_t>len(stopping.eos_token_ids)
        s.num_stop = <int32_t>len(stop) - s.num_eos
        s.row = s.leader = s.follower = -1
        s.num_prompt = s.num_tokens = num_prompt
        s.num_scored = 1 if request.want_prompt_logprobs else num_prompt
        s.max_tokens = max_tokens
        s.min_tokens = num_prompt + min(stopping.min_output_tokens, stopping.max_output_tokens)
        s.order = self.next_order
        s.priority = request.priority
        s.deadline_ns = request.deadline_ns
        s.update.request_key = request.request_key
        self.num_free -= 1
        self.next_order += 1
        self.entries[request.request_key] = entry
        self.requests[entry] = request
        return entry

    cdef int find(self, object request_key) except -2:
        return self.entries.get(request_key, -1)

    cdef tuple outputs(self, const int* entries, int num_entries):
        cdef cnp.ndarray offsets = np.zeros(num_entries + 1, np.int32)
        cdef int32_t* ends = <int32_t*>cnp.PyArray_DATA(offsets) + 1
        cdef Sequence* s
        cdef int i, num_tokens = 0
        for i in range(num_entries):
            s = &self.sequences[entries[i]]
            num_tokens += s.num_tokens - s.num_prompt
            ends[i] = num_tokens
        cdef cnp.ndarray token_ids = np.empty(num_tokens, np.int32)
        cdef int32_t* start = <int32_t*>cnp.PyArray_DATA(token_ids)
        for i in range(num_entries):
            s = &self.sequences[entries[i]]
            memcpy(start, s.token_ids + s.num_prompt, (s.num_tokens - s.num_prompt) * sizeof(int32_t))
            start += s.num_tokens - s.num_prompt
        return offsets, token_ids

    cdef int remove(self, int entry) except -1:
        cdef Sequence* s = &self.sequences[entry]
        del self.entries[s.update.request_key]
        self.requests[entry] = None
        free_parts(s)
        self.free_entries[self.num_free] = entry
        self.num_free += 1
        return 0
