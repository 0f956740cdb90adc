// How probable given tokens are under softmax(logits), their ranks, and the most probable tokens.
//
//   logits T [rows, vocab]; row, token_ids int [tokens]: a token and the row that it is scored in
//   logprobs float [tokens]; ranks int [tokens]: tokens with a greater logit, plus 1
//   top_ids int, top_logprobs float [tokens, num_top]: most probable first, the lowest id of equals first
//
// Grid (tokens). One walk over the row for the peak, one for the mass, one for the rank, and one for each further token
// of the top: the greatest below the one before it. Tried: nothing else; rows are few and come from cache.
#include "device.cuh"
#include "row.cuh"

template <typename T>
__global__ void __launch_bounds__(1024)
score(const T* __restrict__ logits, const int* __restrict__ row_of, const int* __restrict__ token_ids,
      float* __restrict__ logprobs, int* __restrict__ ranks, int* __restrict__ top_ids, float* __restrict__ top_logprobs,
      int vocab, int num_top) {
    __shared__ Partials partials;
    const int i = blockIdx.x;
    const Row<T> row = {logits + static_cast<size_t>(row_of[i]) * vocab, vocab};
    const float own = row(token_ids[i]);
    Key key = peak_of(row, partials);
    const float peak = ranked_value(key);
    const float mass = log_mass(row, peak, partials);
    int above = 0;
    for (int id = threadIdx.x; id < vocab; id += blockDim.x) above += row(id) > own;
    const Key rank = block_reduce(static_cast<Key>(above), partials.keys, Sum());
    if (threadIdx.x == 0) {
        logprobs[i] = (own - peak) - mass;
        ranks[i] = static_cast<int>(rank) + 1;
    }
    for (int k = 0; k < num_top; ++k) {
        if (k) key = peak_of(row, partials, key);
        if (threadIdx.x) continue;
        top_ids[static_cast<size_t>(i) * num_top + k] = ranked_id(key);
        top_logprobs[static_cast<size_t>(i) * num_top + k] = (row(ranked_id(key)) - peak) - mass;
    }
}
