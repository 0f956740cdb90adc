"""The arrays of a step: NumPy arrays, allocated once, that the scheduler writes through C pointers."""

from libc.stdint cimport int32_t

from foreword.scheduler.sequence_table cimport Sequence, SequenceUpdate


cdef class StepBuffers:
    cdef int num_sequences  # B
    cdef int num_tokens  # T
    cdef int num_logits  # L
    cdef int num_prefill_sequences
    cdef int num_prefill_tokens
    cdef int num_scored  # P
    cdef int num_block_table_updates  # R
    cdef int32_t* rows  # these and the following: step.StepPlan
    cdef int32_t* generations
    cdef int32_t* query_offsets
    cdef int32_t* context_lens
    cdef int32_t* token_ids
    cdef int32_t* positions
    cdef int32_t* slot_mapping
    cdef int32_t* logits_indices
    cdef int32_t* logits_offsets
    cdef int32_t* scored_indices
    cdef int32_t* scored_token_ids
    cdef int32_t* scored_offsets
    cdef int32_t* block_table_updates
    cdef tuple plan_arrays

    cdef int num_updates  # U
    cdef int num_update_tokens  # N of the update
    cdef int num_update_scored
    cdef SequenceUpdate* updates  # these and the following: step.StepUpdate
    cdef int32_t* update_token_ids
    cdef float* update_logprobs
    cdef int32_t* update_result_indices
    cdef int32_t* update_scored_indices
    cdef tuple update_arrays

    cdef const int32_t* result_offsets  # these and the following: step.StepResult
    cdef const int32_t* result_token_ids
    cdef const float* result_logprobs
    cdef const char* result_failed
    cdef const int32_t* constraint_reasons  # NULL without any
    cdef const int32_t* draft_offsets  # NULL without drafts
    cdef const int32_t* draft_token_ids
    cdef const int32_t* drafters  # NULL for all 0

    cdef void clear(self) noexcept nogil  # an empty plan
    # Add the next num_tokens tokens of a sequence, whose blocks hold them, to the plan; of its block table what is news.
    cdef void add(
        self, Sequence* s, int generation, const int32_t* block_table, int block_size, int num_tokens
    ) noexcept nogil
    cdef void add_scored(self, Sequence* s, int start, int end) noexcept nogil
    cdef void add_block_table_updates(self, Sequence* s, const int32_t* block_table) noexcept nogil
    cdef object plan(
        self, object step_id, tuple admitted, object output_offsets, object output_token_ids, int num_preempted
    )  # StepPlan
    cdef int read_result(self, object result) except -1  # check a StepResult of this plan and point at its arrays
    cdef int read_drafts(self, object drafts) except -1
    cdef object update(self, object step_id, object draft_state)  # StepUpdate
