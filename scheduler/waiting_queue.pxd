"""Which request is admitted next: by rank, then to the tenant that has got least, then by arrival.

A flow is what one tenant asks for at one priority. Its service counts the tokens that it got, divided by the tenant's
weight; one that had nothing waiting starts no lower than those that wait (virtual token counters: Sheng et al., Fairness
in Serving Large Language Models, OSDI 2024). A level, which is a priority, ranks higher the longer it is passed over.
"""

from libc.stdint cimport int64_t

from foreword.scheduler.heap_forest cimport HeapForest
from foreword.scheduler.sequence_table cimport Sequence, SequenceTable


cdef enum:  # request.MIN_PRIORITY and MAX_PRIORITY
    MIN_PRIORITY = -100
    MAX_PRIORITY = 100
    NUM_LEVELS = MAX_PRIORITY - MIN_PRIORITY + 1


cdef struct Flow:
    int64_t service  # tokens it got, each as much as cost_per_token
    int64_t num_tokens  # of its requests in the queue
    int cost_per_token  # falls with the tenant's weight
    int level
    int num_requests  # active ones, whatever their state
    int num_rows  # that these hold
    int first  # root of its requests in the queue, by arrival


cdef struct Level:
    int64_t waits_since_ns  # when its last request was admitted, or when it got one after it had none
    int64_t virtual_time  # service of the flow whose request was admitted last
    int64_t num_tokens  # of its requests in the queue
    int first  # root of its flows with requests in the queue, by service


cdef class WaitingQueue:
    cdef int size
    cdef SequenceTable table
    cdef Sequence* sequences  # of the table
    cdef int64_t aging_ns
    cdef dict weights
    cdef HeapForest entries  # of flows
    cdef Level[NUM_LEVELS] levels
    cdef int[NUM_LEVELS] waiting_levels  # the first num_waiting_levels have requests in the queue, in no order
    cdef int num_waiting_levels

    cdef Flow* flows  # [capacity]
    cdef dict flow_of  # (tenant, priority) -> flow
    cdef list names  # [capacity] the other way round
    cdef int* free_flows  # [capacity]; the first num_free are free
    cdef int num_free
    cdef HeapForest ordered_flows  # of levels, and those that are idle
    cdef int idle  # root of flows without an active request, by service; the first one is forgotten first
    cdef int64_t num_idled  # so far

    cdef int open_flow(self, str tenant, int priority) except -1  # for one more active request
    cdef void close_flow(self, int flow) noexcept  # for one request fewer
    cdef int push(self, int entry, int64_t now_ns) except -1 nogil
    cdef int remove(self, int entry) except -1 nogil  # nothing happens when it is not in the queue
    cdef bint holds(self, int entry) noexcept nogil
    cdef int first(self, int64_t now_ns, int above) except -2 nogil  # entry of a priority above this; -1 for none
    cdef int pop(self, int64_t now_ns, int above) except -2 nogil  # take it out
    cdef int first_overdue(self, int64_t now_ns, int priority) except -2 nogil  # see below; -1 for none
    cdef int put_back(self, int entry) except -1 nogil  # what was popped and is not admitted
    cdef void admit(self, int entry, int64_t now_ns) noexcept nogil  # gets a row: its level starts to wait anew
    cdef void release(self, int entry) noexcept nogil  # has lost its row
    cdef void charge(self, int flow, int num_tokens) noexcept nogil
    cdef int64_t num_tokens_before(self, object tenant, int priority)  # that go before a new request for certain
    cdef int64_t num_tokens(self) noexcept nogil
    cdef int64_t rank(self, int level, int64_t now_ns) noexcept nogil
    cdef int settle(self, Level* level) except -2 nogil
    cdef int check_invariants(self) except -1
