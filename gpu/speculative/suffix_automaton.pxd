"""A suffix automaton that grows at its end: every substring of the texts it was given, and how often each occurred.

The smallest automaton that accepts the suffixes of a text (Blumer et al. 1985; several texts: Blumer et al. 1987). Its
states are classes of substrings that end at the same places. The link of a state leads to the longest suffix of its
substrings that occurs in other places too. N tokens make at most 2 N states and 3 N edges, and every edge is found by
one probe of a hash table, so a token takes constant time on average however long the texts are.
"""

from libc.stdint cimport int32_t, uint32_t

cdef enum:
    ROOT = 0  # the state of the empty text
    NOWHERE = -1


cdef struct State:
    int32_t length  # of its longest substring
    int32_t link
    int32_t first_edge  # the newest; NOWHERE at the end of a text
    int32_t count  # occurrences; of one that occurs often within its own repetitions, fewer are counted


cdef struct Edge:
    int32_t state
    int32_t token_id
    int32_t target
    int32_t next  # of the same state, older


cdef struct Automaton:
    State* states  # [2 * capacity + 1]
    Edge* edges  # [3 * capacity + 1]
    int32_t* table  # [table_mask + 1]; an edge + 1, 0 for none
    uint32_t table_mask
    int32_t capacity  # tokens there is room for
    int32_t num_tokens
    int32_t num_states
    int32_t num_edges
    int32_t last  # state of the whole text so far


cdef struct Match:
    int32_t state
    int32_t length  # tokens at the end of some text that the state stands for


cdef int reserve(Automaton* a, int capacity) noexcept nogil  # makes room for so many tokens; -1 without memory
cdef void release(Automaton* a) noexcept nogil
cdef void begin_text(Automaton* a) noexcept nogil
cdef void append(Automaton* a, int32_t token_id) noexcept nogil  # to the text begun last; there must be room
cdef Match repetition(const Automaton* a) noexcept nogil  # the longest end of the text that occurs elsewhere
cdef Match advance(const Automaton* a, Match match, int32_t token_id) noexcept nogil  # longest match with one more token
cdef int continue_match(const Automaton* a, Match match, int32_t* token_ids, int limit) noexcept nogil  # how many follow
