// Swap-in and its companions. One launch plans every request and spreads all copies over the whole chip.
#include "copy.cuh"
#include "plan.cuh"

__device__ __forceinline__ u64 load_acquire(const u64* from) {
    u64 v;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ u32 load_acquire(const u32* from) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

__device__ __forceinline__ u64 load_relaxed(const u64* from) {
    u64 v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
    return v;
}

constexpr u64 ONE_BLOCK = 1ull << 32;

// grid: up to what is resident at once; blocks [0, min(grid, num_reqs)) plan, and the
// others copy, or all do when most plan. A block waits only for
// planning blocks, which have the lowest indices, start first and wait for nobody, so that it cannot hang.
// Dynamic shared memory, if hot_slots_in_shared: int [max(max_capacity, ENTRIES_PER_ROUND)].
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) swap_in(const __grid_constant__ SwapInParams p) {
    __shared__ PlanShared s;
    extern __shared__ __align__(16) int shared_hot_slots[];
    __shared__ u64 progress_base;
    __shared__ u32 num_copies;
    const int tid = threadIdx.x, lane = tid % WARP;
    const u32 num_blocks = gridDim.x, num_reqs = p.requests.num_reqs;
    const u32 num_planning = min(num_blocks, num_reqs);
    const int waiter = NUM_THREADS - WARP;  // a thread of the last warp: thread 0 has enough to do
    Meeting* meeting = p.meeting;

    // `base` must have been read before num_arrived says so. Here the comparison waits for it; a planning block says
    // so only when it is done.
    u64 base = 0;
    if (tid == waiter) base = load_relaxed(&meeting->base);
    if (blockIdx.x >= num_planning) {
        if (tid == waiter && base != ~0ull) atomicAdd(&meeting->num_arrived, 1u);
    } else {
        u64 before = 0;
        bool ever_misses = false;
        for (u32 req = blockIdx.x; req < num_reqs; req += num_blocks) {
            Selection mine;
#pragma unroll
            for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
                const int i = k * NUM_THREADS + tid;
                mine.position[k] = i < p.top_k ? p.selected[static_cast<i64>(req) * p.top_k + i] : ABSENT;
            }
            const Request request = load_request(p.requests, p.tables, req);
            HotRow r;
            r.req = req;
            r.row = request.row;
            r.seq_len = request.seq_len;
            r.capacity = 0;
            Entries hot_slots, stamps;
            bool is_bad = false, has_misses = false;
            if (r.row != ABSENT) {
                r.position_to_hot = p.tables.position_to_hot + static_cast<i64>(r.row) * p.tables.max_context;
                r.hot_to_position = p.tables.hot_to_position + static_cast<i64>(r.row) * p.tables.max_capacity;
                r.stamps = p.tables.stamps + static_cast<i64>(r.row) * p.tables.max_capacity;
                r.capacity = min(p.tables.capacity[r.row], p.tables.max_capacity);
                r.now = p.tables.step[r.row] + 1;
                r.hot_slots = p.tables.hot_slots + static_cast<i64>(r.row) * p.tables.max_capacity;
                // Asked for before the capacity is known.
                const int first = ENTRIES_PER_THREAD * tid;
                if (p.hot_slots_in_shared) hot_slots = load_entries(r.hot_slots, first, p.tables.max_capacity);
                stamps = load_entries(r.stamps, first, p.tables.max_capacity);
            }
#pragma unroll
            for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
                const int position = mine.position[k];
                const bool is_valid = r.row != ABSENT && position >= 0 && position < r.seq_len;
                is_bad |= r.row != ABSENT && position != ABSENT && !is_valid;
                if (!is_valid) mine.position[k] = ABSENT;
                mine.hot[k] = is_valid ? __ldcg(r.position_to_hot + position) : ABSENT;
            }
            if (tid == waiter) progress_base = base;
            if (r.capacity > 0) {
                has_misses = plan_hisparse(p, s, shared_hot_slots, progress_base, r, mine, hot_slots, stamps, is_bad,
                                           tid, lane);
                ever_misses |= has_misses;
            } else {
#pragma unroll
                for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
                    const int i = k * NUM_THREADS + tid, position = mine.position[k];
                    if (i < p.top_k)
                        p.out[static_cast<i64>(req) * p.top_k + i] =
                            position == ABSENT ? ABSENT : dense_slot(p.tables, r.row, position);
                }
                if (is_bad) atomicOr(&p.tables.error_flags[r.row], BAD_POSITION);
            }
            __syncthreads();
            if (req + num_blocks >= num_reqs && tid == waiter) {
                if (ever_misses) __threadfence();
                before = atomicAdd(&meeting->progress, ONE_BLOCK);
                atomicAdd(&meeting->num_arrived, 1u);
            }
            if (r.capacity > 0) commit_hisparse(p, s, r, mine, stamps, has_misses, tid, lane);
            if (req + num_blocks < num_reqs) __syncthreads();
        }
        if (tid == waiter && (before - base) / ONE_BLOCK == num_planning - 1) {
            // The last to plan: nobody may start from the new base before all have read the old one.
            *p.plan.num_misses = static_cast<int>(static_cast<u32>(before - base));
            while (load_acquire(&meeting->num_arrived) != num_blocks) {}
            meeting->num_arrived = 0;
            meeting->base = before + ONE_BLOCK;
        }
    }
    // Planning blocks have more to do than the others, which are enough to fill PCIe.
    const u32 first_copying = 2 * num_planning <= num_blocks ? num_planning : 0;
    if (blockIdx.x < first_copying) return;
    if (tid == waiter) {
        u64 progress;
        do {
            progress = load_acquire(&meeting->progress) - base;
        } while (progress / ONE_BLOCK != num_planning);
        num_copies = static_cast<u32>(progress);
    }
    __syncthreads();
    // One warp an item; neighbouring items go to different SMs.
    const u32 num_copying = num_blocks - first_copying;
    for (u32 i = tid / WARP * num_copying + blockIdx.x - first_copying; i < num_copies; i += NUM_WARPS * num_copying)
        fetch_item(p.pools, p.layer, __ldcg(p.plan.src_host_slots + i), __ldcg(p.plan.dst_device_slots + i), lane);
}

// grid: any; one warp an item and layer.
extern "C" __global__ void copy_planned(const __grid_constant__ CopyParams p) {
    const int lane = threadIdx.x % WARP, num_warps_of_block = blockDim.x / WARP;
    const i64 num_misses = *p.plan.num_misses;
    const i64 num_warps = static_cast<i64>(gridDim.x) * num_warps_of_block;
    for (i64 i = threadIdx.x / WARP * gridDim.x + blockIdx.x; i < num_misses * p.num_layers; i += num_warps) {
        const i64 miss = i % num_misses;
        const int layer = p.layers ? p.layers[i / num_misses] : p.first_layer;
        fetch_item(p.pools, layer, p.plan.src_host_slots[miss], p.plan.dst_device_slots[miss], lane);
    }
}

// grid: any; one warp a request and layer.
extern "C" __global__ void backup_newest(const __grid_constant__ BackupParams p) {
    const Tables& t = p.tables;
    const int lane = threadIdx.x % WARP, num_warps_of_block = blockDim.x / WARP;
    const int num_warps = gridDim.x * num_warps_of_block;
    const int num_items = p.requests.num_reqs * p.num_layers;
    for (int i = threadIdx.x / WARP * gridDim.x + blockIdx.x; i < num_items; i += num_warps) {
        const int layer = i % p.num_layers;
        const Request request = load_request(p.requests, t, i / p.num_layers);
        if (request.row == ABSENT) continue;
        const int capacity = t.capacity[request.row];
        if (capacity == 0) continue;
        const i64 host_slot = t.host_slots[static_cast<i64>(request.row) * t.max_context + request.seq_len - 1];
        if (host_slot < 0) {
            if (lane == 0 && layer == 0) atomicOr(t.error_flags + request.row, NO_HOST_SLOT);
            continue;
        }
        const int entry = min(request.seq_len, capacity) - 1;
        back_up_item(p.pools, layer, t.hot_slots[static_cast<i64>(request.row) * t.max_capacity + entry], host_slot,
                     lane);
    }
}

// grid * block >= num_reqs; one thread a request.
extern "C" __global__ void newest_slots(const __grid_constant__ NewestSlotsParams p) {
    const Tables& t = p.tables;
    const int req = blockIdx.x * blockDim.x + threadIdx.x;
    if (req >= p.requests.num_reqs) return;
    const Request request = load_request(p.requests, t, req);
    int slot = ABSENT;
    if (request.row != ABSENT) {
        const int capacity = t.capacity[request.row];
        slot = capacity == 0
            ? dense_slot(t, request.row, request.seq_len - 1)
            : t.hot_slots[static_cast<i64>(request.row) * t.max_capacity + min(request.seq_len, capacity) - 1];
    }
    p.out[req] = slot;
}
