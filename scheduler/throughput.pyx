"""Tokens a second, measured over the steps that are at least half full."""

cimport cython

cdef enum:
    MAX_STEPS = 16  # then all of them weigh half as much


@cython.final
cdef class Throughput:
    def __cinit__(self, int max_num_batched_tokens):
        self.min_step_tokens = (max_num_batched_tokens + 1) // 2

    cdef void start(self, int64_t now_ns, int num_tokens) noexcept nogil:
        self.step_start_ns = now_ns
        self.step_tokens = num_tokens if num_tokens >= self.min_step_tokens else 0

    cdef void finish(self, int64_t now_ns) noexcept nogil:
        if self.step_tokens and now_ns > self.step_start_ns:
            self.num_tokens += self.step_tokens
            self.duration_ns += now_ns - self.step_start_ns
            self.num_steps += 1
            if self.num_steps == MAX_STEPS:
                self.num_tokens //= 2
                self.duration_ns //= 2
                self.num_steps //= 2
        self.step_tokens = 0

    cdef void drop(self) noexcept nogil:
        self.step_tokens = 0

    cdef object duration_of(self, object num_tokens):
        return num_tokens * self.duration_ns // self.num_tokens if self.num_tokens else 0
