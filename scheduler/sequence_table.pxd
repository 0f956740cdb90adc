"""The state of every active request: one C struct each, at a stable entry of a table of fixed capacity."""

cimport numpy as cnp
from libc.stdint cimport int16_t, int32_t, int64_t

from foreword.scheduler.prefix_cache cimport CacheSalt, PrefixCache
from foreword.scheduler.sip_hash cimport Hash128


cdef struct SequenceUpdate:  # memory layout of step.SEQUENCE_UPDATE, which documents the fields
    int64_t request_key
    int64_t first_scheduled_ns
    int32_t num_tokens
    int32_t num_prompt_computed
    int32_t num_scored
    int32_t num_cached
    int32_t num_drafted
    int32_t num_accepted
    int32_t num_steps
    int32_t num_prefill_chunks
    int32_t num_preemptions
    int32_t num_recomputed
    int16_t step_kind
    int16_t finish_reason
    int16_t drafter


cdef struct Sequence:
    SequenceUpdate update  # what the next StepUpdate says of it; holds its counters
    int64_t order  # counts calls of `add`: the older of two requests has the smaller one
    int64_t deadline_ns  # 0 for none
    int32_t* token_ids  # [max_tokens] prompt, output, then drafts that wait for verification
    Hash128* block_hashes  # [max_tokens // block_size + 1] of the salt, then of every full block; NULL when it bypasses
    CacheSalt* salt
    int32_t* stop_token_ids  # [num_eos + num_stop] EOS ids first
    int32_t num_eos
    int32_t num_stop
    int32_t priority
    int32_t flow  # of the waiting queue
    int32_t row  # -1 without one
    int32_t num_prompt
    int32_t min_tokens  # prompt and output: EOS and stop ids end the sequence only at a token behind this many
    int32_t max_tokens  # prompt and output
    int32_t num_tokens  # prompt and output so far
    int32_t num_computed  # tokens in the KV cache; a decoding sequence lacks its last token
    int32_t prefill_end  # num_tokens when it got its row: up to here it computes what was known before
    int32_t num_computed_max  # highest num_computed ever: what is computed below it is recomputed
    int32_t num_blocks  # blocks in its row of the block table
    int32_t num_sent_blocks  # of those, leading ones that are as the device knows them
    int32_t num_cached_blocks  # of those, leading ones in the prefix cache: all that are full, unless it bypasses it
    int32_t num_hashed_blocks  # leading blocks of its tokens in block_hashes
    int32_t num_scored  # leading prompt tokens that are scored, or need not be
    int32_t num_draft  # draft tokens behind its last token
    int16_t drafter  # who proposed them
    int32_t leader  # entry of the output of the same request that computes the prompt for it; -1 once it has or ended
    int32_t follower  # next one that waits for the same leader, or of the leader the first; -1 for none
    int32_t num_overtaken  # requests behind it that were admitted while it did not fit, or any while it was paused
    int64_t num_admitted_before  # of all requests, when it last paused without a row
    bint bypasses_cache
    bint needs_last_token  # Request.needs_last_token
    bint is_paused
    int32_t num_planned  # plans without a result yet that it is part of
    int32_t num_ahead  # while the next plan is made: tokens of the open one that it looks as if it had computed
    bint is_awaited  # while the next plan is made: what it computes there depends on the open one's result
    bint is_reported  # its end is part of an update


cdef class SequenceTable:
    cdef readonly int capacity
    cdef PrefixCache cache
    cdef int num_free
    cdef int64_t next_order
    cdef Sequence* sequences  # [capacity]
    cdef int* free_entries  # [capacity]; the first num_free are free
    cdef dict entries  # request_key -> entry
    cdef list requests  # [capacity] the Request of an entry

    cdef int add(self, object request, cnp.ndarray prompt) except -1  # of a checked request; the new entry
    cdef int find(self, object request_key) except -2  # its entry, -1 when it is not active
    cdef tuple outputs(self, const int* entries, int num_entries)  # offsets and tokens that they have generated
    cdef int remove(self, int entry) except -1
