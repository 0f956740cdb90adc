"""Rows with an automaton each, and scopes of outputs that rows share."""

from collections import OrderedDict

import numpy as np

cimport cython
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from foreword.gpu.speculative.row_drafter cimport RowDrafter
from foreword.gpu.speculative.suffix_automaton cimport (
    ROOT,
    Automaton,
    Match,
    advance,
    append,
    begin_text,
    continue_match,
    release,
    repetition,
    reserve,
)

cdef enum:
    YOUNG = 0
    OLD = 1
    MAX_CONFIDENCE = 9
    MAX_GENERATION = 32768  # tokens that the young outputs of a scope have before they are the old ones
    MAX_SHARED = 262144  # tokens of all scopes
    MIN_SCOPE = 256  # tokens that a scope counts as, so that their number is bounded
    CONTEXT = 64  # tokens of a prompt that shared outputs are matched with


cdef struct Row:
    Automaton own
    int32_t* token_ids  # [capacity]
    int32_t capacity
    int32_t num_tokens
    int32_t num_shared  # tokens up to here are prompt, or shared already
    Automaton* outputs  # [2] of its scope, YOUNG and OLD; NULL for a row that shares nothing
    Match[2] matches  # of its last tokens with each of them
    int64_t step  # of the last proposal


@cython.final
cdef class Scope:
    """Outputs that requests of one tenant and cache salt share; the old ones go when the young ones are many."""

    cdef Automaton[2] outputs

    def __dealloc__(self):
        release(&self.outputs[YOUNG])
        release(&self.outputs[OLD])

    cdef int num_tokens(self) noexcept nogil:
        return self.outputs[YOUNG].num_tokens + self.outputs[OLD].num_tokens


cdef inline int confidence_of(int match_length) noexcept nogil:
    """Classes of match lengths: 1, 2, 3, 4, 5-6, 7-9, 10-15, 16-31, more."""
    if match_length < 5:
        return match_length
    if match_length < 7:
        return 5
    if match_length < 10:
        return 6
    if match_length < 16:
        return 7
    return 8 if match_length < 32 else MAX_CONFIDENCE


cdef inline void add(Automaton* a, int32_t token_id, int vocab_size) noexcept nogil:
    """Append a token, or end the text at one that must never be proposed."""
    if 0 <= token_id < vocab_size:
        append(a, token_id)
    else:
        begin_text(a)


@cython.final
cdef class SuffixDrafter(RowDrafter):
    cdef int64_t step
    cdef Row* rows  # [num_rows]
    cdef list row_scopes  # [num_rows] keeps those alive that rows point into
    cdef object scopes  # of (tenant, cache salt), the one used last at the end
    cdef int num_proposed
    cdef int32_t[::1] proposed_rows  # [num_proposed]

    def __cinit__(self, int max_num_sequences, int max_model_len, int max_draft_tokens, int vocab_size):
        self.name = "suffix"
        self.max_confidence = MAX_CONFIDENCE
        self.rows = <Row*>calloc(max_num_sequences, sizeof(Row))
        if self.rows == NULL:
            raise MemoryError("rows of suffix automata")
        self.row_scopes = [None] * max_num_sequences
        self.scopes = OrderedDict()
        self.proposed_rows = np.zeros(max_num_sequences, np.int32)

    def __dealloc__(self):
        cdef int row
        if self.rows != NULL:
            for row in range(self.num_rows):
                self.clear(row)
        free(self.rows)

    cdef void clear(self, int row) noexcept nogil:
        cdef Row* r = &self.rows[row]
        release(&r.own)
        free(r.token_ids)
        memset(r, 0, sizeof(Row))

    @property
    def num_shared_tokens(self):
        return sum((<Scope>scope).num_tokens() for scope in self.scopes.values())

    def admit(self, int row, request, const int32_t[::1] output_token_ids):
        RowDrafter.admit(self, row, request, output_token_ids)
        self.rows[row].num_shared = self.rows[row].num_tokens

    cdef int open_row(self, int row, object request, int capacity) except -1:
        self.share(row)
        self.clear(row)
        cdef Row* r = &self.rows[row]
        r.token_ids = <int32_t*>malloc(capacity * sizeof(int32_t))
        if r.token_ids == NULL or reserve(&r.own, capacity) < 0:
            self.clear(row)
            raise MemoryError(f"suffix automaton of {capacity} tokens")
        r.capacity = capacity
        return self.join_scope(row, request)

    cdef int join_scope(self, int row, request) except -1:
        cdef Scope scope
        self.row_scopes[row] = None
        if request.bypass_prefix_cache:
            return 0
        key = (request.tenant, request.cache_salt)
        self.scopes[key] = self.row_scopes[row] = scope = self.scopes.pop(key, None) or Scope()
        self.rows[row].outputs = scope.outputs
        while sum([max(MIN_SCOPE, (<Scope>other).num_tokens()) for other in self.scopes.values()]) > MAX_SHARED:
            self.scopes.popitem(last=False)
        return 0

    cdef void extend(self, int row, int start, const int32_t* token_ids, int num_tokens) noexcept nogil:
        cdef Row* r = &self.rows[row]
        cdef int i, end = min(num_tokens, r.capacity - start)
        if start > r.num_tokens:
            return
        for i in range(r.num_tokens - start, end):
            r.token_ids[r.num_tokens] = token_ids[i]
            r.num_tokens += 1
            add(&r.own, token_ids[i], self.vocab_size)
            if r.outputs != NULL and end - i <= CONTEXT:
                r.matches[YOUNG] = advance(&r.outputs[YOUNG], r.matches[YOUNG], token_ids[i])
                r.matches[OLD] = advance(&r.outputs[OLD], r.matches[OLD], token_ids[i])

    cdef int share(self, int row) except -1 nogil:
        """Add what is new in a row's output to the young outputs of its scope."""
        cdef Row* r = &self.rows[row]
        cdef int i, start = max(r.num_shared, r.num_tokens - MAX_GENERATION)
        cdef int num_new = r.num_tokens - start
        if r.outputs == NULL or num_new <= 0:
            return 0
        cdef Automaton* young = &r.outputs[YOUNG]
        if young.num_tokens + num_new > MAX_GENERATION:
            self.age(r.outputs)
        if young.num_tokens + num_new > young.capacity:
            if reserve(young, max(young.num_tokens + num_new, 2 * young.capacity, 1024)) < 0:
                raise MemoryError("suffix automaton of earlier outputs")
        begin_text(young)
        for i in range(start, r.num_tokens):
            add(young, r.token_ids[i], self.vocab_size)
        r.num_shared = r.num_tokens
        return 0

    cdef void age(self, Automaton* outputs) noexcept nogil:
        """The young outputs of a scope become its old ones."""
        cdef int row
        release(&outputs[OLD])
        outputs[OLD], outputs[YOUNG] = outputs[YOUNG], outputs[OLD]
        for row in range(self.num_rows):
            if self.rows[row].outputs == outputs:
                self.rows[row].matches[OLD] = self.rows[row].matches[YOUNG]
                self.rows[row].matches[YOUNG] = Match(ROOT, 0)

    cdef int begin_proposals(self, const int32_t[::1] rows) except -1 nogil:
        """Share the outputs of rows that were proposed for the last time and are not now."""
        cdef int i
        self.step += 1
        for i in range(<int>rows.shape[0]):
            self.rows[rows[i]].step = self.step
        for i in range(self.num_proposed):
            if self.rows[self.proposed_rows[i]].step != self.step:
                self.share(self.proposed_rows[i])
        self.num_proposed = <int>rows.shape[0]
        for i in range(self.num_proposed):
            self.proposed_rows[i] = rows[i]
        return 0

    cdef int continue_row(self, int row, int32_t* drafts, int limit, int32_t* confidence) noexcept nogil:
        """Continue the longest match of a row, its own if there are several."""
        cdef Row* r = &self.rows[row]
        cdef const Automaton* automaton = &r.own
        cdef Match match = repetition(&r.own)
        cdef int i, num_drafts
        if r.outputs != NULL:
            for i in range(2):
                if r.matches[i].length > match.length:
                    match = r.matches[i]
                    automaton = &r.outputs[i]
        num_drafts = continue_match(automaton, match, drafts, limit) if match.length else 0
        if num_drafts:
            confidence[0] = confidence_of(match.length)
        return num_drafts
