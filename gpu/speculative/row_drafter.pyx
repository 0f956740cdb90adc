"""What drafters have in common that keep the tokens of each row to themselves."""

import numpy as np

cimport numpy as cnp
from libc.stdint cimport int32_t

from foreword.gpu.speculative.drafter import Proposals

cnp.import_array()


cdef class RowDrafter:
    def __cinit__(self, int max_num_sequences, int max_model_len, int max_draft_tokens, int vocab_size):
        self.num_rows = max_num_sequences
        self.max_model_len = max_model_len
        self.max_draft_tokens = max_draft_tokens
        self.vocab_size = vocab_size
        self.offsets = np.zeros(max_num_sequences + 1, np.int32)
        self.draft_ids = np.zeros(max_num_sequences * max_draft_tokens, np.int32)
        self.confidences = np.zeros(max_num_sequences, np.int32)

    @property
    def names(self):
        return (self.name,)

    cdef int open_row(self, int row, object request, int capacity) except -1:
        raise NotImplementedError

    cdef void extend(self, int row, int start, const int32_t* token_ids, int num_tokens) noexcept nogil:
        pass

    cdef int begin_proposals(self, const int32_t[::1] rows) except -1 nogil:
        return 0

    cdef int continue_row(self, int row, int32_t* drafts, int limit, int32_t* confidence) noexcept nogil:
        return 0

    def admit(self, int row, request, const int32_t[::1] output_token_ids):
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} is outside the {self.num_rows} rows")
        cdef const int32_t[::1] prompt = np.ascontiguousarray(request.prompt_token_ids)
        cdef int num_prompt = <int>prompt.shape[0], num_output = <int>output_token_ids.shape[0]
        self.open_row(row, request, min(self.max_model_len, num_prompt + request.stopping.max_output_tokens))
        with nogil:
            self.extend(row, 0, &prompt[0], num_prompt)
            if num_output:
                self.extend(row, num_prompt, &output_token_ids[0], num_output)

    def observe(
        self,
        const int32_t[::1] rows,
        const int32_t[::1] positions,
        const int32_t[::1] token_ids,
        const int32_t[::1] starts,
        const int32_t[::1] ends,
    ):
        cdef int b
        with nogil:
            for b in range(<int>rows.shape[0]):
                if ends[b] > starts[b]:
                    self.extend(rows[b], positions[b], &token_ids[starts[b]], ends[b] - starts[b])

    def propose(self, const int32_t[::1] rows, const int32_t[::1] limits):
        cdef int32_t[::1] offsets = self.offsets
        cdef int32_t[::1] drafts = self.draft_ids
        cdef int32_t[::1] confidences = self.confidences
        cdef int b, limit, start = 0, num_rows = <int>rows.shape[0]
        with nogil:
            self.begin_proposals(rows)
            for b in range(num_rows):
                limit = min(limits[b], self.max_draft_tokens)
                confidences[b] = 0
                start += self.continue_row(rows[b], &drafts[0] + start, limit, &confidences[b])
                offsets[b + 1] = start
        return Proposals(self.offsets[: num_rows + 1], self.draft_ids[:start], self.confidences[:num_rows])
