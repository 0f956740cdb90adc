# distutils: extra_compile_args = -fopenmp -Wno-psabi
# distutils: extra_link_args = -fopenmp
# distutils: depends = gpu/backends/simd.h gpu/backends/cpu_attention.h gpu/backends/cpu_attention_kernel.h gpu/backends/cpu_int8.h gpu/backends/cpu_kernels.h gpu/backends/cpu_sampling.h gpu/backends/cpu_scores.h gpu/backends/cpu_truncation.h
# distutils: sources = gpu/backends/cpu_attention_avx512.c gpu/backends/cpu_attention_avx2.c gpu/backends/cpu_attention_plain.c
"""Runs the CPU kernels over the rows of a batch, in parallel and without the GIL. See cpu_kernels.pyi."""

from cython.parallel cimport parallel, prange, threadid
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc


cdef extern from "cpu_attention.h" nogil:
    enum:
        QUERY_TOKENS
        MAX_HEAD_DIM
        WIDEST
    ctypedef struct paged_cache:
        void *keys
        void *values
        int64_t block_size
        int64_t num_kv_heads
        int64_t head_dim
    ctypedef struct attention_batch:
        const void *queries
        int64_t query_stride
        const int32_t *positions
        const int32_t *rows
        const int32_t *block_table
        int64_t max_blocks
        int64_t num_heads
        int64_t window
        float scale
        void *out
    ctypedef void (*attention_kernel)(const attention_batch *batch, const paged_cache *cache, int64_t kv_head,
                                      int64_t token, int64_t count, int bf16) noexcept nogil
    attention_kernel attention_avx512
    attention_kernel attention_avx2
    attention_kernel attention_plain
    bint has_avx512_attention()
    bint has_avx2_attention()


cdef extern from "cpu_kernels.h" nogil:
    enum:
        LANES
    void rms_norm_row "rms_norm"(float *stream, const void *delta, const float *weight, void *out, int64_t width,
                                 float eps, int bf16)
    void silu_and_mul_row "silu_and_mul"(const void *gate_up, void *out, int64_t width, int bf16)
    void rotate_and_store_row "rotate_and_store"(void *qkv, const float *cos, const float *sin,
                                                 const paged_cache *cache, int64_t slot, int64_t num_heads, int bf16)


cdef extern from "cpu_scores.h" nogil:
    void score_token(const void *logits, int64_t vocab, int64_t row, int32_t token, int32_t num_top, float *logprob,
                     int32_t *rank, int32_t *top_ids, float *top_logprobs, int bf16)


cdef extern from "cpu_sampling.h" nogil:
    enum:
        NOISE_IDS
        SCRATCH_ROWS
    ctypedef struct sampling_batch:
        const float *temperature
        const int32_t *top_k
        const float *top_p
        const float *min_p
        const float *typical_p
        const float *repetition_penalty
        const float *frequency_penalty
        const float *presence_penalty
        const uint64_t *seed
        const int64_t *position
        const int32_t *bias_offsets
        const int32_t *bias_ids
        const float *bias_values
        const int32_t *bias_index
        const int32_t *history_offsets
        const int32_t *history_ids
        const int32_t *history_counts
        const int32_t *history_index
        const uint32_t *mask_words
        int64_t mask_width
        const int32_t *mask_index
        const int32_t *masked_ids
        int64_t masked_width
        const int32_t *num_masked
        const uint8_t *by_rejection
        const int32_t *draft_ids
        const uint8_t *want_logprob
    bint sample_token(const void *logits, int64_t vocab, const sampling_batch *batch, int64_t i, float *scratch,
                      int32_t *token, float *logprob, int bf16)


cdef extern from "cpu_int8.h" nogil:
    enum:
        GROUP
        PANEL
        PAIR
    ctypedef struct int8_group:
        pass
    ctypedef struct int8_weight:
        const uint8_t *panels
        const float *bias
        int64_t out_features
        int64_t groups
        int bits
    ctypedef void (*int8_product)(const int8_weight *weight, int64_t pair, const int8_group *x, int64_t begin,
                                  int64_t end, void *out, int bf16) noexcept nogil
    int64_t panel_bytes(int64_t groups, int bits)
    void quantise_row(const void *x, int64_t width, int8_group *groups)
    bint pack_int8_panel(const float *weight, int64_t out_features, int64_t in_features, int64_t panel, int bits,
                         uint8_t *panels)
    int8_product int8_product_vnni
    int8_product int8_product_avx2
    int8_product int8_product_plain
    bint has_vnni()
    bint has_avx2()


VECTOR_LANES = LANES
HEAD_DIM_LIMIT = MAX_HEAD_DIM
WIDEST_LANES = WIDEST
ATTENTION_KERNELS = ("avx512",) * has_avx512_attention() + ("avx2",) * has_avx2_attention() + ("plain",)
NOISE_LANES = NOISE_IDS
SAMPLING_SCRATCH_ROWS = SCRATCH_ROWS

# Below this many elements waking other threads costs more than they save.
cdef int64_t SERIAL_ELEMENTS = 65536


cdef inline int team(int64_t elements, int num_threads) noexcept nogil:
    return num_threads if elements > SERIAL_ELEMENTS else 1


cdef inline size_t element_size(bint bf16) noexcept nogil:
    return 2 if bf16 else 4


def rms_norm(uintptr_t stream, uintptr_t delta, uintptr_t weight, uintptr_t out, int64_t rows, int64_t width,
             float eps, bint bf16, int num_threads):
    cdef size_t size = element_size(bf16)
    cdef int64_t row
    for row in prange(rows, nogil=True, schedule="static", num_threads=team(rows * width, num_threads)):
        rms_norm_row(<float *>stream + row * width,
                     <const void *>(delta + row * width * size) if delta else NULL,
                     <const float *>weight, <void *>(out + row * width * size), width, eps, bf16)


def silu_and_mul(uintptr_t gate_up, uintptr_t out, int64_t rows, int64_t width, bint bf16, int num_threads):
    cdef size_t size = element_size(bf16)
    cdef int64_t row
    for row in prange(rows, nogil=True, schedule="static", num_threads=team(rows * width, num_threads)):
        silu_and_mul_row(<const void *>(gate_up + 2 * row * width * size), <void *>(out + row * width * size), width,
                         bf16)


cdef class PagedCache:
    """One layer of the KV cache, as the kernels see it."""

    cdef paged_cache layer

    def __init__(self, uintptr_t keys, uintptr_t values, int64_t block_size, int64_t num_kv_heads, int64_t head_dim):
        self.layer.keys = <void *>keys
        self.layer.values = <void *>values
        self.layer.block_size = block_size
        self.layer.num_kv_heads = num_kv_heads
        self.layer.head_dim = head_dim


def rotate_and_store(uintptr_t qkv, uintptr_t cos, uintptr_t sin, uintptr_t positions, uintptr_t slots,
                     PagedCache cache, int64_t num_tokens, int64_t num_heads, bint bf16, int num_threads):
    cdef int64_t half = cache.layer.head_dim // 2
    cdef int64_t width = (num_heads + 2 * cache.layer.num_kv_heads) * cache.layer.head_dim
    cdef size_t size = element_size(bf16)
    cdef const int32_t *position = <const int32_t *>positions
    cdef const int32_t *slot = <const int32_t *>slots
    cdef int64_t token
    for token in prange(num_tokens, nogil=True, schedule="static", num_threads=team(num_tokens * width, num_threads)):
        rotate_and_store_row(<void *>(qkv + token * width * size), <const float *>cos + position[token] * half,
                             <const float *>sin + position[token] * half, &cache.layer, slot[token], num_heads, bf16)


def attention(uintptr_t queries, int64_t query_stride, uintptr_t positions, uintptr_t token_rows,
              uintptr_t block_table, int64_t max_blocks, PagedCache cache, uintptr_t out, int64_t num_tokens,
              int64_t num_heads, float scale, int64_t window, bint bf16, str kernel, int num_threads):
    cdef attention_kernel attention_tokens = attention_plain
    cdef attention_batch batch
    cdef int64_t groups = cache.layer.num_kv_heads
    cdef int64_t item, token, num_parts = 0
    cdef int64_t elements = 0
    cdef int64_t *parts = <int64_t *>malloc((num_tokens + 1) * sizeof(int64_t))
    if parts == NULL:
        raise MemoryError()
    if kernel == "avx512" and cache.layer.block_size % WIDEST == 0:
        attention_tokens = attention_avx512
    elif kernel != "plain":
        attention_tokens = attention_avx2
    batch.queries = <const void *>queries
    batch.query_stride = query_stride
    batch.positions = <const int32_t *>positions
    batch.rows = <const int32_t *>token_rows
    batch.block_table = <const int32_t *>block_table
    batch.max_blocks = max_blocks
    batch.num_heads = num_heads
    batch.window = window
    batch.scale = scale
    batch.out = <void *>out
    for token in range(num_tokens):  # parts of up to QUERY_TOKENS tokens of one sequence
        if num_parts == 0 or batch.rows[token] != batch.rows[token - 1] or token - parts[num_parts - 1] == QUERY_TOKENS:
            parts[num_parts] = token
            num_parts += 1
        elements += (batch.positions[token] + 1) * num_heads * cache.layer.head_dim // 4  # cheap beside those of a norm
    parts[num_parts] = num_tokens
    # A part and a KV head is one unit of work; long and short contexts mix, so threads take units as they get free.
    for item in prange(num_parts * groups, nogil=True, schedule="dynamic", num_threads=team(elements, num_threads)):
        attention_tokens(&batch, &cache.layer, item % groups, parts[item // groups],
                         parts[item // groups + 1] - parts[item // groups], bf16)
    free(parts)


def sample(uintptr_t logits, int64_t vocab, bint bf16, params, uintptr_t scratch, samples, int num_threads):
    cdef const float[::1] temperature = params.temperature
    cdef const int32_t[::1] top_k = params.top_k
    cdef const float[::1] top_p = params.top_p
    cdef const float[::1] min_p = params.min_p
    cdef const float[::1] typical_p = params.typical_p
    cdef const float[::1] repetition_penalty = params.repetition_penalty
    cdef const float[::1] frequency_penalty = params.frequency_penalty
    cdef const float[::1] presence_penalty = params.presence_penalty
    cdef const uint64_t[::1] seed = params.seed
    cdef const int64_t[::1] position = params.position
    cdef const int32_t[::1] bias_offsets = params.biases.offsets
    cdef const int32_t[::1] bias_ids = params.biases.ids
    cdef const float[::1] bias_values = params.biases.values
    cdef const int32_t[::1] bias_index = params.biases.index
    cdef const int32_t[::1] history_offsets = params.history.offsets
    cdef const int32_t[::1] history_ids = params.history.ids
    cdef const int32_t[::1] history_counts = params.history.counts
    cdef const int32_t[::1] history_index = params.history.index
    cdef const uint32_t[:, ::1] mask_words = params.masks.words
    cdef const int32_t[::1] mask_index = params.masks.index
    cdef const int32_t[:, ::1] masked_ids = params.masked_ids
    cdef const int32_t[::1] num_masked = params.num_masked
    cdef const uint8_t[::1] by_rejection = params.by_rejection
    cdef const int32_t[::1] draft_ids = params.draft_ids
    cdef const uint8_t[::1] want_logprob = params.want_logprob
    cdef int32_t[::1] token_ids = samples.token_ids
    cdef float[::1] logprobs = samples.logprobs
    cdef uint8_t[::1] failed = samples.failed
    cdef int64_t rows = token_ids.shape[0]
    cdef int64_t scratch_width = SCRATCH_ROWS * ((vocab + NOISE_IDS - 1) // NOISE_IDS * NOISE_IDS)
    cdef int64_t i
    cdef sampling_batch batch
    if rows == 0:
        return
    batch.temperature = &temperature[0]
    batch.top_k = &top_k[0]
    batch.top_p = &top_p[0]
    batch.min_p = &min_p[0]
    batch.typical_p = &typical_p[0]
    batch.repetition_penalty = &repetition_penalty[0]
    batch.frequency_penalty = &frequency_penalty[0]
    batch.presence_penalty = &presence_penalty[0]
    batch.seed = &seed[0]
    batch.position = &position[0]
    batch.bias_offsets = &bias_offsets[0]
    batch.bias_ids = &bias_ids[0]
    batch.bias_values = &bias_values[0]
    batch.bias_index = &bias_index[0]
    batch.history_offsets = &history_offsets[0]
    batch.history_ids = &history_ids[0]
    batch.history_counts = &history_counts[0]
    batch.history_index = &history_index[0]
    batch.mask_words = &mask_words[0, 0]
    batch.mask_width = mask_words.shape[1]
    batch.mask_index = &mask_index[0]
    batch.masked_ids = &masked_ids[0, 0]
    batch.masked_width = masked_ids.shape[1]
    batch.num_masked = &num_masked[0]
    batch.by_rejection = &by_rejection[0]
    batch.draft_ids = &draft_ids[0]
    batch.want_logprob = &want_logprob[0]
    for i in prange(rows, nogil=True, schedule="dynamic", num_threads=team(rows * vocab, num_threads)):
        failed[i] = not sample_token(<const void *>logits, vocab, &batch, i,
                                     <float *>scratch + threadid() * scratch_width, &token_ids[i], &logprobs[i], bf16)


def score(uintptr_t logits, int64_t vocab, bint bf16, const int32_t[::1] rows, const int32_t[::1] token_ids, scores,
          int num_threads):
    cdef float[::1] logprobs = scores.logprobs
    cdef int32_t[::1] ranks = scores.ranks
    cdef int32_t[::1] top_ids = scores.top_token_ids
    cdef float[::1] top_logprobs = scores.top_logprobs
    cdef int32_t num_top = scores.num_top
    cdef int64_t num_rows = rows.shape[0]
    cdef int64_t i
    for i in prange(num_rows, nogil=True, schedule="dynamic", num_threads=team(num_rows * vocab, num_threads)):
        score_token(<const void *>logits, vocab, rows[i], token_ids[i], num_top, &logprobs[i], &ranks[i],
                    &top_ids[0] + i * num_top, &top_logprobs[0] + i * num_top, bf16)


# Rows of one unit of work of a product: enough to make good use of a pair of panels in the cache.
cdef int64_t BLOCK = 96

INT8_KERNELS = ("vnni",) * has_vnni() + ("avx2",) * has_avx2() + ("plain",)


cdef class Int8Weight:
    """A linear layer in panels, as the integer kernels see it."""

    cdef int8_weight layer
    cdef int64_t panel_count
    cdef readonly int64_t out_features, in_features, num_bytes, row_bytes

    def __init__(self, int64_t out_features, int64_t in_features, int bits):
        self.out_features = self.layer.out_features = out_features
        self.in_features = in_features
        self.layer.groups = (in_features + GROUP - 1) // GROUP
        self.layer.bits = bits
        self.panel_count = (out_features + PAIR * PANEL - 1) // (PAIR * PANEL) * PAIR
        self.num_bytes = self.panel_count * panel_bytes(self.layer.groups, bits)
        self.row_bytes = self.layer.groups * sizeof(int8_group)

    def pack(self, const float[:, ::1] weight, uintptr_t bias, uintptr_t panels, int num_threads):
        cdef int64_t panel
        cdef int lossy = 0
        self.layer.panels = <const uint8_t *>panels
        self.layer.bias = <const float *>bias
        if not self._pack(&weight[0, 0], 0):
            return False  # the first panel tells nearly always
        for panel in prange(1, self.panel_count, nogil=True, schedule="dynamic", num_threads=num_threads):
            lossy += not self._pack(&weight[0, 0], panel)
        return lossy == 0

    cdef bint _pack(self, const float *weight, int64_t panel) noexcept nogil:
        return pack_int8_panel(weight, self.layer.out_features, self.in_features, panel, self.layer.bits,
                               <uint8_t *>self.layer.panels)


def linear_int8(uintptr_t x, Int8Weight weight, uintptr_t quantised, uintptr_t out, int64_t rows, bint bf16_out,
                str kernel, int num_threads):
    cdef int8_product product = int8_product_plain
    cdef int8_weight *layer = &weight.layer
    cdef int64_t groups = layer.groups, width = weight.in_features
    cdef int64_t pairs = (layer.out_features + PAIR * PANEL - 1) // (PAIR * PANEL)
    cdef int64_t blocks = (rows + BLOCK - 1) // BLOCK
    cdef int8_group *inputs = <int8_group *>quantised
    cdef int64_t row, item, begin, end
    if kernel == "vnni":
        product = int8_product_vnni
    elif kernel == "avx2":
        product = int8_product_avx2
    with nogil, parallel(num_threads=team(rows * width * layer.out_features // 8, num_threads)):
        for row in prange(rows, schedule="static"):
            quantise_row(<const void *>(x + row * width * 2), width, inputs + row * groups)
        for item in prange(pairs * blocks, schedule="static"):
            begin = item % blocks * BLOCK
            end = min(begin + BLOCK, rows)
            product(layer, item // blocks, inputs, begin, end, <void *>out, bf16_out)
