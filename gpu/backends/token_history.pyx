"""Counts of the tokens of rows, in C memory: added to as tokens come out, never searched. See token_history.pyi."""

import numpy as np

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from foreword.gpu.backends.sampling import HistoryCounts

cnp.import_array()


cdef struct Counts:
    int32_t* places  # [vocab_size] 1 + place of an id in `ids`, 0 for none; NULL for a row that is not followed
    int32_t* ids  # [capacity]
    int32_t* counts  # [capacity] in the output
    int32_t capacity
    int32_t num_ids


cdef inline void count(Counts* c, int32_t token_id, int32_t amount) noexcept nogil:
    cdef int32_t place = c.places[token_id]
    if place == 0:
        if c.num_ids == c.capacity:
            return  # accepted behind the last token the sequence may have: nothing is drawn after it
        c.ids[c.num_ids] = token_id
        c.counts[c.num_ids] = 0
        c.num_ids += 1
        place = c.places[token_id] = c.num_ids
    c.counts[place - 1] += amount


@cython.final
cdef class TokenHistory:
    cdef int num_rows
    cdef int vocab_size
    cdef int num_followed
    cdef Counts* rows  # [num_rows]

    def __cinit__(self, int max_num_sequences, int vocab_size):
        self.num_rows = max_num_sequences
        self.vocab_size = vocab_size
        self.rows = <Counts*>calloc(max_num_sequences, sizeof(Counts))
        if self.rows == NULL:
            raise MemoryError("token histories")

    def __dealloc__(self):
        cdef int row
        if self.rows != NULL:
            for row in range(self.num_rows):
                self.forget(row)
        free(self.rows)

    cpdef void forget(self, int row):
        cdef Counts* c = &self.rows[row]
        self.num_followed -= c.places != NULL
        free(c.places)
        free(c.ids)
        free(c.counts)
        memset(c, 0, sizeof(Counts))

    def follow(self, int row, const int32_t[::1] prompt, const int32_t[::1] output, int max_num_tokens):
        cdef Counts* c = &self.rows[row]
        cdef Py_ssize_t i
        self.forget(row)
        c.capacity = min(self.vocab_size, max_num_tokens)
        c.places = <int32_t*>calloc(self.vocab_size, sizeof(int32_t))
        c.ids = <int32_t*>malloc(c.capacity * sizeof(int32_t))
        c.counts = <int32_t*>malloc(c.capacity * sizeof(int32_t))
        self.num_followed += c.places != NULL
        if c.places == NULL or c.ids == NULL or c.counts == NULL:
            self.forget(row)
            raise MemoryError(f"history of {max_num_tokens} tokens")
        for i in range(prompt.shape[0]):
            count(c, prompt[i], 0)
        for i in range(output.shape[0]):
            count(c, output[i], 1)

    def append(self, const int32_t[::1] rows, const int32_t[::1] offsets, const int32_t[::1] token_ids):
        cdef Py_ssize_t b
        cdef int i
        if self.num_followed == 0:
            return
        for b in range(rows.shape[0]):
            if self.rows[rows[b]].places != NULL:
                for i in range(offsets[b], offsets[b + 1]):
                    count(&self.rows[rows[b]], token_ids[i], 1)

    def counts_before(self, const int32_t[::1] rows, const int32_t[::1] offsets, const int32_t[::1] token_ids):
        cdef cnp.ndarray index = np.full(token_ids.shape[0], -1, np.int32)
        if self.num_followed == 0:
            return HistoryCounts(NO_OFFSETS, NO_TOKENS, NO_TOKENS, index)
        cdef int32_t* members = <int32_t*>cnp.PyArray_DATA(index)
        cdef Py_ssize_t b, size = 0
        cdef int i, num_members = 0
        for b in range(rows.shape[0]):
            if self.rows[rows[b]].places != NULL:
                for i in range(offsets[b], offsets[b + 1]):
                    members[i] = num_members
                    num_members += 1
                    size += self.rows[rows[b]].num_ids + i - offsets[b]
        cdef int32_t[::1] ends = np.zeros(num_members + 1, np.int32)
        cdef int32_t[::1] ids = np.empty(size, np.int32)
        cdef int32_t[::1] counts = np.empty(size, np.int32)
        size = 0
        for b in range(rows.shape[0]):
            if self.rows[rows[b]].places != NULL:
                for i in range(offsets[b], offsets[b + 1]):
                    size += copy_counts(
                        &self.rows[rows[b]],
                        &token_ids[0] + offsets[b] + 1,
                        i - offsets[b],
                        &ids[0] + size,
                        &counts[0] + size,
                    )
                    ends[members[i] + 1] = <int32_t>size
        return HistoryCounts(ends.base, ids.base[:size], counts.base[:size], index)


cdef int copy_counts(
    const Counts* c, const int32_t* drafts, int num_drafts, int32_t* ids, int32_t* counts
) noexcept nogil:
    """Copy a row's counts, and count the drafts in the copy; returns how many ids there are."""
    cdef int i, place, num_ids = c.num_ids
    memcpy(ids, c.ids, c.num_ids * sizeof(int32_t))
    memcpy(counts, c.counts, c.num_ids * sizeof(int32_t))
    for i in range(num_drafts):
        place = c.places[drafts[i]] - 1
        if place < 0:
            place = c.num_ids
            while place < num_ids and ids[place] != drafts[i]:
                place += 1
            if place == num_ids:
                ids[place] = drafts[i]
                counts[place] = 0
                num_ids += 1
        counts[place] += 1
    return num_ids


NO_OFFSETS = np.zeros(1, np.int32)
NO_TOKENS = np.zeros(0, np.int32)
