"""Tokens a second, measured over the steps that are at least half full."""

cimport cython

cdef enum:
    DECAY = 8  # a step weighs 1/8 less with every step that follows


@cython.final
cdef class Throughput:
    def __cinit__(self, int max_num_batched_tokens):
        self.min_step_tokens = (max_num_batched_tokens + 1) // 2

    cdef void start(self, int64_t now_ns, int num_tokens) noexcept nogil:
        self.step_start_ns = now_ns
        self.step_tokens = num_tokens if num_tokens >= self.min_step_tokens else 0

    cdef void finish(self, int64_t now_ns) noexcept nogil:
        if self.step_tokens and now_ns > self.step_start_ns:
            self.num_tokens += self.step_tokens - self.num_tokens // DECAY
            self.duration_ns += now_ns - self.step_start_ns - self.duration_ns // DECAY
        self.step_tokens = 0

    cdef void drop(self) noexcept nogil:
        self.step_tokens = 0

    cdef object duration_of(self, object num_tokens):
        return num_tokens * self.duration_ns // self.num_tokens if self.num_tokens else 0
