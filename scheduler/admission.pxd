"""Checks of a request before anything is allocated for it; each raises the error that the caller sees."""

cimport numpy as cnp
from libc.stdint cimport int64_t


# The prompt, contiguous. ValueError for a value that a sequence cannot hold; the service has validated it before.
cdef cnp.ndarray check_request(object request, object config)

# ContextLengthExceeded for what can never run, DeadlineInfeasible for what is too late.
cdef int check_bounds(object request, object config, int64_t now_ns) except -1

# QueueFull at a bound of the waiting queue, or when none of the num_free entries for requests is left.
cdef int check_queue(
    object request, object config, int num_waiting, int64_t num_waiting_tokens, int num_free
) except -1
