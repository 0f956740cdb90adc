"""What a sequence gains from a step: tokens, the end of it, a record of the update."""

from foreword.scheduler.sequence_table cimport Sequence
from foreword.scheduler.step_buffers cimport StepBuffers


cdef enum:  # step.StepKind
    NO_STEP = 0
    PREFILL = 1
    DECODE = 2
    VERIFY = 3

cdef enum:  # step.FinishReason
    UNFINISHED = 0
    EOS = 1
    STOP_TOKEN = 2
    LENGTH = 3
    CONTEXT_LIMIT = 4
    DEADLINE = 5
    CANCELLED = 6
    FAILED = 7
    CONSTRAINT_COMPLETE = 8
    CONSTRAINT_STUCK = 9


# Take sequence b's part of a result into its state and add its record to the update.
cdef void commit(Sequence* s, StepBuffers step, int b, int max_model_len) noexcept nogil

# Add the record of a sequence that gained nothing in this step.
cdef void report(Sequence* s, StepBuffers step) noexcept nogil
