from libc.stdint cimport int32_t


cdef class RowDrafter:
    cdef readonly str name
    cdef readonly int max_confidence
    cdef int num_rows
    cdef int max_model_len
    cdef int max_draft_tokens
    cdef int vocab_size
    cdef object offsets
    cdef object draft_ids
    cdef object confidences

    # Forget what a row held, and make room for `capacity` tokens.
    cdef int open_row(self, int row, object request, int capacity) except -1
    # Append those of the tokens from position `start` on that are new and fit.
    cdef void extend(self, int row, int start, const int32_t* token_ids, int num_tokens) noexcept nogil
    # Take the news that these rows are proposed for next.
    cdef int begin_proposals(self, const int32_t[::1] rows) except -1 nogil
    # Write what follows the last token of a row, at most `limit` tokens, and the confidence in it; returns how many.
    cdef int continue_row(self, int row, int32_t* drafts, int limit, int32_t* confidence) noexcept nogil
