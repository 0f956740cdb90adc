"""From a step's result to the state of a sequence and its record in the update."""

from libc.stdint cimport int16_t, int32_t


cdef inline bint contains(const int32_t* ids, int num_ids, int32_t token_id) noexcept nogil:
    cdef int i
    for i in range(num_ids):
        if ids[i] == token_id:
            return True
    return False


cdef inline int finish_reason_at(Sequence* s, int32_t token_id, int max_model_len) noexcept nogil:
    """Whether `token_id`, which became the last token, ends the sequence."""
    if s.num_tokens > s.min_tokens:
        if contains(s.stop_token_ids, s.num_eos, token_id):
            return EOS
        if contains(s.stop_token_ids + s.num_eos, s.num_stop, token_id):
            return STOP_TOKEN
    if s.num_tokens == max_model_len:
        return CONTEXT_LIMIT
    return LENGTH if s.num_tokens == s.max_tokens else UNFINISHED


cdef inline int append_tokens(Sequence* s, StepBuffers step, int start, int end, int max_model_len) noexcept nogil:
    """Append result tokens `start:end` up to the first that ends the sequence; returns how many were kept."""
    cdef int i, j = step.num_update_tokens
    for i in range(start, end):
        s.token_ids[s.num_tokens] = step.result_token_ids[i]
        s.num_tokens += 1
        step.update_token_ids[j] = step.result_token_ids[i]
        step.update_logprobs[j] = step.result_logprobs[i]
        step.update_result_indices[j] = i
        j += 1
        s.update.finish_reason = finish_reason_at(s, step.result_token_ids[i], max_model_len)
        if s.update.finish_reason != UNFINISHED:
            break
    cdef int num_kept = j - step.num_update_tokens
    step.num_update_tokens = j
    return num_kept


cdef inline int append_scored(Sequence* s, StepBuffers step, int b, int end) noexcept nogil:
    """Note which of the result's prompt scores are the sequence's; returns how many."""
    cdef int i
    for i in range(step.scored_offsets[b], step.scored_offsets[b + 1]):
        step.update_scored_indices[step.num_update_scored] = i
        step.num_update_scored += 1
    s.num_scored = max(s.num_scored, min(end + 1, s.num_prompt))
    return step.scored_offsets[b + 1] - step.scored_offsets[b]


cdef inline int keep_drafts(Sequence* s, StepBuffers step, int b) noexcept nogil:
    """Put the drafts of a sequence that goes on behind its last token; returns how many fit before its last one.

    One that the next plan computes already is past them.
    """
    if step.draft_offsets == NULL or s.is_paused or s.num_planned or s.update.finish_reason != UNFINISHED:
        return 0
    cdef int start = step.draft_offsets[b]
    cdef int num_draft = min(step.draft_offsets[b + 1] - start, s.max_tokens - s.num_tokens - 1)
    cdef int i
    for i in range(num_draft):
        s.token_ids[s.num_tokens + i] = step.draft_token_ids[start + i]
    s.drafter = 0 if step.drafters == NULL else <int16_t>step.drafters[b]
    return num_draft


cdef inline void add_record(Sequence* s, StepBuffers step) noexcept nogil:
    step.updates[step.num_updates] = s.update
    step.num_updates += 1


cdef void commit(Sequence* s, StepBuffers step, int b, int max_model_len) noexcept nogil:
    cdef int start = s.num_computed
    cdef int end = start + step.query_offsets[b + 1] - step.query_offsets[b]
    cdef int num_accepted = step.result_offsets[b + 1] - step.result_offsets[b]
    cdef bint is_prefill = start < s.prefill_end
    s.update.step_kind = PREFILL if is_prefill else VERIFY if s.num_draft else DECODE
    s.update.num_steps += 1
    if start < s.num_prompt:
        s.update.num_prefill_chunks += 1
    if start < s.num_computed_max:
        s.update.num_recomputed += min(end, s.num_computed_max) - start

    s.update.num_tokens = append_tokens(
        s, step, step.result_offsets[b], step.result_offsets[b + 1], max_model_len
    )
    s.update.num_scored = append_scored(s, step, b, end)
    if step.result_failed[b]:
        s.update.finish_reason = FAILED
    if step.constraint_reasons != NULL and step.constraint_reasons[b] and s.update.num_tokens == num_accepted:
        # The same token may be an end token, which comes first, or the last one there is room for.
        if s.update.finish_reason != EOS and s.update.finish_reason != STOP_TOKEN:
            s.update.finish_reason = step.constraint_reasons[b]
    s.update.num_drafted = s.num_draft
    s.update.drafter = s.drafter if s.num_draft else 0
    s.update.num_accepted = min(s.update.num_tokens, max(num_accepted - 1, 0))
    s.num_computed = end - s.num_draft + s.update.num_accepted
    s.num_computed_max = max(s.num_computed_max, s.num_computed)
    s.num_draft = keep_drafts(s, step, b)
    s.update.num_prompt_computed = min(s.num_computed, s.num_prompt)
    add_record(s, step)


cdef void report(Sequence* s, StepBuffers step) noexcept nogil:
    s.update.step_kind = NO_STEP
    s.update.num_tokens = s.update.num_scored = s.update.num_drafted = s.update.num_accepted = s.update.drafter = 0
    add_record(s, step)
