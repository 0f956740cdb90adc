"""How fast prompts are computed, as the times of the scheduler's own calls tell."""

from libc.stdint cimport int64_t


cdef class Throughput:
    cdef int min_step_tokens  # a step of fewer tokens tells more about what a step costs than about what a token does
    cdef int64_t step_start_ns
    cdef int step_tokens  # of the step under way; 0 when it does not count
    cdef int num_steps
    cdef int64_t num_tokens  # of past steps; the longer ago, the less they weigh
    cdef int64_t duration_ns  # of the same steps

    cdef void start(self, int64_t now_ns, int num_tokens) noexcept nogil  # a step of so many tokens
    cdef void finish(self, int64_t now_ns) noexcept nogil  # the step, because the next one is about to start
    cdef void drop(self) noexcept nogil  # the step, because time passes until the next one
    cdef object duration_of(self, object num_tokens)  # nanoseconds for so many tokens; 0 as long as nothing is known
