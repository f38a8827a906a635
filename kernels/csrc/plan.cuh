// From selected positions to entries: the blocks of one request, each with a slice of the selection, tell hits from
// misses and choose the entries that the misses take.
#pragma once
#include "params.cuh"
#include "sync.cuh"

#ifndef NUM_PLANNERS
#define NUM_PLANNERS 512                 // threads of a block that work on positions
#endif
#ifndef POSITIONS_PER_THREAD
#define POSITIONS_PER_THREAD 4           // ceil(slice_len / NUM_PLANNERS)
#endif

constexpr int MAX_CAPACITY = 32768;
constexpr int NUM_PLANNER_WARPS = NUM_PLANNERS / WARP;
constexpr int MAX_SLICE = NUM_PLANNERS * POSITIONS_PER_THREAD;

// The roles of a block's warps, in their order: planners work on positions, the courier speaks with the other blocks,
// fetchers wait for what is asked of the host before its place is known.
constexpr int COURIER = NUM_PLANNERS;    // first thread of the courier's warp
constexpr int FIRST_FETCHER = NUM_PLANNER_WARPS + 1;
constexpr int NUM_FETCHERS = 3;
constexpr int ITEMS_PER_FETCHER = 3;
constexpr int MAX_EARLY = NUM_FETCHERS * ITEMS_PER_FETCHER;
constexpr int NUM_THREADS = NUM_PLANNERS + WARP + NUM_FETCHERS * WARP;

typedef Barrier<1, NUM_PLANNERS + WARP> Planning;                         // planners and courier
typedef Barrier<2, NUM_PLANNERS + NUM_FETCHERS * WARP> EarlyKnown;        // planners arrive, fetchers wait
typedef Barrier<3, NUM_PLANNERS + NUM_FETCHERS * WARP> EarlyPlaced;       // likewise

// Ages are counted in steps, as two digits; the highest stands for free entries, the one below it for all older ones.
constexpr int DIGIT_BITS = 5;
constexpr int DIGIT_MASK = WARP - 1;     // a lane a digit
constexpr u32 FREE_AGE = (1 << 2 * DIGIT_BITS) - 1;
constexpr u32 NOT_MOVABLE = 0xffff;      // instead of an age: used in this step, or not below capacity - 1
constexpr int ENTRIES_PER_READ = 8;      // ages that a thread reads from shared memory in one go
constexpr int ENTRIES_PER_ROUND = ENTRIES_PER_READ * NUM_PLANNERS;

// Copies are put in the order of their positions, roughly, so that addresses that are near each other are asked for at
// about the same time: the GPU and the host can translate only so many at once.
constexpr int NUM_BUCKETS = 128;

struct PlanShared {
    u32 is_used[MAX_CAPACITY / 32];      // a bit a hot_index: holds a position that this slice selected
    int digits[2][WARP];                 // entries by high digit, and by low digit among those of one high digit
    int buckets[NUM_BUCKETS];
    u32 warp_sums[NUM_PLANNER_WARPS];
    i64 early_host_slots[MAX_EARLY];
    int early_device_slots[MAX_EARLY];  // ABSENT: has no place, or another block fetches it
    int num_claimed, num_misses, num_late, num_early, num_left, num_evictions, flags;
    int request_misses, first_rank;
    int plan_start;
    int unit;                            // ABSENT: nothing to plan
};

// Of the size that the launch gives.
struct PlanDynamic {
    int* hot_slots;                      // [max_capacity, rounded up to ENTRIES_PER_ROUND], if they are kept here
    u16* ages;                           // [max_capacity, rounded up likewise], before this step
    u16* entries;                        // [MAX_SLICE] hot_index that each miss takes
};

// A hisparse request while its blocks work on it.
struct HotRow {
    int row, req, seq_len, capacity, now;
    bool fits;                           // every position has its own entry
    int newest_entry;
    int* position_to_hot;                // [max_context], the row's part of each table
    int* hot_to_position;                // [max_capacity]
    int* stamps;                         // [max_capacity]
    const int* hot_slots;                // [max_capacity]; in shared memory if they are kept there
    const i64* host_slots;               // [max_context]
};

// The positions of one thread: slice[k * NUM_PLANNERS + tid].
struct Selection {
    int position[POSITIONS_PER_THREAD];
    int hot[POSITIONS_PER_THREAD];       // hot_index, ABSENT for a miss
    int miss[POSITIONS_PER_THREAD];      // number of the miss that this thread claimed and has a host slot, or ABSENT
    int early[POSITIONS_PER_THREAD];     // number among the early copies, or ABSENT
    i64 src_host_slot[POSITIONS_PER_THREAD];
    u32 is_claimed;                      // a bit a k: this thread was the first to ask for the missing position
};

// Which entries hold what this slice selects; `mine` holds valid positions and what position_to_hot says of them.
// is_used must be clear. Returns whether a position is missing; planners and courier call it.
__device__ __forceinline__ bool look_up(
    PlanShared& s, const HotRow& r, Selection& mine, bool reads_ahead, int max_early) {
    bool is_missing = false;
#pragma unroll
    for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
        if (mine.hot[k] == r.newest_entry) mine.hot[k] = ABSENT;  // no longer
        if (mine.position[k] == r.seq_len - 1) mine.hot[k] = r.newest_entry;
        if (mine.hot[k] >= 0) {
            atomicOr(&s.is_used[mine.hot[k] / 32], 1u << (mine.hot[k] % 32));
        } else if (mine.position[k] != ABSENT) {
            is_missing = true;
            if (!reads_ahead || mine.src_host_slot[k] < 0) continue;
            const int number = atomicAdd(&s.num_early, 1);
            if (number >= max_early) continue;
            s.early_host_slots[number] = mine.src_host_slot[k];
            s.early_device_slots[number] = ABSENT;
            mine.early[k] = number;
        }
    }
    return Planning::wait_or(is_missing);
}

// By the courier's warp: tell the other blocks of the request which entries are in use, if there are any. Returns how
// many entries none had told of before.
__device__ __forceinline__ int share_used(const PlanShared& s, const HotRow& r, u32* is_used, int lane) {
    int num_new = 0;
    const int num_words = (r.capacity + 31) / 32;
#pragma unroll 1
    for (int first = 0; first < num_words; first += 4 * WARP) {
        u32 bits[4], before[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int i = first + k * WARP + lane;
            bits[k] = i < num_words ? s.is_used[i] : 0;
            before[k] = bits[k] && is_used ? atomicOr(is_used + i, bits[k]) : 0;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) num_new += __popc(bits[k] & ~before[k]);
    }
    return __reduce_add_sync(~0u, num_new);
}

// The newest position takes its fixed entry from whoever is there. One thread of the request calls it.
__device__ __forceinline__ void place_newest(PlanShared& s, const HotRow& r) {
    const int newest = r.seq_len - 1;
    const int occupant = __ldcg(r.hot_to_position + r.newest_entry);
    if (occupant != newest) {
        if (occupant != ABSENT) {
            // Somebody may have claimed it as a miss, now or already.
            atomicCAS(r.position_to_hot + occupant, r.newest_entry, ABSENT);
            atomicAdd(&s.num_evictions, 1);
        }
        r.position_to_hot[newest] = r.newest_entry;
        r.hot_to_position[r.newest_entry] = newest;
    }
    r.stamps[r.newest_entry] = r.now;
}

// Number the misses that this block is the first to ask for and that have a host slot: [0, num_misses). Every planner
// calls it; they must meet before it uses the result.
__device__ __forceinline__ void claim_misses(
    PlanShared& s, const HotRow& r, Selection& mine, bool reads_ahead, int max_early, int lane) {
#pragma unroll
    for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
        const int position = mine.position[k];
        if (position == ABSENT || mine.hot[k] >= 0) continue;
        // Whoever finds another value than CLAIMED is the first of the duplicates.
        if (atomicExch(r.position_to_hot + position, CLAIMED) != CLAIMED) mine.is_claimed |= 1u << k;
        if (!reads_ahead) mine.src_host_slot[k] = __ldg(r.host_slots + position);
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
            atomicAdd(&s.num_claimed, num_claimed);
            first = atomicAdd(&s.num_misses, num_placeable);
        }
        first = __shfl_sync(~0u, first, 0);
        int num_late = 0;
#pragma unroll
        for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
            if (mine.miss[k] == 0) {
                mine.miss[k] = first + __popc(placeable[k] & ((1u << lane) - 1));
                if (!reads_ahead && mine.miss[k] < max_early) {
                    mine.early[k] = mine.miss[k];
                    s.early_host_slots[mine.miss[k]] = mine.src_host_slot[k];
                    s.early_device_slots[mine.miss[k]] = ABSENT;
                }
            }
            num_late += __popc(__ballot_sync(~0u, mine.miss[k] != ABSENT && mine.early[k] == ABSENT));
            first += __popc(placeable[k]);
        }
        if (lane == 0 && num_late) atomicAdd(&s.num_late, num_late);
    }
    if (lacks_host_slot) atomicOr(&s.flags, NO_HOST_SLOT);
}

__device__ __forceinline__ u32 age_of(int stamp, int now) {
    return stamp < 0 ? FREE_AGE : min(static_cast<u32>(now - stamp), FREE_AGE - 1);
}

// Read the row's stamps. They must have been read when other blocks learn of our misses: those then change them.
__device__ __forceinline__ void read_ages(
    PlanShared& s, const PlanDynamic& d, const HotRow& r, int max_capacity, int tid) {
    if (max_capacity % 4 == 0) {
#pragma unroll 2
        for (int i = 4 * tid; i < r.capacity; i += 4 * NUM_PLANNERS) {
            const int4 stamp = __ldcg(reinterpret_cast<const int4*>(r.stamps + i));
            *reinterpret_cast<uint2*>(d.ages + i) =
                make_uint2(age_of(stamp.x, r.now) | age_of(stamp.y, r.now) << 16,
                           age_of(stamp.z, r.now) | age_of(stamp.w, r.now) << 16);
        }
    } else {
#pragma unroll 1
        for (int i = tid; i < r.capacity; i += NUM_PLANNERS) d.ages[i] = age_of(__ldcg(r.stamps + i), r.now);
    }
    if (tid < 2 * WARP) s.digits[tid / WARP][tid % WARP] = 0;
}

// Where the running sum over digits, from the highest down, reaches num_wanted. Every warp finds out for itself.
struct Reached {
    u32 digit;
    int before, total;                   // the sums above that digit, and of all
};
__device__ __forceinline__ Reached reach(const int (&num_of_digit)[WARP], int num_wanted, int lane) {
    const int num = num_of_digit[WARP - 1 - lane];
    int up_to = num;
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const int other = __shfl_up_sync(~0u, up_to, offset);
        if (lane >= offset) up_to += other;
    }
    const int total = __shfl_sync(~0u, up_to, WARP - 1);
    const u32 has_reached = __ballot_sync(~0u, up_to >= min(num_wanted, total));
    const int first = __ffs(has_reached) - 1;
    return {static_cast<u32>(WARP - 1 - first), __shfl_sync(~0u, up_to - num, first), total};
}

// Eight ages, taken one after the other.
struct Ages {
    u64 low, high;
    __device__ __forceinline__ explicit Ages(const u16* ages) {
        const ulonglong2 both = *reinterpret_cast<const ulonglong2*>(ages);
        low = both.x;
        high = both.y;
    }
    __device__ __forceinline__ u32 next() {
        const u32 age = low & 0xffff;
        low = low >> 16 | high << 48;
        high >>= 16;
        return age;
    }
};

// Order the entries below capacity - 1 that this step does not use: free ones, then by age, then by hot_index. Of the
// first num_wanted of them (or all) this block takes those from number first_rank on, num_own at most, in the order
// that suits: the set is what all blocks of the request agree on. Returns how many it got. Planners and courier
// call it. `is_used`: of the whole request, in global memory if it is split. A radix select, two digits deep. Loops
// are kept short, here as elsewhere: fetching instructions that are needed once costs more than running them.
__device__ __forceinline__ int choose_victims(
    PlanShared& s, const PlanDynamic& d, const HotRow& r, const u32* is_used, int num_wanted, int first_rank,
    int num_own, int tid, int lane) {
    const int num_movable = r.capacity - 1;
    const int per_thread = (num_movable + ENTRIES_PER_ROUND - 1) / ENTRIES_PER_ROUND * ENTRIES_PER_READ;
    const bool is_planner = tid < NUM_PLANNERS;
    const int begin = is_planner ? tid * per_thread : 0, end = is_planner ? begin + per_thread : 0;

#pragma unroll 1
    for (int first = begin; first < end; first += ENTRIES_PER_READ) {
        u32 out = ~0u;
        if (first < num_movable) {
            out = (is_used ? __ldcg(is_used + first / 32) : s.is_used[first / 32]) >> (first % 32);
            if (num_movable - first < ENTRIES_PER_READ) out |= ~0u << (num_movable - first);
        }
        u32* pairs = reinterpret_cast<u32*>(d.ages + first);
#pragma unroll
        for (int k = 0; k < ENTRIES_PER_READ / 2; ++k)
            pairs[k] |= (out >> (2 * k) & 1) * 0xffffu | (out >> (2 * k + 1) & 1) * 0xffff0000u;
    }
    u32 threshold = 0;                   // the age of which some go, and all that are older
    int num_older = 0;
#pragma unroll 1
    for (int digit = 1; digit >= 0; --digit) {
        // Lane i counts the warp's entries whose digit is i, among those that start like the threshold.
        const int shift = digit * DIGIT_BITS;
        int num = 0;
#pragma unroll 1
        for (int first = begin; first < end; first += ENTRIES_PER_READ) {
            Ages ages(d.ages + first);
#pragma unroll 1
            for (int k = 0; k < ENTRIES_PER_READ; ++k) {
                const u32 age = ages.next();
                u32 same = __ballot_sync(~0u, age >> (shift + DIGIT_BITS) == threshold);
#pragma unroll
                for (int bit = 0; bit < DIGIT_BITS; ++bit) {
                    const u32 is_set = __ballot_sync(~0u, age >> (shift + bit) & 1);
                    same &= lane >> bit & 1 ? is_set : ~is_set;
                }
                num += __popc(same);
            }
        }
        if (num) atomicAdd(&s.digits[digit][lane], num);
        Planning::wait();
        const Reached reached = reach(s.digits[digit], num_wanted - num_older, lane);
        if (digit == 1) num_wanted = min(num_wanted, reached.total);
        threshold = threshold << DIGIT_BITS | reached.digit;
        num_older += reached.before;
    }

    // Number the entries that go by hot_index: older ones in the high half of each sum, those of the threshold's age in
    // the low half.
    u32 mine = 0;
#pragma unroll 1
    for (int first = begin; first < end; first += ENTRIES_PER_READ) {
        Ages ages(d.ages + first);
#pragma unroll 1
        for (int k = 0; k < ENTRIES_PER_READ; ++k) {
            const u32 age = ages.next();
            if (age != NOT_MOVABLE) mine += age > threshold ? 1u << 16 : age == threshold;
        }
    }
    u32 index = mine;
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const u32 other = __shfl_up_sync(~0u, index, offset);
        if (lane >= offset) index += other;
    }
    if (lane == WARP - 1 && is_planner) s.warp_sums[tid / WARP] = index;
    Planning::wait();
    index += __reduce_add_sync(~0u, lane < tid / WARP && is_planner ? s.warp_sums[lane] : 0) - mine;
    if (mine != 0) {
#pragma unroll 1
        for (int first = begin; first < end; first += ENTRIES_PER_READ) {
            Ages ages(d.ages + first);
#pragma unroll 1
            for (int k = 0; k < ENTRIES_PER_READ; ++k) {
                const u32 age = ages.next();
                if (age == NOT_MOVABLE || age < threshold) continue;
                const bool is_older = age > threshold;
                const int number = is_older ? index >> 16 : num_older + (index & 0xffff);
                if (number < num_wanted && number >= first_rank && number < first_rank + num_own)
                    d.entries[number - first_rank] = first + k;
                index += is_older ? 1u << 16 : 1;
            }
        }
    }
    Planning::wait();
    return max(0, min(num_wanted - first_rank, num_own));
}

// Enter the misses [0, num_served) of this block, whose entries are chosen, in the tables.
__device__ __forceinline__ void take_entries(
    PlanShared& s, const PlanDynamic& d, const HotRow& r, int num_served, Selection& mine) {
#pragma unroll
    for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
        const int position = mine.position[k];
        if (!(mine.is_claimed >> k & 1)) continue;
        if (mine.miss[k] == ABSENT || mine.miss[k] >= num_served) {
            mine.miss[k] = ABSENT;
            r.position_to_hot[position] = ABSENT;
            continue;
        }
        const int entry = d.entries[mine.miss[k]];
        const int evicted = __ldcg(r.hot_to_position + entry);
        if (evicted != ABSENT) {
            r.position_to_hot[evicted] = ABSENT;
            atomicAdd(&s.num_evictions, 1);
        }
        r.position_to_hot[position] = entry;
        r.hot_to_position[entry] = position;
        r.stamps[entry] = r.now;
        mine.hot[k] = entry;
    }
}

// What the first to claim a position got, for those that selected it too.
__device__ __forceinline__ void find_duplicates(const HotRow& r, Selection& mine) {
#pragma unroll
    for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
        if (mine.position[k] == ABSENT || mine.hot[k] >= 0 || (mine.is_claimed >> k & 1)) continue;
        Patience patience;
        do {
            patience.look();
            mine.hot[k] = *static_cast<const volatile int*>(r.position_to_hot + mine.position[k]);
        } while (mine.hot[k] == CLAIMED);
    }
}
