// The best top_k of every query's logits: exact, of equal logits the lowest positions, in ascending order.
//
// Radix select: three histograms of 11, 11 and 10 bits narrow down the key of the last logit that is chosen. Then one
// walk in position order writes what is above it and the first of what equals it. A block has one query; where there
// are more multiprocessors than queries, the blocks of a cluster share one, a slice of its positions each, and read
// each other's histograms.
#include "sync.cuh"

constexpr int NUM_THREADS = 1024;
constexpr int NUM_WARPS = NUM_THREADS / WARP;
constexpr int NUM_BINS = 2 * NUM_THREADS;     // a thread looks after two
constexpr int NUM_PASSES = 3;
constexpr int VECTOR = 4;                     // logits of one load
constexpr int VECTORS_AT_ONCE = 4;            // loads of a thread on their way together
constexpr int MIN_SHARED_LEN = 8192;          // positions up to which one block of a cluster works alone
constexpr u32 MINUS_INFINITY_KEY = 0x007fffffu;

struct TopkParams {
    const float* logits;          // [grid / cluster_size][logits_stride], 16-byte aligned rows
    const i64* req_rows;          // [num_tokens]
    const i64* query_positions;   // [num_tokens]
    const int* num_real;          // [1]
    int* out;                     // [num_tokens][top_k]
    i64 logits_stride;            // a multiple of 4
    int first_token;              // of the first row of logits
    int num_rows;
    int max_len;                  // positions from here on are not seen
    int top_k;
    int cluster_size;
    int padding;
};

struct Shared {
    u32 bins[NUM_PASSES][NUM_BINS];
    u32 warp_sums[2][NUM_WARPS];
    u32 bin, num_needed;
    u32 num_above, num_equal;     // of this block's slice; other blocks read them
};

__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The same word of another block of the cluster.
__device__ __forceinline__ u32 load_of_block(const u32* word, int rank) {
    u32 value = 0;
#if __CUDA_ARCH__ >= 900
    const u32 here = static_cast<u32>(__cvta_generic_to_shared(word));
    asm volatile("{ .reg .u32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.u32 %0, [there]; }"
                 : "=r"(value)
                 : "r"(here), "r"(rank)
                 : "memory");
#endif
    return value;
}

// Unsigned keys in the order of the logits. -0.0 equals 0.0, and NaN -inf.
__device__ __forceinline__ u32 ordered_key(float logit) {
    if (logit != logit) return MINUS_INFINITY_KEY;
    const u32 bits = __float_as_uint(logit + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ int shift_of(int pass) { return pass == 0 ? 21 : pass == 1 ? 10 : 0; }

// Four logits from `position` on; what lies behind `stop` is not read.
__device__ __forceinline__ float4 load_logits(const float* logits, int position, int stop) {
    if (position + VECTOR <= stop) return __ldcg(reinterpret_cast<const float4*>(logits + position));
    float4 some = {0.0f, 0.0f, 0.0f, 0.0f};
    if (position < stop) some.x = __ldcg(logits + position);
    if (position + 1 < stop) some.y = __ldcg(logits + position + 1);
    if (position + 2 < stop) some.z = __ldcg(logits + position + 2);
    return some;
}

__device__ __forceinline__ float lane_of(const float4& some, int i) {
    return i == 0 ? some.x : i == 1 ? some.y : i == 2 ? some.z : some.w;
}

// Called by whole warps. Logits are often alike, zeros most of all: the bin of the first lane is counted once for all
// lanes that have it.
__device__ __forceinline__ void count(u32* bins, u32 bin, bool is_counted, int lane) {
    const u32 counted = __ballot_sync(~0u, is_counted);
    if (counted == 0) return;
    const int leader = __ffs(counted) - 1;
    const u32 leader_bin = __shfl_sync(~0u, bin, leader);
    const bool is_alike = is_counted && bin == leader_bin;
    const u32 alike = __ballot_sync(~0u, is_alike);
    if (lane == leader) atomicAdd(&bins[bin], static_cast<u32>(__popc(alike)));
    else if (is_counted && !is_alike) atomicAdd(&bins[bin], 1u);
}

struct Slice {
    const float* logits;
    int start, stop;              // positions; start is a multiple of 4
    int rank, num_ranks;
};

// The bins of the keys whose higher bits are `prefix`.
__device__ __forceinline__ void fill_bins(u32* bins, const Slice& slice, int pass, u32 prefix, int tid) {
    const int lane = tid % WARP;
    const int shift = shift_of(pass);
    const u32 mask = pass == 2 ? 1023u : 2047u;
    const int prefix_shift = pass == 1 ? 21 : 10;
    constexpr int ROUND = VECTOR * VECTORS_AT_ONCE * NUM_THREADS;
    for (int round = slice.start; round < slice.stop; round += ROUND) {
        float4 some[VECTORS_AT_ONCE];
#pragma unroll
        for (int v = 0; v < VECTORS_AT_ONCE; v++)
            some[v] = load_logits(slice.logits, round + VECTOR * (v * NUM_THREADS + tid), slice.stop);
#pragma unroll
        for (int v = 0; v < VECTORS_AT_ONCE; v++) {
            const int position = round + VECTOR * (v * NUM_THREADS + tid);
            u32 keys[VECTOR];
            bool is_counted[VECTOR], is_any = false;
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                keys[i] = ordered_key(lane_of(some[v], i));
                is_counted[i] = position + i < slice.stop && (pass == 0 || keys[i] >> prefix_shift == prefix);
                is_any |= is_counted[i];
            }
            if (__ballot_sync(~0u, is_any) == 0) continue;  // most of the last pass
#pragma unroll
            for (int i = 0; i < VECTOR; i++) count(bins, keys[i] >> shift & mask, is_counted[i], lane);
        }
    }
}

// The sum over this thread and those before it; `total` is that of the block. `sums` may be used again after two
// further barriers.
__device__ __forceinline__ u32 sum_up_to_thread(u32 value, u32* sums, int tid, u32& total) {
    const int lane = tid % WARP, warp = tid / WARP;
    const u32 in_warp = sum_up_to_lane(value, lane);
    if (lane == WARP - 1) sums[warp] = in_warp;
    __syncthreads();
    const u32 up_to_warp = sum_up_to_lane(sums[lane], lane);
    total = __shfl_sync(~0u, up_to_warp, NUM_WARPS - 1);
    const u32 before = __shfl_sync(~0u, up_to_warp, warp > 0 ? warp - 1 : 0);
    return in_warp + (warp > 0 ? before : 0);
}

// The bin with the last of the `num_needed` greatest keys, and how many of them lie in it: into `shared`. Also adds
// up how many keys of this block's slice lie above that bin.
__device__ __forceinline__ void choose_bin(Shared& shared, const Slice& slice, int pass, u32 num_needed, int tid) {
    const u32* bins = shared.bins[pass];
    const int high = NUM_BINS - 1 - 2 * tid, low = high - 1;
    u32 num_high = bins[high], num_low = bins[low];
    const u32 own_high = num_high, own_low = num_low;
    for (int rank = 0; rank < slice.num_ranks; rank++) {
        if (rank == slice.rank) continue;
        num_high += load_of_block(&bins[high], rank);
        num_low += load_of_block(&bins[low], rank);
    }
    u32 total;
    const u32 up_to_low = sum_up_to_thread(num_high + num_low, shared.warp_sums[0], tid, total);
    const u32 up_to_high = up_to_low - num_low, before = up_to_high - num_high;
    if (before < num_needed && num_needed <= up_to_high) {
        shared.bin = high;
        shared.num_needed = num_needed - before;
    } else if (up_to_high < num_needed && num_needed <= up_to_low) {
        shared.bin = low;
        shared.num_needed = num_needed - up_to_high;
    }
    __syncthreads();
    if (slice.num_ranks == 1) return;
    const int bin = static_cast<int>(shared.bin);
    const u32 above = __reduce_add_sync(~0u, (high > bin ? own_high : 0) + (low > bin ? own_low : 0));
    if (tid % WARP == 0 && above > 0) atomicAdd(&shared.num_above, above);
}

extern "C" __global__ __launch_bounds__(NUM_THREADS) void topk(const TopkParams p) {
    __shared__ Shared shared;
    const int tid = threadIdx.x;
    wait_for_kernel_in_front();
    const int block_token = static_cast<int>(blockIdx.x) / p.cluster_size;
    const int token = p.first_token + block_token;
    Slice slice;
    slice.rank = static_cast<int>(blockIdx.x) % p.cluster_size;
    slice.logits = p.logits + block_token * p.logits_stride;
    int* out = p.out + static_cast<i64>(token) * p.top_k;

    int len = 0;
    if (token < *p.num_real) {
        const i64 row = p.req_rows[token], position = p.query_positions[token];
        if (row >= 0 && row < p.num_rows && position >= 0)
            len = static_cast<int>(position < p.max_len ? position + 1 : p.max_len);
    }
    if (len <= p.top_k) {
        if (slice.rank > 0) return;
        for (int i = tid; i < p.top_k; i += NUM_THREADS) out[i] = i < len ? i : ABSENT;
        return;
    }
    slice.num_ranks = len > MIN_SHARED_LEN ? p.cluster_size : 1;
    if (slice.rank >= slice.num_ranks) return;
    const int slice_len = ((len + slice.num_ranks - 1) / slice.num_ranks + VECTOR - 1) / VECTOR * VECTOR;
    slice.start = min(len, slice.rank * slice_len);
    slice.stop = min(len, slice.start + slice_len);

    for (int pass = 0; pass < NUM_PASSES; pass++)
        for (int i = tid; i < NUM_BINS; i += NUM_THREADS) shared.bins[pass][i] = 0;
    if (tid == 0) shared.num_above = 0;
    __syncthreads();
    u32 prefix = 0, num_needed = p.top_k;
#pragma unroll 1
    for (int pass = 0; pass < NUM_PASSES; pass++) {
        fill_bins(shared.bins[pass], slice, pass, prefix, tid);
        if (slice.num_ranks > 1) wait_for_cluster();
        else __syncthreads();
        choose_bin(shared, slice, pass, num_needed, tid);
        prefix = pass == 0 ? shared.bin : prefix << (pass == 1 ? 11 : 10) | shared.bin;
        num_needed = shared.num_needed;
        __syncthreads();
    }
    const u32 threshold = prefix;

    // What the slices before this one write, and the equal ones that they have.
    u32 num_above = 0, num_equal = 0;
    if (slice.num_ranks > 1) {
        if (tid == 0) shared.num_equal = shared.bins[NUM_PASSES - 1][threshold & 1023u];
        wait_for_cluster();
        for (int rank = 0; rank < slice.rank; rank++) {
            num_above += load_of_block(&shared.num_above, rank);
            num_equal += load_of_block(&shared.num_equal, rank);
        }
    }

    constexpr int ROUND = VECTOR * NUM_THREADS;
    int parity = 0;
    float4 next = load_logits(slice.logits, slice.start + VECTOR * tid, slice.stop);
    for (int round = slice.start; round < slice.stop; round += ROUND) {
        const int position = round + VECTOR * tid;
        const float4 some = next;
        next = load_logits(slice.logits, position + ROUND, slice.stop);
        u32 is_above = 0, is_equal = 0;
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            const u32 key = ordered_key(lane_of(some, i));
            const bool is_inside = position + i < slice.stop;
            is_above |= static_cast<u32>(is_inside && key > threshold) << i;
            is_equal |= static_cast<u32>(is_inside && key == threshold) << i;
        }
        // At most 4096 of each in a round: both fit in one word.
        u32 total;
        const u32 own = __popc(is_above) << 16 | __popc(is_equal);
        const u32 before = sum_up_to_thread(own, shared.warp_sums[parity], tid, total) - own;
        parity ^= 1;
        u32 above_before = num_above + (before >> 16), equal_before = num_equal + (before & 0xffffu);
        if (is_above | is_equal) {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                const bool above = is_above >> i & 1, equal = is_equal >> i & 1;
                if (above || (equal && equal_before < num_needed))
                    out[above_before + min(equal_before, num_needed)] = position + i;
                above_before += above;
                equal_before += equal;
            }
        }
        num_above += total >> 16;
        num_equal += total & 0xffffu;
    }
    if (slice.num_ranks > 1) wait_for_cluster();  // nobody reads this block's memory any more
}
