"""Construction after Blumer et al., with edges in lists for enumeration and in a hash table for lookup."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset

cdef enum:
    MAX_COUNTED = 16  # links of a token that are followed to count occurrences
    MAX_BRANCHES = 8  # of the newest edges of a state, that a continuation chooses among

cdef double MIN_SURVIVAL = 0.3  # of a continuation, as far as counts tell; beyond, it is not worth its tokens


cdef inline uint32_t home(const Automaton* a, int32_t state, int32_t token_id) noexcept nogil:
    cdef uint64_t key = (<uint64_t><uint32_t>state << 32 | <uint32_t>token_id) * 0x9E3779B97F4A7C15ULL
    return <uint32_t>(key >> 32) & a.table_mask


cdef inline int32_t find(const Automaton* a, int32_t state, int32_t token_id) noexcept nogil:
    """The edge of a state for a token, NOWHERE if there is none."""
    cdef uint32_t slot = home(a, state, token_id)
    cdef int32_t entry = a.table[slot]
    while entry:
        if a.edges[entry - 1].state == state and a.edges[entry - 1].token_id == token_id:
            return entry - 1
        slot = (slot + 1) & a.table_mask
        entry = a.table[slot]
    return NOWHERE


cdef inline void put(Automaton* a, int32_t edge) noexcept nogil:
    cdef uint32_t slot = home(a, a.edges[edge].state, a.edges[edge].token_id)
    while a.table[slot]:
        slot = (slot + 1) & a.table_mask
    a.table[slot] = edge + 1


cdef inline void connect(Automaton* a, int32_t state, int32_t token_id, int32_t target) noexcept nogil:
    cdef int32_t edge = a.num_edges
    a.num_edges += 1
    a.edges[edge] = Edge(state, token_id, target, a.states[state].first_edge)
    a.states[state].first_edge = edge
    put(a, edge)


cdef inline int32_t new_state(Automaton* a, int32_t length, int32_t count) noexcept nogil:
    cdef int32_t state = a.num_states
    a.num_states += 1
    a.states[state] = State(length, NOWHERE, NOWHERE, count)
    return state


cdef int reserve(Automaton* a, int capacity) noexcept nogil:
    cdef uint32_t table_size = 16
    cdef int32_t edge
    if capacity <= a.capacity:
        return 0
    while table_size < 4 * <uint32_t>capacity:
        table_size *= 2
    cdef State* states = <State*>realloc(a.states, (2 * <size_t>capacity + 1) * sizeof(State))
    if states != NULL:
        a.states = states
    cdef Edge* edges = <Edge*>realloc(a.edges, (3 * <size_t>capacity + 1) * sizeof(Edge))
    if edges != NULL:
        a.edges = edges
    cdef int32_t* table = <int32_t*>calloc(table_size, sizeof(int32_t))
    if states == NULL or edges == NULL or table == NULL:
        free(table)
        return -1
    free(a.table)
    a.table = table
    a.table_mask = table_size - 1
    a.capacity = capacity
    for edge in range(a.num_edges):
        put(a, edge)
    if a.num_states == 0:
        new_state(a, 0, 0)
    return 0


cdef void release(Automaton* a) noexcept nogil:
    free(a.states)
    free(a.edges)
    free(a.table)
    memset(a, 0, sizeof(Automaton))


cdef void begin_text(Automaton* a) noexcept nogil:
    a.last = ROOT


cdef inline void copy_edges(Automaton* a, int32_t state, int32_t clone) noexcept nogil:
    """Give a new state the edges of another one, in their order."""
    cdef int32_t edge, copied = a.states[state].first_edge
    cdef int32_t* link = &a.states[clone].first_edge
    while copied != NOWHERE:
        edge = a.num_edges
        a.num_edges += 1
        a.edges[edge] = Edge(clone, a.edges[copied].token_id, a.edges[copied].target, NOWHERE)
        link[0] = edge
        link = &a.edges[edge].next
        put(a, edge)
        copied = a.edges[copied].next


cdef int32_t split(Automaton* a, int32_t state, int32_t edge) noexcept nogil:
    """The state for the longest substring of `state` and the edge's token alone, taken from the edge's target."""
    cdef int32_t token_id = a.edges[edge].token_id
    cdef int32_t target = a.edges[edge].target
    if a.states[target].length == a.states[state].length + 1:
        return target
    cdef int32_t clone = new_state(a, a.states[state].length + 1, a.states[target].count)
    copy_edges(a, target, clone)
    a.states[clone].link = a.states[target].link
    a.states[target].link = clone
    while state != NOWHERE:
        edge = find(a, state, token_id)
        if edge == NOWHERE or a.edges[edge].target != target:
            break
        a.edges[edge].target = clone
        state = a.states[state].link
    return clone


cdef int32_t successor(Automaton* a, int32_t token_id) noexcept nogil:
    """The state of the text with one more token."""
    cdef int32_t state = a.last
    cdef int32_t edge = NOWHERE
    if a.states[state].first_edge != NOWHERE:  # another text goes on from here
        edge = find(a, state, token_id)
        if edge != NOWHERE:
            return split(a, state, edge)
    cdef int32_t new = new_state(a, a.states[state].length + 1, 0)
    while state != NOWHERE:
        edge = find(a, state, token_id)
        if edge != NOWHERE:
            break
        connect(a, state, token_id, new)
        state = a.states[state].link
    a.states[new].link = ROOT if state == NOWHERE else split(a, state, edge)
    return new


cdef void append(Automaton* a, int32_t token_id) noexcept nogil:
    cdef int32_t state = successor(a, token_id)
    cdef int i
    a.last = state
    a.num_tokens += 1
    for i in range(MAX_COUNTED):
        if state == ROOT:
            break
        a.states[state].count += 1
        state = a.states[state].link


cdef Match repetition(const Automaton* a) noexcept nogil:
    if a.last == ROOT:
        return Match(ROOT, 0)
    cdef int32_t state = a.states[a.last].link
    return Match(state, a.states[state].length)


cdef inline int32_t state_of(const Automaton* a, Match match) noexcept nogil:
    """The match's state; since it was found, its substrings may have got one of their own, split from a longer one."""
    cdef int32_t state = match.state
    while state != ROOT and match.length <= a.states[a.states[state].link].length:
        state = a.states[state].link
    return state


cdef Match advance(const Automaton* a, Match match, int32_t token_id) noexcept nogil:
    cdef int32_t edge
    if a.num_states == 0:
        return Match(ROOT, 0)
    match.state = state_of(a, match)
    while True:
        edge = find(a, match.state, token_id)
        if edge != NOWHERE:
            return Match(a.edges[edge].target, match.length + 1)
        if match.state == ROOT:
            return Match(ROOT, 0)
        match.state = a.states[match.state].link
        match.length = a.states[match.state].length


cdef int continue_match(const Automaton* a, Match match, int32_t* token_ids, int limit) noexcept nogil:
    cdef int32_t state = state_of(a, match), edge, best
    cdef int i, j
    cdef int64_t total
    cdef double survival = 1.0
    for i in range(limit):
        while a.states[state].first_edge == NOWHERE and state != ROOT:  # the text ends here, as a shorter one did before
            state = a.states[state].link
        if state == ROOT:
            return i
        best = edge = a.states[state].first_edge
        total = 0
        for j in range(MAX_BRANCHES):
            total += a.states[a.edges[edge].target].count
            if a.states[a.edges[edge].target].count > a.states[a.edges[best].target].count:
                best = edge
            edge = a.edges[edge].next
            if edge == NOWHERE:
                break
        survival *= <double>a.states[a.edges[best].target].count / total
        if survival < MIN_SURVIVAL:
            return i
        state = a.edges[best].target
        token_ids[i] = a.edges[best].token_id
    return max(limit, 0)
