"""Buffers behind StepPlan and StepUpdate, and the checks of a StepResult."""

import numpy as np

cimport numpy as cnp

from foreword.scheduler.step import SEQUENCE_UPDATE, StepPlan, StepUpdate

cnp.import_array()


cdef inline int32_t* int32_data(cnp.ndarray array) noexcept:
    return <int32_t*>cnp.PyArray_DATA(array)


cdef cnp.ndarray checked(str field, object array, int typenum, str dtype, Py_ssize_t length):
    """The array itself, once it is known to be contiguous, of that type and that long (-1: of any length)."""
    if not isinstance(array, cnp.ndarray):
        raise ValueError(f"{field} must be an array of {dtype}, got {type(array).__name__}")
    cdef cnp.ndarray a = array
    if cnp.PyArray_TYPE(a) != typenum or cnp.PyArray_NDIM(a) != 1 or not cnp.PyArray_ISCARRAY_RO(a):
        raise ValueError(f"{field} must be a contiguous one-dimensional array of {dtype}")
    if length >= 0 and cnp.PyArray_DIM(a, 0) != length:
        raise ValueError(f"{field} must have {length} entries, got {cnp.PyArray_DIM(a, 0)}")
    return a


cdef Py_ssize_t first_negative(const int32_t* ids, Py_ssize_t num_ids) noexcept nogil:
    """Where the first negative id is, -1 for none: the usual answer, after a loop without branches."""
    cdef Py_ssize_t i
    cdef int32_t signs = 0
    for i in range(num_ids):
        signs |= ids[i]
    if signs < 0:
        for i in range(num_ids):
            if ids[i] < 0:
                return i
    return -1


cdef class StepBuffers:
    """Preallocated arrays of one step.

    Args:
        max_num_sequences: bound of B.
        max_num_batched_tokens: bound of T, L and N.
        max_num_updates: bound of U.
        max_num_blocks: entries of the block table, and with that bound of R.
    """

    def __cinit__(self, int max_num_sequences, int max_num_batched_tokens, int max_num_updates, Py_ssize_t max_num_blocks):
        shapes = (
            (max_num_sequences,),
            (max_num_sequences,),
            (max_num_sequences + 1,),
            (max_num_sequences,),
            (max_num_batched_tokens,),
            (max_num_batched_tokens,),
            (max_num_batched_tokens,),
            (max_num_batched_tokens,),
            (max_num_sequences + 1,),
            (max_num_batched_tokens,),
            (max_num_batched_tokens,),
            (max_num_sequences + 1,),
            (max_num_blocks, 3),
        )
        self.plan_arrays = tuple(np.zeros(shape, np.int32) for shape in shapes)
        self.rows = int32_data(self.plan_arrays[0])
        self.generations = int32_data(self.plan_arrays[1])
        self.query_offsets = int32_data(self.plan_arrays[2])
        self.context_lens = int32_data(self.plan_arrays[3])
        self.token_ids = int32_data(self.plan_arrays[4])
        self.positions = int32_data(self.plan_arrays[5])
        self.slot_mapping = int32_data(self.plan_arrays[6])
        self.logits_indices = int32_data(self.plan_arrays[7])
        self.logits_offsets = int32_data(self.plan_arrays[8])
        self.scored_indices = int32_data(self.plan_arrays[9])
        self.scored_token_ids = int32_data(self.plan_arrays[10])
        self.scored_offsets = int32_data(self.plan_arrays[11])
        self.block_table_updates = int32_data(self.plan_arrays[12])

        updates = np.zeros(max_num_updates, SEQUENCE_UPDATE)
        update_token_ids = np.zeros(max_num_batched_tokens, np.int32)
        update_logprobs = np.zeros(max_num_batched_tokens, np.float32)
        update_result_indices = np.zeros(max_num_batched_tokens, np.int32)
        update_scored_indices = np.zeros(max_num_batched_tokens, np.int32)
        self.update_arrays = (
            updates, update_token_ids, update_logprobs, update_result_indices, update_scored_indices
        )
        self.updates = <SequenceUpdate*>cnp.PyArray_DATA(<cnp.ndarray>updates)
        self.update_token_ids = int32_data(update_token_ids)
        self.update_logprobs = <float*>cnp.PyArray_DATA(<cnp.ndarray>update_logprobs)
        self.update_result_indices = int32_data(update_result_indices)
        self.update_scored_indices = int32_data(update_scored_indices)

    cdef void clear(self) noexcept nogil:
        self.num_sequences = self.num_tokens = self.num_logits = self.num_scored = self.num_block_table_updates = 0
        self.num_prefill_sequences = self.num_prefill_tokens = 0

    cdef void add(
        self, Sequence* s, int generation, const int32_t* block_table, int block_size, int num_tokens
    ) noexcept nogil:
        cdef int b = self.num_sequences, t = self.num_tokens
        cdef int start = s.num_computed
        cdef int end = start + num_tokens
        cdef int i, offset, num_logits
        cdef int block = s.num_blocks - 1  # a decoding sequence is in its last one, and to divide would cost more
        while block * block_size > start:
            block -= 1
        offset = start - block * block_size
        if s.num_computed < s.prefill_end:
            self.num_prefill_sequences += 1
            self.num_prefill_tokens += num_tokens
        self.add_block_table_updates(s, block_table)
        if start < s.num_prompt:
            self.add_scored(s, start, end)
        # Pointers of its own keep the loops from reading members of `self` again after every write.
        cdef const int32_t* known = s.token_ids + start
        cdef int32_t* token_ids = self.token_ids + t
        cdef int32_t* positions = self.positions + t
        cdef int32_t* slots = self.slot_mapping + t
        cdef int32_t* logits_indices = self.logits_indices + self.num_logits
        for i in range(num_tokens):
            token_ids[i] = known[i]
            positions[i] = start + i
            slots[i] = block_table[block] * block_size + offset
            offset += 1
            if offset == block_size:
                offset = 0
                block += 1
        t += num_tokens
        if end >= s.num_tokens:  # its last known token and the drafts behind it
            num_logits = s.num_draft + 1
            for i in range(num_logits):
                logits_indices[i] = t - num_logits + i
            self.num_logits += num_logits
        self.rows[b] = s.row
        self.generations[b] = generation
        self.context_lens[b] = end
        self.query_offsets[b + 1] = t
        self.logits_offsets[b + 1] = self.num_logits
        self.scored_offsets[b + 1] = self.num_scored
        self.num_sequences = b + 1
        self.num_tokens = t

    cdef inline void add_scored(self, Sequence* s, int start, int end) noexcept nogil:
        """Have the prompt tokens scored that follow positions `start:end`, unless they are already."""
        cdef int position
        for position in range(max(start, s.num_scored - 1), min(end, s.num_prompt - 1)):
            self.scored_indices[self.num_scored] = self.num_tokens + position - start
            self.scored_token_ids[self.num_scored] = s.token_ids[position + 1]
            self.num_scored += 1

    cdef inline void add_block_table_updates(self, Sequence* s, const int32_t* block_table) noexcept nogil:
        cdef int32_t* update
        while s.num_sent_blocks < s.num_blocks:
            update = self.block_table_updates + 3 * <size_t>self.num_block_table_updates
            update[0], update[1], update[2] = s.row, s.num_sent_blocks, block_table[s.num_sent_blocks]
            self.num_block_table_updates += 1
            s.num_sent_blocks += 1

    cdef object plan(
        self, object step_id, tuple admitted, object output_offsets, object output_token_ids, int num_preempted
    ):
        cdef int num_sequences = self.num_sequences, num_tokens = self.num_tokens
        (
            rows,
            generations,
            query_offsets,
            context_lens,
            token_ids,
            positions,
            slot_mapping,
            logits_indices,
            logits_offsets,
            scored_indices,
            scored_token_ids,
            scored_offsets,
            block_table_updates,
        ) = self.plan_arrays
        return StepPlan(
            step_id,
            rows[:num_sequences],
            generations[:num_sequences],
            query_offsets[: num_sequences + 1],
            context_lens[:num_sequences],
            token_ids[:num_tokens],
            positions[:num_tokens],
            slot_mapping[:num_tokens],
            logits_indices[: self.num_logits],
            logits_offsets[: num_sequences + 1],
            scored_indices[: self.num_scored],
            scored_token_ids[: self.num_scored],
            scored_offsets[: num_sequences + 1],
            block_table_updates[: self.num_block_table_updates],
            admitted,
            output_offsets,
            output_token_ids,
            self.num_prefill_sequences,
            self.num_prefill_tokens,
            num_preempted,
        )

    cdef int read_result(self, object result) except -1:
        cdef int num_sequences = self.num_sequences
        cdef cnp.ndarray offsets = checked(
            "result.token_offsets", result.token_offsets, cnp.NPY_INT32, "int32", num_sequences + 1
        )
        cdef cnp.ndarray token_ids = checked("result.token_ids", result.token_ids, cnp.NPY_INT32, "int32", -1)
        cdef Py_ssize_t num_tokens = cnp.PyArray_DIM(token_ids, 0)
        cdef cnp.ndarray logprobs = checked(
            "result.logprobs", result.logprobs, cnp.NPY_FLOAT32, "float32", num_tokens
        )
        cdef cnp.ndarray failed = checked("result.failed", result.failed, cnp.NPY_BOOL, "bool", num_sequences)
        self.result_offsets = int32_data(offsets)
        self.result_token_ids = int32_data(token_ids)
        self.result_logprobs = <float*>cnp.PyArray_DATA(logprobs)
        self.result_failed = <char*>cnp.PyArray_DATA(failed)
        self.constraint_reasons = NULL
        if result.constraint_reasons is not None:
            self.constraint_reasons = int32_data(
                checked(
                    "result.constraint_reasons", result.constraint_reasons, cnp.NPY_INT32, "int32", num_sequences
                )
            )

        cdef int b, num_accepted, num_logits
        if self.result_offsets[0] != 0 or self.result_offsets[num_sequences] != num_tokens:
            raise ValueError(f"result.token_offsets must go from 0 to {num_tokens}, the length of token_ids")
        for b in range(num_sequences):
            num_accepted = self.result_offsets[b + 1] - self.result_offsets[b]
            num_logits = self.logits_offsets[b + 1] - self.logits_offsets[b]
            if self.result_failed[b]:
                num_logits = 0
            if num_accepted < min(num_logits, 1) or num_accepted > num_logits:
                allowed = "no token" if num_logits == 0 else f"1 to {num_logits} tokens"
                raise ValueError(f"result.token_offsets: sequence {b} of the plan may have {allowed}, got {num_accepted}")
        cdef Py_ssize_t i
        i = first_negative(self.result_token_ids, num_tokens)
        if i >= 0:
            raise ValueError(f"result.token_ids[{i}] must not be negative, got {self.result_token_ids[i]}")
        return self.read_drafts(result.drafts)

    cdef int read_drafts(self, object drafts) except -1:
        self.draft_offsets = self.drafters = NULL
        if drafts is None:
            return 0
        cdef int b, num_sequences = self.num_sequences
        cdef cnp.ndarray offsets = checked(
            "result.drafts.offsets", drafts.offsets, cnp.NPY_INT32, "int32", num_sequences + 1
        )
        cdef cnp.ndarray token_ids = checked(
            "result.drafts.token_ids", drafts.token_ids, cnp.NPY_INT32, "int32", -1
        )
        cdef Py_ssize_t i, num_tokens = cnp.PyArray_DIM(token_ids, 0)
        cdef int32_t* starts = int32_data(offsets)
        cdef int32_t* ids = int32_data(token_ids)
        if starts[0] != 0 or starts[num_sequences] != num_tokens:
            raise ValueError(f"result.drafts.offsets must go from 0 to {num_tokens}, the length of token_ids")
        for b in range(num_sequences):
            if starts[b + 1] < starts[b]:
                raise ValueError(f"result.drafts.offsets must not fall, but does at sequence {b} of the plan")
            if starts[b + 1] > starts[b] and self.result_offsets[b + 1] == self.result_offsets[b]:
                raise ValueError(f"result.drafts: sequence {b} of the plan has no token that drafts could follow")
        i = first_negative(ids, num_tokens)
        if i >= 0:
            raise ValueError(f"result.drafts.token_ids[{i}] must not be negative, got {ids[i]}")
        if drafts.drafters is not None:
            self.drafters = int32_data(
                checked("result.drafts.drafters", drafts.drafters, cnp.NPY_INT32, "int32", num_sequences)
            )
        self.draft_offsets = starts
        self.draft_token_ids = ids
        return 0

    cdef object update(self, object step_id, object draft_state):
        updates, token_ids, logprobs, result_indices, scored_indices = self.update_arrays
        cdef int num_tokens = self.num_update_tokens
        return StepUpdate(
            step_id,
            updates[: self.num_updates],
            token_ids[:num_tokens],
            logprobs[:num_tokens],
            draft_state,
            result_indices[:num_tokens],
            scored_indices[: self.num_update_scored],
        )
