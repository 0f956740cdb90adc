"""Token histories and n-gram tables of all rows, in C memory."""

cimport cython
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc

from foreword.gpu.speculative.row_drafter cimport RowDrafter

cdef enum:
    SHORTEST = 2
    LONGEST = 5
    NUM_LENGTHS = LONGEST - SHORTEST + 1
    UNSEEN = -1  # token at a position that was never observed


cdef struct History:
    int32_t* token_ids  # [capacity]
    int32_t* tables  # [NUM_LENGTHS, table_mask + 1]; position behind the last occurrence of an n-gram, 0 for none
    int32_t capacity
    int32_t num_tokens
    int32_t num_known  # seen tokens at the end, without a gap
    uint32_t table_mask
    int32_t match_length  # of the suffix that stood here before, 0 for none
    int32_t match_end  # position behind that earlier occurrence


cdef inline int32_t find_or_put(History* h, int length, int32_t end) noexcept nogil:
    """Position behind the last earlier occurrence of the `length` tokens before `end`, which becomes the last one."""
    cdef int32_t* table = h.tables + <size_t>(length - SHORTEST) * (h.table_mask + 1)
    cdef const int32_t* gram = h.token_ids + end - length
    cdef uint64_t key = 0x9E3779B97F4A7C15ULL
    cdef int i
    cdef int32_t found
    for i in range(length):
        key = (key ^ <uint32_t>gram[i]) * 0xFF51AFD7ED558CCDULL
        key ^= key >> 32
    cdef uint32_t slot = <uint32_t>key & h.table_mask
    while True:
        found = table[slot]
        if found == 0:
            break
        for i in range(length):
            if h.token_ids[found - length + i] != gram[i]:
                break
        else:
            break
        slot = (slot + 1) & h.table_mask
    table[slot] = end
    return found


cdef void append(History* h, int32_t token_id) noexcept nogil:
    cdef int length
    cdef int32_t found
    h.token_ids[h.num_tokens] = token_id
    h.num_tokens += 1
    h.match_length = 0
    h.num_known = 0 if token_id == UNSEEN else h.num_known + 1
    for length in range(SHORTEST, min(LONGEST, h.num_known) + 1):
        found = find_or_put(h, length, h.num_tokens)
        if found:
            h.match_length = length
            h.match_end = found


@cython.final
cdef class NgramDrafter(RowDrafter):
    cdef History* histories  # [num_rows]

    def __cinit__(self, int max_num_sequences, int max_model_len, int max_draft_tokens, int vocab_size):
        self.name = "ngram"
        self.max_confidence = LONGEST
        self.histories = <History*>calloc(max_num_sequences, sizeof(History))
        if self.histories == NULL:
            raise MemoryError("n-gram histories")

    def __dealloc__(self):
        cdef int row
        if self.histories != NULL:
            for row in range(self.num_rows):
                self.clear(row)
        free(self.histories)

    cdef void clear(self, int row) noexcept nogil:
        cdef History* h = &self.histories[row]
        free(h.token_ids)
        free(h.tables)
        h.token_ids = h.tables = NULL
        h.capacity = h.num_tokens = h.num_known = h.match_length = 0

    cdef int open_row(self, int row, object request, int capacity) except -1:
        self.clear(row)
        cdef History* h = &self.histories[row]
        cdef uint32_t table_size = 4
        while table_size < 2 * <uint32_t>capacity:
            table_size *= 2
        h.token_ids = <int32_t*>malloc(capacity * sizeof(int32_t))
        h.tables = <int32_t*>calloc(<size_t>NUM_LENGTHS * table_size, sizeof(int32_t))
        if h.token_ids == NULL or h.tables == NULL:
            self.clear(row)
            raise MemoryError(f"n-grams of {capacity} tokens")
        h.capacity = capacity
        h.table_mask = table_size - 1
        return 0

    cdef void extend(self, int row, int start, const int32_t* token_ids, int num_tokens) noexcept nogil:
        cdef History* h = &self.histories[row]
        cdef int i
        cdef int32_t token_id
        while h.num_tokens < min(start, h.capacity):
            append(h, UNSEEN)
        for i in range(h.num_tokens - start, min(num_tokens, h.capacity - start)):
            token_id = token_ids[i]
            append(h, token_id if 0 <= token_id < self.vocab_size else UNSEEN)

    cdef int continue_row(self, int row, int32_t* drafts, int limit, int32_t* confidence) noexcept nogil:
        cdef History* h = &self.histories[row]
        cdef int i, position, num_drafts = max(limit, 0) if h.match_length else 0
        for i in range(num_drafts):
            position = h.match_end + i
            drafts[i] = h.token_ids[position] if position < h.num_tokens else drafts[position - h.num_tokens]
            if drafts[i] == UNSEEN:
                num_drafts = i
                break
        if num_drafts:
            confidence[0] = h.match_length
        return num_drafts
