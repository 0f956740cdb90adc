"""Acceptance of several drafters, learned from all that they propose."""

import numpy as np

cimport cython
from libc.math cimport pow
from libc.stdint cimport int32_t

from foreword.gpu.speculative.drafter import Proposals

cdef enum:
    MAX_CONFIDENCE = 10
    ROW_MEMORY = 8  # drafts that weigh as much as all before them
    SERVER_MEMORY = 128


cdef inline double expected_length(double acceptance, int num_drafts) noexcept nogil:
    cdef double expected = 0.0, survival = 1.0
    cdef int i
    for i in range(num_drafts):
        survival *= acceptance
        expected += survival
    return expected


cdef inline void learn(double* acceptance, int memory, int trials, int successes) noexcept nogil:
    cdef double kept = pow(1.0 - 1.0 / memory, trials)
    acceptance[0] = kept * acceptance[0] + (1.0 - kept) * successes / trials


@cython.final
cdef class HybridDrafter:
    cdef readonly str name
    cdef readonly tuple names
    cdef readonly int max_confidence
    cdef tuple drafters
    cdef int num_drafters
    cdef int max_draft_tokens
    cdef int32_t[::1] choices  # [num_rows] drafter that a request names, -1 for none
    cdef int32_t[::1] ends  # [num_rows] tokens that are known
    cdef int32_t[:, :, ::1] guesses  # [num_drafters, num_rows, max_draft_tokens] behind them
    cdef int32_t[:, ::1] lengths  # [num_drafters, num_rows] of the guesses, 0 when they have been judged
    cdef int32_t[:, ::1] confidences  # [num_drafters, num_rows]
    cdef double[:, :, ::1] acceptance  # [num_rows, num_drafters, confidence]
    cdef double[:, ::1] typical  # [num_drafters, confidence]
    cdef object buffers

    def __init__(self, drafters, int max_num_sequences, int max_draft_tokens):
        cdef int num_drafters = len(drafters)
        cdef int num_confidences = 1 + max(drafter.max_confidence for drafter in drafters)
        self.name = "hybrid"
        self.names = tuple(drafter.name for drafter in drafters)
        self.max_confidence = MAX_CONFIDENCE
        self.drafters = tuple(drafters)
        self.num_drafters = num_drafters
        self.max_draft_tokens = max_draft_tokens
        self.choices = np.full(max_num_sequences, -1, np.int32)
        self.ends = np.zeros(max_num_sequences, np.int32)
        self.guesses = np.zeros((num_drafters, max_num_sequences, max_draft_tokens), np.int32)
        self.lengths = np.zeros((num_drafters, max_num_sequences), np.int32)
        self.confidences = np.zeros((num_drafters, max_num_sequences), np.int32)
        typical = np.stack([np.linspace(0.2, 0.8, num_confidences)] * num_drafters)
        self.acceptance = np.stack([typical] * max_num_sequences)
        self.typical = typical
        self.buffers = (
            np.zeros(max_num_sequences + 1, np.int32),
            np.zeros(max_num_sequences * max_draft_tokens, np.int32),
            np.zeros(max_num_sequences, np.int32),
            np.zeros(max_num_sequences, np.int32),
        )

    def admit(self, int row, request, output_token_ids):
        for drafter in self.drafters:
            drafter.admit(row, request, output_token_ids)
        self.choices[row] = self.names.index(request.drafter) if request.drafter in self.names else -1
        self.ends[row] = len(request.prompt_token_ids) + len(output_token_ids)
        self.lengths[:, row] = 0
        self.acceptance[row] = self.typical

    def observe(self, rows, positions, token_ids, starts, ends):
        for drafter in self.drafters:
            drafter.observe(rows, positions, token_ids, starts, ends)
        self.judge_guesses(rows, positions, token_ids, starts, ends)

    cdef int judge_guesses(
        self,
        const int32_t[::1] rows,
        const int32_t[::1] positions,
        const int32_t[::1] token_ids,
        const int32_t[::1] starts,
        const int32_t[::1] ends,
    ) except -1 nogil:
        cdef int b, d, num_new
        for b in range(<int>rows.shape[0]):
            num_new = positions[b] + ends[b] - starts[b] - self.ends[rows[b]]
            if num_new <= 0:
                continue
            for d in range(self.num_drafters):
                self.judge(d, rows[b], &token_ids[ends[b] - num_new], num_new)
            self.ends[rows[b]] += num_new
        return 0

    cdef void judge(self, int drafter, int row, const int32_t* token_ids, int num_tokens) noexcept nogil:
        """Learn from the tokens that came out in the place of a guess."""
        cdef int num_guessed = min(self.lengths[drafter, row], num_tokens)
        cdef int confidence = self.confidences[drafter, row], num_right = 0
        self.lengths[drafter, row] = 0
        if num_guessed == 0:
            return
        while num_right < num_guessed and self.guesses[drafter, row, num_right] == token_ids[num_right]:
            num_right += 1
        cdef int num_judged = min(num_right + 1, num_guessed)
        learn(&self.acceptance[row, drafter, confidence], ROW_MEMORY, num_judged, num_right)
        learn(&self.typical[drafter, confidence], SERVER_MEMORY, num_judged, num_right)

    def propose(self, rows, limits):
        cdef int d
        for d in range(self.num_drafters):
            proposals = self.drafters[d].propose(rows, limits)
            self.keep(d, rows, proposals.offsets, proposals.token_ids, proposals.confidences)
        offsets, token_ids, confidences, drafters = self.buffers
        num_drafts = self.choose(rows, offsets, token_ids, confidences, drafters)
        return Proposals(offsets[: len(rows) + 1], token_ids[:num_drafts], confidences[: len(rows)], drafters[: len(rows)])

    cdef int keep(
        self,
        int drafter,
        const int32_t[::1] rows,
        const int32_t[::1] offsets,
        const int32_t[::1] token_ids,
        const int32_t[::1] confidences,
    ) except -1 nogil:
        cdef int b, i
        for b in range(<int>rows.shape[0]):
            self.lengths[drafter, rows[b]] = offsets[b + 1] - offsets[b]
            self.confidences[drafter, rows[b]] = confidences[b]
            for i in range(offsets[b + 1] - offsets[b]):
                self.guesses[drafter, rows[b], i] = token_ids[offsets[b] + i]
        return 0

    cdef int choose(
        self,
        const int32_t[::1] rows,
        int32_t[::1] offsets,
        int32_t[::1] token_ids,
        int32_t[::1] confidences,
        int32_t[::1] drafters,
    ) except -1 nogil:
        """Write the best guess of each row; returns the number of drafts."""
        cdef int b, d, i, row, num_drafts = 0
        for b in range(<int>rows.shape[0]):
            row = rows[b]
            d = drafters[b] = self.best_drafter(row)
            confidences[b] = 0
            if self.lengths[d, row]:
                confidences[b] = 1 + min(
                    <int>(self.acceptance[row, d, self.confidences[d, row]] * MAX_CONFIDENCE), MAX_CONFIDENCE - 1
                )
            for i in range(self.lengths[d, row]):
                token_ids[num_drafts] = self.guesses[d, row, i]
                num_drafts += 1
            offsets[b + 1] = num_drafts
        return num_drafts

    cdef int best_drafter(self, int row) noexcept nogil:
        cdef int d, best = 0
        cdef double expected, most = -1.0
        if self.choices[row] >= 0:
            return self.choices[row]
        for d in range(self.num_drafters):
            expected = expected_length(self.acceptance[row, d, self.confidences[d, row]], self.lengths[d, row])
            if expected > most:
                most, best = expected, d
        return best
