"""Why a request is refused at the door."""

import numpy as np

cimport numpy as cnp
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t

from foreword.scheduler.errors import ContextLengthExceeded, DeadlineInfeasible, QueueFull
from foreword.scheduler.request import MAX_PRIORITY, MIN_PRIORITY

cnp.import_array()


cdef cnp.ndarray check_request(object request, object config):
    cdef object prompt_token_ids = request.prompt_token_ids
    if not isinstance(prompt_token_ids, cnp.ndarray):
        raise ValueError(f"prompt_token_ids must be an array, got {type(prompt_token_ids).__name__}")
    cdef cnp.ndarray prompt = prompt_token_ids
    if cnp.PyArray_TYPE(prompt) != cnp.NPY_INT32 or not cnp.PyArray_ISNOTSWAPPED(prompt) or prompt.ndim != 1:
        raise ValueError(f"prompt_token_ids must be one-dimensional int32, got {prompt.ndim}-dimensional {prompt.dtype}")
    if not cnp.PyArray_ISCARRAY_RO(prompt):
        prompt = np.require(prompt, requirements=["C_CONTIGUOUS", "ALIGNED"])
    cdef const int32_t* token_ids = <const int32_t*>cnp.PyArray_DATA(prompt)
    cdef Py_ssize_t i
    if cnp.PyArray_DIM(prompt, 0) == 0:
        raise ValueError("prompt_token_ids must have at least one token")
    for i in range(cnp.PyArray_DIM(prompt, 0)):
        if token_ids[i] < 0:
            raise ValueError(f"prompt_token_ids[{i}] must not be negative, got {token_ids[i]}")
    stopping = request.stopping
    if stopping.max_output_tokens < 1:
        raise ValueError(f"max_output_tokens must be at least 1, got {stopping.max_output_tokens}")
    if stopping.min_output_tokens < 0:
        raise ValueError(f"min_output_tokens must not be negative, got {stopping.min_output_tokens}")
    for token_id in (*stopping.eos_token_ids, *stopping.stop_token_ids):
        if not 0 <= token_id <= INT32_MAX:
            raise ValueError(f"eos_token_ids and stop_token_ids must be int32 and not negative, got {token_id}")
    if not MIN_PRIORITY <= request.priority <= MAX_PRIORITY:
        raise ValueError(f"priority must be {MIN_PRIORITY} to {MAX_PRIORITY}, got {request.priority}")
    if not isinstance(request.tenant, str):
        raise ValueError(f"tenant must be a string, got {type(request.tenant).__name__}")
    if not 0 <= request.request_key <= INT64_MAX:
        raise ValueError(f"request_key must be int64 and not negative, got {request.request_key}")
    max_outputs = min(config.max_num_waiting, INT64_MAX - request.request_key)
    if not 1 <= request.num_outputs <= max_outputs:
        raise ValueError(f"num_outputs must be 1 to {max_outputs}, got {request.num_outputs}")
    if not 0 <= request.deadline_ns <= INT64_MAX:
        raise ValueError(f"deadline_ns must be int64 and not negative, got {request.deadline_ns}")
    return prompt


cdef int check_bounds(object request, object config) except -1:
    num_prompt = len(request.prompt_token_ids)
    max_output = request.stopping.max_output_tokens
    if num_prompt + max_output > config.max_model_len:
        raise ContextLengthExceeded(
            f"{num_prompt} prompt tokens and up to {max_output} output tokens exceed the context of "
            f"{config.max_model_len}",
            num_prompt_tokens=num_prompt,
            max_output_tokens=max_output,
            max_model_len=config.max_model_len,
        )
    # The last token is never computed, so it needs no slot. Blocks are whole: what fits the slots fits the blocks.
    if num_prompt + max_output - 1 > config.num_blocks * config.block_size:
        raise ContextLengthExceeded(
            f"{num_prompt} prompt tokens and up to {max_output} output tokens exceed the KV cache of "
            f"{config.num_blocks} blocks of {config.block_size} tokens",
            num_prompt_tokens=num_prompt,
            max_output_tokens=max_output,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
        )
    return 0


cdef int check_deadline(object request, int64_t now_ns, object num_tokens, object wait_ns) except -1:
    left_ns = request.deadline_ns - now_ns
    if left_ns <= 0:
        raise DeadlineInfeasible("the deadline has passed", deadline_ns=request.deadline_ns, now_ns=now_ns)
    if left_ns <= wait_ns:
        raise DeadlineInfeasible(
            f"the deadline is in {left_ns / 1e6:.0f} ms, but {num_tokens} tokens go before and take about "
            f"{wait_ns / 1e6:.0f} ms",
            deadline_ns=request.deadline_ns,
            now_ns=now_ns,
            num_tokens_before=num_tokens,
            estimated_wait_ns=wait_ns,
        )
    return 0


cdef int check_queue(
    object request, object config, int num_waiting, int64_t num_waiting_tokens, int num_free
) except -1:
    if num_waiting + request.num_outputs > config.max_num_waiting:
        raise QueueFull(
            f"{num_waiting} requests wait; the limit is {config.max_num_waiting}",
            max_num_waiting=config.max_num_waiting,
        )
    if num_free < request.num_outputs:  # a cancelled request keeps its place until a step has reported its end
        raise QueueFull(
            f"all {config.max_num_sequences + config.max_num_waiting} places are taken, some by requests that are being "
            "ended by the present step",
            max_num_waiting=config.max_num_waiting,
        )
    num_tokens = request.num_outputs * len(request.prompt_token_ids)
    if num_waiting and num_waiting_tokens + num_tokens > config.max_num_waiting_tokens:
        raise QueueFull(
            f"{num_waiting_tokens} prompt tokens wait; the limit is {config.max_num_waiting_tokens}",
            max_num_waiting_tokens=config.max_num_waiting_tokens,
        )
    return 0
