// One block resolves one request: entries for the misses and the copies to make, then, once these are published, the
// device slots and the tables. A scattered access costs an SM a cycle or more a lane, so the only ones that a hit makes
// are to position_to_hot; the row's device slots are read, and stamps written, in order.
#pragma once
#include "params.cuh"

#ifndef NUM_THREADS
#define NUM_THREADS 1024                 // threads of a block
#endif
#ifndef POSITIONS_PER_THREAD
#define POSITIONS_PER_THREAD 2           // ceil(top_k / NUM_THREADS)
#endif

constexpr int MAX_CAPACITY = 32768;
constexpr int MAX_MISSES = NUM_THREADS * POSITIONS_PER_THREAD;
constexpr int NEWEST_THREAD = 0;         // places the newest position
constexpr int NUM_WARPS = NUM_THREADS / WARP;
constexpr int ENTRIES_PER_THREAD = 4;    // consecutive ones, read in one go
constexpr int ENTRIES_PER_ROUND = ENTRIES_PER_THREAD * NUM_THREADS;

// Ages in steps, one bin each; the last bin holds the free entries, the one before it everything older.
constexpr int NUM_BINS = NUM_THREADS;
constexpr int FREE_BIN = NUM_BINS - 1;

struct PlanShared {
    u32 is_used[MAX_CAPACITY / 32];      // a bit a hot_index: holds a position that this step selected
    int age_histogram[NUM_BINS];
    int victims[MAX_MISSES];             // hot_index
    u32 warp_sums[NUM_WARPS];
    int num_hits, num_misses, num_placeable, num_evictions, flags;
    int threshold, num_at_threshold;
    u32 plan_start;
};

// A hisparse request while its block works on it.
struct HotRow {
    int row, req, seq_len, capacity, now;
    bool fits;                           // every position has its own entry
    int newest_entry;
    int num_served;                      // misses that get an entry
    int* position_to_hot;                // [max_context], the row's part of each table
    int* hot_to_position;                // [max_capacity]
    int* stamps;                         // [max_capacity]
    const int* hot_slots;                // [max_capacity]; in shared memory if it has room
};

// Table values of hot_index 4 i to 4 i + 3.
struct Entries {
    int v[ENTRIES_PER_THREAD];
};

// The positions of one thread: selected[k * NUM_THREADS + tid].
struct Selection {
    int position[POSITIONS_PER_THREAD];
    int hot[POSITIONS_PER_THREAD];           // hot_index, ABSENT for a miss
    int miss[POSITIONS_PER_THREAD];          // number of the miss that this thread claimed and can be placed, or ABSENT
    i64 src_host_slot[POSITIONS_PER_THREAD]; // where miss is a number
    u32 is_claimed;                          // a bit a k: this thread was the first to ask for the missing position
};

// Rows are vectors where max_capacity is a multiple of four; past the end is ABSENT.
__device__ __forceinline__ Entries load_entries(const int* row, int first, int max_capacity) {
    Entries e = {{ABSENT, ABSENT, ABSENT, ABSENT}};
    if (max_capacity % ENTRIES_PER_THREAD == 0) {
        if (first < max_capacity) {
            const int4 v = __ldcg(reinterpret_cast<const int4*>(row + first));
            e = {{v.x, v.y, v.z, v.w}};
        }
    } else {
#pragma unroll
        for (int k = 0; k < ENTRIES_PER_THREAD; ++k)
            if (first + k < max_capacity) e.v[k] = __ldcg(row + first + k);
    }
    return e;
}

__device__ __forceinline__ void count(int* counter, bool is_one, int lane) {
    const u32 votes = __ballot_sync(~0u, is_one);
    if (lane == 0 && votes) atomicAdd(counter, __popc(votes));
}

__device__ __forceinline__ int age_bin(int stamp, int now) {
    return stamp < 0 ? FREE_BIN : min(now - stamp, FREE_BIN - 1);
}

// Pick num_wanted entries below capacity - 1 that this step does not use, of which there are enough: free ones, then
// the oldest stamps. `stamps`: of the first round.
__device__ __forceinline__ void choose_victims(
    PlanShared& s, const HotRow& r, int max_capacity, int num_wanted, const Entries& stamps, int tid, int lane) {
    const int num_movable = r.capacity - 1;
    int bins[ENTRIES_PER_THREAD];        // ABSENT: used in this step, or not movable

    const auto find_bins = [&](int round) {
        const int first = round + ENTRIES_PER_THREAD * tid;
        const Entries e = round == 0 ? stamps : load_entries(r.stamps, first, max_capacity);
        const u32 used = first < num_movable ? s.is_used[first / 32] >> (first % 32) : 0;
#pragma unroll
        for (int k = 0; k < ENTRIES_PER_THREAD; ++k)
            bins[k] = first + k < num_movable && !(used >> k & 1) ? age_bin(e.v[k], r.now) : ABSENT;
    };

    for (int round = 0; round < num_movable; round += ENTRIES_PER_ROUND) {
        find_bins(round);
#pragma unroll
        for (int k = 0; k < ENTRIES_PER_THREAD; ++k) {
            // Ages have few values: one atomic for all lanes of a bin.
            const u32 same = __match_any_sync(~0u, bins[k]);
            if (bins[k] >= 0 && (same & ((1u << lane) - 1)) == 0) atomicAdd(&s.age_histogram[bins[k]], __popc(same));
        }
    }
    __syncthreads();

    // Running sum from the oldest bin on: the bin in which it reaches num_wanted is taken in part.
    const int bin = NUM_BINS - 1 - tid;
    const int in_bin = s.age_histogram[bin];
    int up_to = in_bin;
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const int other = __shfl_up_sync(~0u, up_to, offset);
        if (lane >= offset) up_to += other;
    }
    if (lane == WARP - 1) s.warp_sums[tid / WARP] = up_to;
    __syncthreads();
    up_to += __reduce_add_sync(~0u, lane < tid / WARP ? s.warp_sums[lane] : 0);
    if (up_to >= num_wanted && up_to - in_bin < num_wanted) {
        s.threshold = bin;
        s.num_at_threshold = num_wanted - (up_to - in_bin);
    }
    __syncthreads();

    // Number the entries that go, by warp, then as they come: older ones in the high half of each sum, those of the last
    // bin in the low half.
    const int threshold = s.threshold;
    const int num_equal = s.num_at_threshold;
    const int num_older = num_wanted - num_equal;
    const u32 lanes_before = (1u << lane) - 1;
    u32 taken_before = 0;
    for (int round = 0; round < num_movable; round += ENTRIES_PER_ROUND) {
        if (num_movable > ENTRIES_PER_ROUND) find_bins(round);
        u32 older[ENTRIES_PER_THREAD], equal[ENTRIES_PER_THREAD], in_warp = 0;
#pragma unroll
        for (int k = 0; k < ENTRIES_PER_THREAD; ++k) {
            older[k] = __ballot_sync(~0u, bins[k] > threshold);
            equal[k] = __ballot_sync(~0u, bins[k] == threshold);
            in_warp += __popc(older[k]) << 16 | __popc(equal[k]);
        }
        if (round > 0) __syncthreads();
        if (lane == 0) s.warp_sums[tid / WARP] = in_warp;
        __syncthreads();
        u32 index = taken_before + __reduce_add_sync(~0u, lane < tid / WARP ? s.warp_sums[lane] : 0);
        if (num_movable > ENTRIES_PER_ROUND)
            taken_before += __reduce_add_sync(~0u, lane < NUM_WARPS ? s.warp_sums[lane] : 0);
        if (in_warp != 0) {
#pragma unroll
            for (int k = 0; k < ENTRIES_PER_THREAD; ++k) {
                const int entry = round + ENTRIES_PER_THREAD * tid + k;
                if (bins[k] > threshold) {
                    s.victims[(index >> 16) + __popc(older[k] & lanes_before)] = entry;
                } else if (bins[k] == threshold) {
                    const int number = (index & 0xffff) + __popc(equal[k] & lanes_before);
                    if (number < num_equal) s.victims[num_older + number] = entry;
                }
                index += __popc(older[k]) << 16 | __popc(equal[k]);
            }
        }
    }
    __syncthreads();
}

// Tell hits from misses, choose the entries of the misses and write their copies to the plan. `mine` holds valid
// positions and what position_to_hot says of them; `hot_slots` and `stamps` those of the first round. Every thread of
// the block calls it; the block must meet before the plan is published. Returns whether a position is missing.
__device__ __forceinline__ bool plan_hisparse(
    const SwapInParams& p, PlanShared& s, int* shared_hot_slots, const u64& progress_base, HotRow& r, Selection& mine,
    const Entries& hot_slots, const Entries& stamps, bool is_bad, int tid, int lane) {
    const Tables& t = p.tables;
    const int newest = r.seq_len - 1;
    r.fits = r.seq_len <= r.capacity;
    r.newest_entry = min(r.seq_len, r.capacity) - 1;
    int occupant = ABSENT;
    if (tid == NEWEST_THREAD) occupant = __ldcg(r.hot_to_position + r.newest_entry);
    if (p.hot_slots_in_shared) {
        *reinterpret_cast<int4*>(shared_hot_slots + ENTRIES_PER_THREAD * tid) =
            make_int4(hot_slots.v[0], hot_slots.v[1], hot_slots.v[2], hot_slots.v[3]);
        for (int i = tid + ENTRIES_PER_ROUND; i < r.capacity; i += NUM_THREADS) shared_hot_slots[i] = r.hot_slots[i];
        r.hot_slots = shared_hot_slots;
    }
#pragma unroll
    for (int i = tid; i < MAX_CAPACITY / 32; i += NUM_THREADS) s.is_used[i] = 0;
    s.age_histogram[tid] = 0;
    if (tid == 0) s.num_hits = s.num_misses = s.num_placeable = s.num_evictions = s.flags = 0;
    __syncthreads();  // also: position_to_hot and the step are read everywhere before they change

    bool is_missing = false;
    int num_hits = 0;
#pragma unroll
    for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
        if (mine.hot[k] == r.newest_entry) mine.hot[k] = ABSENT;  // no longer
        if (mine.position[k] == newest) mine.hot[k] = r.newest_entry;
        is_missing |= mine.position[k] != ABSENT && mine.hot[k] < 0;
        bool is_first_hit = false;
        if (mine.hot[k] >= 0) {
            const u32 bit = 1u << (mine.hot[k] % 32);
            is_first_hit = !(atomicOr(&s.is_used[mine.hot[k] / 32], bit) & bit);
        }
        num_hits += __popc(__ballot_sync(~0u, is_first_hit));
    }
    if (lane == 0) atomicAdd(&s.num_hits, num_hits);
    if (tid == NEWEST_THREAD) {
        // The newest position takes its fixed entry from whoever is there, before that position may be claimed.
        if (occupant != ABSENT && occupant != newest) {
            r.position_to_hot[occupant] = ABSENT;
            s.num_evictions = 1;
        }
        r.position_to_hot[newest] = r.newest_entry;
        r.hot_to_position[r.newest_entry] = newest;
        t.step[r.row] = r.now;
    }
    if (is_bad) atomicOr(&s.flags, BAD_POSITION);
    if (!__syncthreads_or(is_missing)) return false;

    const i64* host_slots = t.host_slots + static_cast<i64>(r.row) * t.max_context;
    mine.is_claimed = 0;
    if (is_missing) {
#pragma unroll
        for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
            const int position = mine.position[k];
            if (position == ABSENT || mine.hot[k] >= 0) continue;
            // Whoever finds another value than CLAIMED is the first of the duplicates.
            if (atomicExch(r.position_to_hot + position, CLAIMED) != CLAIMED) mine.is_claimed |= 1u << k;
            mine.src_host_slot[k] = __ldg(host_slots + position);
        }
    }
    u32 placeable[POSITIONS_PER_THREAD];     // a bit a lane
    int num_claimed = 0, num_placeable = 0;
    bool lacks_host_slot = false;
#pragma unroll
    for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
        const bool is_claimed = mine.is_claimed >> k & 1;
        const bool is_placeable = is_claimed && mine.src_host_slot[k] >= 0;
        lacks_host_slot |= is_claimed && !is_placeable;
        num_claimed += __popc(__ballot_sync(~0u, is_claimed));
        placeable[k] = __ballot_sync(~0u, is_placeable);
        num_placeable += __popc(placeable[k]);
        mine.miss[k] = is_placeable ? 0 : ABSENT;
    }
    if (num_claimed > 0) {
        int first = 0;
        if (lane == 0) {
            atomicAdd(&s.num_misses, num_claimed);
            first = atomicAdd(&s.num_placeable, num_placeable);
        }
        first = __shfl_sync(~0u, first, 0);
#pragma unroll
        for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
            if (mine.miss[k] == 0) mine.miss[k] = first + __popc(placeable[k] & ((1u << lane) - 1));
            first += __popc(placeable[k]);
        }
    }
    if (lacks_host_slot) atomicOr(&s.flags, NO_HOST_SLOT);
    __syncthreads();

    r.num_served = s.num_placeable;
    if (!r.fits) {
        const bool newest_is_selected = s.is_used[r.newest_entry / 32] >> (r.newest_entry % 32) & 1;
        r.num_served = min(r.num_served, r.capacity - 1 - (s.num_hits - newest_is_selected));
    }
    if (r.num_served > 0) {
        if (tid == NUM_THREADS - 1)
            s.plan_start = static_cast<u32>(
                atomicAdd(&p.meeting->progress, static_cast<u64>(r.num_served)) - progress_base);
        if (r.fits) __syncthreads();
        else choose_victims(s, r, t.max_capacity, r.num_served, stamps, tid, lane);
#pragma unroll
        for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
            const int miss = mine.miss[k];
            if (miss < 0 || miss >= r.num_served) continue;
            const int entry = r.fits ? mine.position[k] : s.victims[miss];
            p.plan.src_host_slots[s.plan_start + miss] = mine.src_host_slot[k];
            p.plan.dst_device_slots[s.plan_start + miss] = r.hot_slots[entry];
        }
    }
    return true;
}

// Write the device slots, the tables and the counts. Every thread of the block calls it.
__device__ __forceinline__ void commit_hisparse(
    const SwapInParams& p, PlanShared& s, const HotRow& r, Selection& mine, const Entries& stamps, bool has_misses,
    int tid, int lane) {
    const Tables& t = p.tables;
    if (has_misses) {
#pragma unroll
        for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
            const int position = mine.position[k], miss = mine.miss[k];
            bool evicts = false;
            if (miss >= 0 && miss < r.num_served) {
                const int entry = r.fits ? position : s.victims[miss];
                const int evicted = __ldcg(r.hot_to_position + entry);
                evicts = evicted != ABSENT;
                if (evicts) r.position_to_hot[evicted] = ABSENT;
                r.position_to_hot[position] = entry;
                r.hot_to_position[entry] = position;
                atomicOr(&s.is_used[entry / 32], 1u << (entry % 32));
                mine.hot[k] = entry;
            } else if (mine.is_claimed >> k & 1) {
                r.position_to_hot[position] = ABSENT;
            }
            count(&s.num_evictions, evicts, lane);
        }
        if (tid == 0 && r.num_served < s.num_placeable) atomicOr(&s.flags, TOO_MANY_MISSES);
        __syncthreads();
        // Duplicates find what the first of them got.
#pragma unroll
        for (int k = 0; k < POSITIONS_PER_THREAD; ++k)
            if (mine.position[k] != ABSENT && mine.hot[k] < 0)
                mine.hot[k] = __ldcg(r.position_to_hot + mine.position[k]);
    }
    int* out = p.out + static_cast<i64>(r.req) * p.top_k;
#pragma unroll
    for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
        const int i = k * NUM_THREADS + tid;
        if (i < p.top_k) out[i] = mine.hot[k] < 0 ? ABSENT : r.hot_slots[mine.hot[k]];
    }
    for (int round = 0; round < r.capacity; round += ENTRIES_PER_ROUND) {
        const int first = round + ENTRIES_PER_THREAD * tid;
        if (first >= r.capacity) break;
        u32 used = s.is_used[first / 32] >> (first % 32) & 15;
        if (r.newest_entry / ENTRIES_PER_THREAD == first / ENTRIES_PER_THREAD)
            used |= 1u << (r.newest_entry % ENTRIES_PER_THREAD);
        if (used == 0) continue;
        if (round == 0 && t.max_capacity % ENTRIES_PER_THREAD == 0) {
            *reinterpret_cast<int4*>(r.stamps + first) =
                make_int4(used & 1 ? r.now : stamps.v[0], used & 2 ? r.now : stamps.v[1],
                          used & 4 ? r.now : stamps.v[2], used & 8 ? r.now : stamps.v[3]);
        } else {
#pragma unroll
            for (int k = 0; k < ENTRIES_PER_THREAD; ++k)
                if (used >> k & 1) r.stamps[first + k] = r.now;
        }
    }
    if (tid < 3) {
        const int added = tid == HITS ? s.num_hits : tid == MISSES ? s.num_misses : s.num_evictions;
        if (added)
            atomicAdd(reinterpret_cast<u64*>(t.counters + static_cast<i64>(r.row) * 3 + tid), static_cast<u64>(added));
    }
    if (tid == 0 && s.flags) atomicOr(t.error_flags + r.row, s.flags);
}
