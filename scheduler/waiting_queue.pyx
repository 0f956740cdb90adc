"""Order of admission: levels, in them flows, in them requests."""

cimport cython
from libc.stdlib cimport calloc, free, malloc

from foreword.scheduler.heap_forest cimport EMPTY, HeapNode

cdef enum:
    WEIGHT_SCALE = 1 << 16  # cost of a token for a tenant that weighs 1


@cython.final
cdef class WaitingQueue:
    def __cinit__(self, SequenceTable table, config):
        cdef int i, capacity = table.capacity
        self.table = table
        self.sequences = table.sequences
        self.aging_ns = config.priority_aging_ns
        self.weights = dict(config.tenant_weights)
        self.entries = HeapForest(capacity)
        self.ordered_flows = HeapForest(capacity)
        self.flow_of = {}
        self.names = [None] * capacity
        self.flows = <Flow*>calloc(capacity, sizeof(Flow))
        self.free_flows = <int*>malloc(capacity * sizeof(int))
        if self.flows == NULL or self.free_flows == NULL:
            raise MemoryError("waiting queue")
        self.num_free = capacity
        for i in range(capacity):
            self.free_flows[i] = capacity - 1 - i
        for i in range(NUM_LEVELS):
            self.levels[i].first = EMPTY
        self.idle = EMPTY

    def __dealloc__(self):
        free(self.flows)
        free(self.free_flows)

    cdef int open_flow(self, str tenant, int priority) except -1:
        name = (tenant, priority)
        cdef int flow = self.flow_of.get(name, -1)
        if flow < 0:
            if self.num_free:
                self.num_free -= 1
                flow = self.free_flows[self.num_free]
            else:  # there are as many flows as requests, and this request has none yet: one is idle
                flow = self.idle
                self.idle = self.ordered_flows.remove(self.idle, flow)
                del self.flow_of[self.names[flow]]
            self.flow_of[name] = flow
            self.names[flow] = name
            self.flows[flow].service = 0
            self.flows[flow].cost_per_token = WEIGHT_SCALE // <int>self.weights.get(tenant, 1)
            self.flows[flow].level = priority - MIN_PRIORITY
            self.flows[flow].first = EMPTY
        elif self.flows[flow].num_requests == 0:
            self.idle = self.ordered_flows.remove(self.idle, flow)
        self.flows[flow].num_requests += 1
        return flow

    cdef void close_flow(self, int flow) noexcept:
        self.flows[flow].num_requests -= 1
        if self.flows[flow].num_requests == 0:
            self.num_idled += 1
            self.idle = self.ordered_flows.push(self.idle, flow, self.flows[flow].service, self.num_idled)

    cdef int push(self, int entry, int64_t now_ns) except -1 nogil:
        cdef Flow* flow = &self.flows[self.sequences[entry].flow]
        cdef Level* level = &self.levels[flow.level]
        cdef int first
        if flow.first == EMPTY:
            first = self.settle(level)
            flow.service = max(flow.service, level.virtual_time if first == EMPTY else self.flows[first].service)
        if level.first == EMPTY:
            level.waits_since_ns = now_ns
        return self.put_back(entry)

    cdef int put_back(self, int entry) except -1 nogil:
        cdef Sequence* s = &self.sequences[entry]
        cdef Flow* flow = &self.flows[s.flow]
        cdef Level* level = &self.levels[flow.level]
        if level.first == EMPTY:
            self.waiting_levels[self.num_waiting_levels] = flow.level
            self.num_waiting_levels += 1
        if flow.first != EMPTY:
            level.first = self.ordered_flows.remove(level.first, s.flow)
        flow.first = self.entries.push(flow.first, entry, s.order, 0)
        level.first = self.ordered_flows.push(level.first, s.flow, flow.service, self.sequences[flow.first].order)
        flow.num_tokens += s.num_tokens
        level.num_tokens += s.num_tokens
        self.size += 1
        return 0

    cdef int remove(self, int entry) except -1 nogil:
        if not self.entries.is_member(entry):
            return 0
        cdef Sequence* s = &self.sequences[entry]
        cdef Flow* flow = &self.flows[s.flow]
        cdef Level* level = &self.levels[flow.level]
        cdef int i
        level.first = self.ordered_flows.remove(level.first, s.flow)
        flow.first = self.entries.remove(flow.first, entry)
        flow.num_tokens -= s.num_tokens
        level.num_tokens -= s.num_tokens
        self.size -= 1
        if flow.first != EMPTY:
            level.first = self.ordered_flows.push(level.first, s.flow, flow.service, self.sequences[flow.first].order)
        elif level.first == EMPTY:
            self.num_waiting_levels -= 1
            for i in range(self.num_waiting_levels):
                if self.waiting_levels[i] == flow.level:
                    self.waiting_levels[i] = self.waiting_levels[self.num_waiting_levels]
                    break
        return 0

    cdef bint holds(self, int entry) noexcept nogil:
        return self.entries.is_member(entry)

    cdef int first(self, int64_t now_ns, int above) except -2 nogil:
        """Of two levels with one rank the one that has waited longer to get there goes first: the lower one."""
        cdef int i, level, best = -1
        cdef int64_t rank, best_rank = 0
        for i in range(self.num_waiting_levels):
            level = self.waiting_levels[i]
            rank = self.rank(level, now_ns)
            if level + MIN_PRIORITY <= above:
                continue
            if best < 0 or rank > best_rank or (rank == best_rank and level < best):
                best, best_rank = level, rank
        return self.flows[self.settle(&self.levels[best])].first if best >= 0 else -1

    cdef int pop(self, int64_t now_ns, int above) except -2 nogil:
        cdef int entry = self.first(now_ns, above)
        if entry >= 0:
            self.remove(entry)
        return entry

    cdef int first_overdue(self, int64_t now_ns, int priority) except -2 nogil:
        """The next entry of a priority that has been passed over until it aged, if its tenant holds no row of it."""
        cdef Level* level = &self.levels[priority - MIN_PRIORITY]
        cdef int flow
        if level.first == EMPTY or now_ns - level.waits_since_ns < self.aging_ns:
            return -1
        flow = self.settle(level)
        return self.flows[flow].first if self.flows[flow].num_rows == 0 else -1

    cdef void admit(self, int entry, int64_t now_ns) noexcept nogil:
        cdef Flow* flow = &self.flows[self.sequences[entry].flow]
        cdef Level* level = &self.levels[flow.level]
        level.waits_since_ns = now_ns
        level.virtual_time = max(level.virtual_time, flow.service)
        flow.num_rows += 1

    cdef void release(self, int entry) noexcept nogil:
        self.flows[self.sequences[entry].flow].num_rows -= 1

    cdef inline void charge(self, int flow, int num_tokens) noexcept nogil:
        self.flows[flow].service += <int64_t>num_tokens * self.flows[flow].cost_per_token

    cdef int64_t num_tokens_before(self, object tenant, int priority):
        """Those of its own flow and of higher levels. Other tenants of its level share with it, as far as they do."""
        cdef int i, flow = self.flow_of.get((tenant, priority), -1)
        cdef int64_t num_tokens = self.flows[flow].num_tokens if flow >= 0 else 0
        for i in range(self.num_waiting_levels):
            if self.waiting_levels[i] > priority - MIN_PRIORITY:
                num_tokens += self.levels[self.waiting_levels[i]].num_tokens
        return num_tokens

    cdef int64_t num_tokens(self) noexcept nogil:
        """Of all requests in the queue."""
        cdef int i
        cdef int64_t num_tokens = 0
        for i in range(self.num_waiting_levels):
            num_tokens += self.levels[self.waiting_levels[i]].num_tokens
        return num_tokens

    cdef int64_t rank(self, int level, int64_t now_ns) noexcept nogil:
        return level + MIN_PRIORITY + (now_ns - self.levels[level].waits_since_ns) // self.aging_ns

    cdef int settle(self, Level* level) except -2 nogil:
        """The first flow of a level, EMPTY without any. Flows move back as they get tokens, but only when looked at."""
        cdef int flow
        cdef HeapNode node
        while level.first != EMPTY:
            flow = level.first
            node = self.ordered_flows.nodes[flow]
            if node.major == self.flows[flow].service:
                break
            level.first = self.ordered_flows.remove(flow, flow)
            level.first = self.ordered_flows.push(level.first, flow, self.flows[flow].service, node.minor)
        return level.first

    cdef int check_invariants(self) except -1:
        cdef int i, entry, flow
        requests = {}
        rows = {}
        queued = {}
        for entry in self.table.entries.values():
            flow = self.sequences[entry].flow
            requests[flow] = requests.get(flow, 0) + 1
            rows[flow] = rows.get(flow, 0) + (self.sequences[entry].row >= 0)
            if self.entries.is_member(entry):
                queued.setdefault(flow, []).append(entry)
        assert self.size == self.entries.size == sum(map(len, queued.values())), "a request is lost"
        assert len(self.flow_of) + self.num_free == self.entries.capacity, "a flow is lost"
        for flow in self.flow_of.values():
            assert self.flows[flow].num_requests == requests.get(flow, 0), "a flow has lost or kept a request"
            assert self.flows[flow].num_rows == rows.get(flow, 0), "a flow has lost or kept a row"
            num_tokens = sum([self.sequences[entry].num_tokens for entry in queued.get(flow, [])])
            assert self.flows[flow].num_tokens == num_tokens, "num_tokens of a flow is wrong"
            assert (self.flows[flow].first == EMPTY) == (flow not in queued), "a flow lacks its first request"
            is_ordered = flow in queued or flow not in requests
            assert self.ordered_flows.is_member(flow) == is_ordered, "a flow is not where it belongs"
        waiting = {self.flows[flow].level for flow in queued}
        assert {self.waiting_levels[i] for i in range(self.num_waiting_levels)} == waiting, "a level is lost"
        assert self.num_waiting_levels == len(waiting), "a level is listed twice"
        for i in range(NUM_LEVELS):
            num_tokens = sum([self.flows[flow].num_tokens for flow in queued if self.flows[flow].level == i])
            assert self.levels[i].num_tokens == num_tokens, "num_tokens of a level is wrong"
        return 0
