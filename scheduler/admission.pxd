"""Checks of a request before anything is allocated for it; each raises the error that the caller sees."""

cimport numpy as cnp
from libc.stdint cimport int64_t


# The prompt, contiguous. ValueError for a value that a sequence cannot hold; the service has validated it before.
cdef cnp.ndarray check_request(object request, object config)

# ContextLengthExceeded for what can never run.
cdef int check_bounds(object request, object config) except -1

# DeadlineInfeasible for what is too late, or would be when the num_tokens before it are computed, in wait_ns.
cdef int check_deadline(object request, int64_t now_ns, object num_tokens, object wait_ns) except -1

# QueueFull at a bound of the waiting queue, or when none of the num_free entries for requests is left.
cdef int check_queue(
    object request, object config, int num_waiting, int64_t num_waiting_tokens, int num_free
) except -1
