// Selects the top_k largest logits of every query exactly, and writes their positions in ascending order. Among equal
// logits the lowest positions are chosen.
//
// Radix select: up to three histograms of 11, 11 and 10 bits narrow down the key of the last chosen logit. Fewer are
// enough when all logits in its bin are chosen. A block has one query. Where there are more multiprocessors than
// queries, the blocks of a cluster share one, with a slice of its positions each: they exchange sums of 32 bins, and
// read only those bins of each other that decide. Logits are read once, as far as shared memory holds them. Every warp
// has adjacent positions, so that blocks and warps agree only once on where each of them writes.
#include "sync.cuh"

constexpr int NUM_THREADS = BLOCK_THREADS;
constexpr int THREADS_OF_MULTIPROCESSOR = 1024;  // more would leave a thread too few registers
constexpr int NUM_WARPS = NUM_THREADS / WARP;
constexpr int NUM_PASSES = 3;
constexpr int NUM_BINS = 2048;
constexpr int NUM_GROUPS = NUM_BINS / WARP;   // groups of 32 bins: a lane handles two groups, then one bin
constexpr int MAX_RANKS = 8;                  // blocks of a cluster
constexpr int VECTOR = 4;                     // logits of one load
constexpr int STEP = VECTOR * WARP;           // positions that a warp reads at a time
constexpr int STEPS_AT_ONCE = 4;              // loads that a thread has in flight
constexpr int MIN_SHARED_LEN = 8192;          // up to this many positions one block of a cluster works alone
constexpr u32 MINUS_INFINITY_KEY = 0x007fffffu;
static_assert(NUM_GROUPS == 2 * WARP && NUM_WARPS <= WARP, "one warp handles the counts of a block");

struct TopkParams {
    const float* logits;          // [grid / cluster_size][logits_stride], 16-byte aligned rows
    const i64* req_rows;          // [num_tokens]
    const i64* query_positions;   // [num_tokens]
    const int* num_real;          // [1]
    int* out;                     // [num_tokens][top_k]
    i64 logits_stride;            // a multiple of 4, at least max_len
    int first_token;              // token of the first row of logits
    int num_rows;
    int max_len;                  // positions from this one on are not seen
    int top_k;
    int cluster_size;
    int num_kept;                 // keys that dynamic shared memory holds, a multiple of 4
};

// The boundary of the choice. Chosen keys are above the threshold, or equal to it and among the first num_equal of
// these. With top_k = 3 and the keys 9 5 7 5 5, the threshold is 5 with num_equal = 1: 9, 7 and the first 5 are chosen.
struct Threshold {
    u32 key;                      // after a pass: the bits known so far
    u32 num_equal;                // chosen keys that equal the threshold
    u32 above_before, equal_before;  // keys above and equal in the slices before this one
    bool is_final;
};

struct Shared {
    u32 bins[NUM_PASSES][NUM_BINS];           // read by other blocks too
    u32 groups[NUM_PASSES][MAX_RANKS][NUM_GROUPS];  // sums of 32 bins; every block writes its own to all blocks
    u32 warp_above[NUM_WARPS], warp_equal[NUM_WARPS];
    Threshold threshold;
};

extern __shared__ uint4 kept_keys[];

// The part of a query's positions that one block handles, and this lane's share of it.
struct Slice {
    const float* logits;
    int start, stop;              // positions; start is a multiple of STEP
    int num_kept;                 // keys from `start` on that are in kept_keys
    int rank, num_ranks;
    int first, num_steps;         // this lane's positions: 4 from each first + i * STEP on
};

// A barrier of the cluster: afterwards, earlier writes of its blocks to each other's memory are visible.
__device__ __forceinline__ void meet_in_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void arrive_in_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// Loads the same word of another block of the cluster, or of this one.
__device__ __forceinline__ u32 load_of_block(const u32* word, int rank) {
#if __CUDA_ARCH__ >= 900
    u32 value;
    const u32 here = static_cast<u32>(__cvta_generic_to_shared(word));
    asm volatile("{ .reg .u32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.u32 %0, [there]; }"
                 : "=r"(value)
                 : "r"(here), "r"(rank)
                 : "memory");
    return value;
#else
    return *word;
#endif
}
__device__ __forceinline__ void store_in_block(u32* word, int rank, u32 value) {
#if __CUDA_ARCH__ >= 900
    const u32 here = static_cast<u32>(__cvta_generic_to_shared(word));
    asm volatile("{ .reg .u32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.u32 [there], %2; }"
                 :: "r"(here), "r"(rank), "r"(value)
                 : "memory");
#else
    *word = value;
#endif
}

// Returns an unsigned key that orders as the logit. -0.0 equals 0.0, NaN equals -inf. No logit has the key 0.
__device__ __forceinline__ u32 ordered_key(float logit) {
    if (logit != logit) return MINUS_INFINITY_KEY;
    const u32 bits = __float_as_uint(logit + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Loads four logits from `position` on. The last ones may lie beyond the slice, in the same 16 bytes.
__device__ __forceinline__ float4 load_logits(const Slice& slice, int position) {
    if (position >= slice.stop) return {0.0f, 0.0f, 0.0f, 0.0f};
    return __ldcg(reinterpret_cast<const float4*>(slice.logits + position));
}

// Returns the keys of four logits; 0 for logits beyond the slice.
__device__ __forceinline__ uint4 keys_of(const Slice& slice, const float4& some, int position) {
    const int num_left = slice.stop - position;
    return {num_left > 0 ? ordered_key(some.x) : 0, num_left > 1 ? ordered_key(some.y) : 0,
            num_left > 2 ? ordered_key(some.z) : 0, num_left > 3 ? ordered_key(some.w) : 0};
}

__device__ __forceinline__ uint4 keys_at(const Slice& slice, int position) {
    const int in_slice = position - slice.start;
    if (in_slice < slice.num_kept) return kept_keys[in_slice / VECTOR];
    return keys_of(slice, load_logits(slice, position), position);
}

__device__ __forceinline__ u32 key_of(const uint4& keys, int i) {
    return i == 0 ? keys.x : i == 1 ? keys.y : i == 2 ? keys.z : keys.w;
}

// Counts the first 11 bits of all keys, and fills kept_keys.
__device__ __forceinline__ void fill_first_bins(u32* bins, const Slice& slice) {
#pragma unroll 1
    for (int step = 0; step < slice.num_steps; step += STEPS_AT_ONCE) {
        float4 some[STEPS_AT_ONCE];
#pragma unroll
        for (int i = 0; i < STEPS_AT_ONCE; i++)
            if (step + i < slice.num_steps) some[i] = load_logits(slice, slice.first + (step + i) * STEP);
#pragma unroll
        for (int i = 0; i < STEPS_AT_ONCE; i++) {
            if (step + i >= slice.num_steps) break;
            const int position = slice.first + (step + i) * STEP, in_slice = position - slice.start;
            const uint4 keys = keys_of(slice, some[i], position);
            if (in_slice < slice.num_kept) kept_keys[in_slice / VECTOR] = keys;
#pragma unroll
            for (int k = 0; k < VECTOR; k++) atomicAdd(&bins[key_of(keys, k) >> 21], 1u);
        }
    }
}

// Counts the next bits of the keys whose higher bits are `prefix`.
__device__ __forceinline__ void fill_bins(u32* bins, const Slice& slice, int pass, u32 prefix) {
    const int prefix_shift = pass == 1 ? 21 : 10, shift = pass == 1 ? 10 : 0;
    const u32 mask = pass == 1 ? 2047u : 1023u;
#pragma unroll 1
    for (int step = 0; step < slice.num_steps; step++) {
        const uint4 keys = keys_at(slice, slice.first + step * STEP);
#pragma unroll
        for (int k = 0; k < VECTOR; k++) {
            const u32 key = key_of(keys, k);
            if (key >> prefix_shift == prefix) atomicAdd(&bins[key >> shift & mask], 1u);
        }
    }
}

// Finds the bin with the last of the greatest keys that are still needed, and how many of them lie in it. One warp
// calls it.
__device__ __forceinline__ void choose_bin(
    const Shared& shared, const Slice& slice, int pass, Threshold& threshold, int lane) {
    // First the groups of bins, two in each lane, the greatest in lane 0.
    u32 num_high = 0, num_low = 0, high_before = 0, low_before = 0;
#pragma unroll 2
    for (int rank = 0; rank < slice.num_ranks; rank++) {
        const uint2 of_rank = *reinterpret_cast<const uint2*>(&shared.groups[pass][rank][NUM_GROUPS - 2 - 2 * lane]);
        num_high += of_rank.y;
        num_low += of_rank.x;
        high_before += rank < slice.rank ? of_rank.y : 0;
        low_before += rank < slice.rank ? of_rank.x : 0;
    }
    const u32 up_to_low = sum_up_to_lane(num_high + num_low, lane), up_to_high = up_to_low - num_low;
    const int holder = __ffs(__ballot_sync(~0u, up_to_low >= threshold.num_equal)) - 1;
    const bool is_high = __shfl_sync(~0u, up_to_high >= threshold.num_equal, holder);
    const u32 above_group = __shfl_sync(~0u, is_high ? up_to_high - num_high : up_to_high, holder);
    u32 above_before = lane < holder ? high_before + low_before : lane == holder && !is_high ? high_before : 0;

    // Then the bins of the group.
    const u32 needed = threshold.num_equal - above_group;
    const int group = NUM_GROUPS - 1 - 2 * holder - !is_high, bin = group * WARP + WARP - 1 - lane;
    u32 of_rank[MAX_RANKS], num = 0, bin_before = 0;
#pragma unroll
    for (int rank = 0; rank < MAX_RANKS; rank++)
        of_rank[rank] = load_of_block(&shared.bins[pass][bin], min(rank, slice.num_ranks - 1));
#pragma unroll
    for (int rank = 0; rank < MAX_RANKS; rank++) {
        num += rank < slice.num_ranks ? of_rank[rank] : 0;
        bin_before += rank < slice.rank ? of_rank[rank] : 0;
    }
    const u32 up_to = sum_up_to_lane(num, lane);
    const int chosen = __ffs(__ballot_sync(~0u, up_to >= needed)) - 1;
    above_before += lane < chosen ? bin_before : 0;
    const u32 digit = group * WARP + WARP - 1 - chosen, num_in_bin = __shfl_sync(~0u, num, chosen);
    threshold.key = pass == 0 ? digit : threshold.key << (pass == 1 ? 11 : 10) | digit;
    threshold.num_equal = needed - __shfl_sync(~0u, up_to - num, chosen);
    threshold.above_before += __reduce_add_sync(~0u, above_before);
    threshold.equal_before = __shfl_sync(~0u, bin_before, chosen);
    threshold.is_final = pass == NUM_PASSES - 1;
    if (!threshold.is_final && num_in_bin == threshold.num_equal) {
        // The whole bin is chosen: all its keys are above the key just below the bin.
        threshold.key = (threshold.key << (pass == 0 ? 21 : 10)) - 1;
        threshold.num_equal = 0;
        threshold.above_before += threshold.equal_before;
        threshold.is_final = true;
    }
}

// Finds the threshold that all blocks of the query agree on.
__device__ __forceinline__ Threshold find_threshold(Shared& shared, const Slice& slice, int top_k, int tid) {
    const int lane = tid % WARP, warp = tid / WARP;
    Threshold threshold = {0, static_cast<u32>(top_k), 0, 0, false};
#pragma unroll 1
    for (int pass = 0; !threshold.is_final; pass++) {
        u32* bins = shared.bins[pass];
        if (pass == 0) fill_first_bins(bins, slice);
        else fill_bins(bins, slice, pass, threshold.key);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < NUM_GROUPS / NUM_WARPS; i++) {
            const int group = i * NUM_WARPS + warp;
            const u32 sum = __reduce_add_sync(~0u, bins[group * WARP + lane]);
            if (lane < slice.num_ranks) store_in_block(&shared.groups[pass][slice.rank][group], lane, sum);
        }
        if (slice.num_ranks > 1) meet_in_cluster();
        else __syncthreads();
        if (warp == 0) {
            choose_bin(shared, slice, pass, threshold, lane);
            if (lane == 0) shared.threshold = threshold;
        }
        __syncthreads();
        threshold = shared.threshold;
    }
    return threshold;
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, THREADS_OF_MULTIPROCESSOR / NUM_THREADS)
void topk(const TopkParams p) {
    __shared__ Shared shared;
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP;
#pragma unroll
    for (int i = 0; i < NUM_PASSES * NUM_BINS / NUM_THREADS; i++) (&shared.bins[0][0])[i * NUM_THREADS + tid] = 0;
    const int block_token = static_cast<int>(blockIdx.x) / p.cluster_size;
    const int token = p.first_token + block_token;
    int* out = p.out + static_cast<i64>(token) * p.top_k;
    wait_for_kernel_in_front();
    let_next_kernel_get_ready();

    const int num_real = *p.num_real;
    const i64 row = p.req_rows[token], position = p.query_positions[token];
    const bool is_real = token < num_real && row >= 0 && row < p.num_rows && position >= 0;
    const int len = !is_real ? 0 : static_cast<int>(position < p.max_len ? position + 1 : p.max_len);
    Slice slice;
    slice.rank = static_cast<int>(blockIdx.x) % p.cluster_size;
    if (len <= p.top_k) {
        if (slice.rank > 0) return;
        for (int i = tid; i < p.top_k; i += NUM_THREADS) out[i] = i < len ? i : ABSENT;
        return;
    }
    slice.num_ranks = len > MIN_SHARED_LEN ? p.cluster_size : 1;
    if (slice.rank >= slice.num_ranks) return;
    const int round = slice.num_ranks * NUM_WARPS * STEP;  // positions that all blocks of the query read in one step
    slice.num_steps = (len + round - 1) / round;
    slice.start = slice.rank * NUM_WARPS * slice.num_steps * STEP;
    slice.stop = min(len, slice.start + NUM_WARPS * slice.num_steps * STEP);
    slice.first = slice.start + warp * slice.num_steps * STEP + lane * VECTOR;
    slice.logits = p.logits + block_token * p.logits_stride;
    slice.num_kept = p.num_kept;
    __syncthreads();
    const Threshold threshold = find_threshold(shared, slice, p.top_k, tid);
    if (slice.num_ranks > 1) arrive_in_cluster();  // this block no longer reads memory of other blocks

    // Count each warp's chosen keys, so that it knows where in `out` its first one goes.
    u32 num_above = 0, num_equal = 0;
#pragma unroll 1
    for (int step = 0; step < slice.num_steps; step++) {
        const uint4 keys = keys_at(slice, slice.first + step * STEP);
#pragma unroll
        for (int k = 0; k < VECTOR; k++) {
            num_above += key_of(keys, k) > threshold.key;
            num_equal += key_of(keys, k) == threshold.key;
        }
    }
    num_above = __reduce_add_sync(~0u, num_above);
    num_equal = __reduce_add_sync(~0u, num_equal);
    if (lane == 0) {
        shared.warp_above[warp] = num_above;
        shared.warp_equal[warp] = num_equal;
    }
    __syncthreads();
    u32 above_before = threshold.above_before + __reduce_add_sync(~0u, lane < warp ? shared.warp_above[lane] : 0);
    u32 equal_before = threshold.equal_before + __reduce_add_sync(~0u, lane < warp ? shared.warp_equal[lane] : 0);
    // Write the positions of the chosen keys, in order.
#pragma unroll 1
    for (int step = 0; step < slice.num_steps; step++) {
        const int first = slice.first + step * STEP;
        const uint4 keys = keys_at(slice, first);
        u32 is_above = 0, is_equal = 0;
#pragma unroll
        for (int k = 0; k < VECTOR; k++) {
            is_above |= static_cast<u32>(key_of(keys, k) > threshold.key) << k;
            is_equal |= static_cast<u32>(key_of(keys, k) == threshold.key) << k;
        }
        // There are at most 128 of each, so both counts fit into one word.
        const u32 own = __popc(is_above) << 16 | __popc(is_equal);
        const u32 up_to_lane = sum_up_to_lane(own, lane);
        u32 above = above_before + (up_to_lane - own >> 16), equal = equal_before + (up_to_lane - own & 0xffffu);
        if (is_above | is_equal) {
#pragma unroll
            for (int k = 0; k < VECTOR; k++) {
                const bool above_it = is_above >> k & 1, equals_it = is_equal >> k & 1;
                if (above_it || (equals_it && equal < threshold.num_equal))
                    out[above + min(equal, threshold.num_equal)] = first + k;
                above += above_it;
                equal += equals_it;
            }
        }
        const u32 total = __shfl_sync(~0u, up_to_lane, WARP - 1);
        above_before += total >> 16;
        equal_before += total & 0xffffu;
    }
    if (slice.num_ranks > 1) wait_for_cluster();  // other blocks no longer read memory of this one
}
