// Planning of a swap-in: the blocks of one request, each with a slice of the selection, tell hits from misses and
// choose the entries that the misses take. swap_in.cu calls these functions: look_up; then claim_misses and read_ages
// by planners, beside share_used by the courier; place_new; and for misses choose_victims, take_entries,
// find_duplicate.
//
// A position that is missing in several places of the selection is one miss. The thread that first sets its look-up
// entry to CLAIMED has claimed it and gets an entry for it; the others are duplicates, and read that entry afterwards.
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

// The roles of a block's warps, in order: planners work on positions, the courier communicates with other blocks, and
// fetchers load items from the host before the items' destinations are known.
constexpr int COURIER = NUM_PLANNERS;    // first thread of the courier's warp
constexpr int FIRST_FETCHER = NUM_PLANNER_WARPS + 1;
constexpr int NUM_FETCHERS = 3;
constexpr int ITEMS_PER_FETCHER = 3;
constexpr int MAX_EARLY = NUM_FETCHERS * ITEMS_PER_FETCHER;
constexpr int NUM_THREADS = NUM_PLANNERS + WARP + NUM_FETCHERS * WARP;

typedef Barrier<1, NUM_PLANNERS + WARP> Planning;                      // planners and courier wait
typedef Barrier<2, NUM_PLANNERS + NUM_FETCHERS * WARP> EarlyKnown;     // planners arrive, fetchers wait
typedef Barrier<3, NUM_PLANNERS + NUM_FETCHERS * WARP> EarlyPlaced;    // planners arrive, fetchers wait
typedef Barrier<4, NUM_PLANNERS + NUM_FETCHERS * WARP> EarlyDone;      // fetchers arrive, planners wait

// Messages from planners to fetchers. They are written and read by atomics, because race checkers understand these, but
// not a barrier at which one side only arrives.
struct Mailbox {
    int unit;                            // ABSENT: nothing to plan
    int num_early;                       // early items; only the first max_early of them are fetched early
    int host_slots[MAX_EARLY];
    int positions[MAX_EARLY];
    int device_slots[MAX_EARLY];         // ABSENT: the item got no entry, or another block fetches it

    static __device__ __forceinline__ void post(int& to, int value) { atomicExch(&to, value); }
    // A whole warp calls it.
    static __device__ __forceinline__ int read(int& from, int lane) {
        return __shfl_sync(~0u, lane == 0 ? atomicAdd(&from, 0) : 0, 0);
    }
};

// Age classes of entries, one for each lane: 1 to 15 steps since the last use, then two classes for every doubling,
// then all older entries, then free entries. Two classes in an octave are precise enough for LRU among old entries, and
// one pass counts as many classes as a warp has lanes.
constexpr u32 NUM_EXACT = 16;
constexpr u32 FREE = WARP - 1;
constexpr u32 NOT_MOVABLE = 0;           // used in this step, or in the ring: not below capacity - MAX_NEW
constexpr int ENTRIES_PER_READ = 8;      // classes, one byte each, that a thread reads from shared memory at a time
constexpr int ENTRIES_PER_ROUND = ENTRIES_PER_READ * NUM_PLANNERS;

// Copies are roughly sorted by position, so that nearby addresses are requested at about the same time: the GPU and the
// host can translate only a limited number of addresses at once.
constexpr int NUM_BUCKETS = 128;

struct PlanShared {
    u32 is_used[MAX_CAPACITY / 32];      // one bit for each hot_index: it holds a position that this slice selected
    int num_of_class[WARP];              // entries of each class that may be evicted
    int buckets[NUM_BUCKETS];
    u32 warp_sums[NUM_PLANNER_WARPS];
    Mailbox mail;
    // Of this block in the present request:
    int num_misses;                      // claimed misses
    int num_late;                        // of these, how many no fetcher fetches
    int num_left;                        // copies to write to `left`
    int num_evictions, flags;
    int request_misses;                  // misses of all blocks of the request
    int first_rank;                      // of these, how many come before this block's
    int plan_start;                      // place of this block's first copy in the recorded plan
    int unit;                            // ABSENT: nothing to plan
};

// Dynamic shared memory, whose size the launch sets.
struct PlanDynamic {
    int* hot_pages;                      // [pages of max_capacity, rounded up to 4], of the present request
    u8* ages;                            // [max_capacity, rounded up to ENTRIES_PER_ROUND], classes before this step
    u16* entries;                        // [NUM_PLANNERS * POSITIONS_PER_THREAD] hot_index that each miss takes
};

// A hisparse request while its blocks work on it.
struct HotRow {
    int row, req, capacity;
    int now;                             // this step's number, the stamp of the entries that it uses
    int first_new, seq_len;              // new positions are [first_new, seq_len), which have pages
    int first_entry;                     // entry of first_new; the other new positions' entries follow it, in the ring
    bool fits;                           // every position has its own entry
    // For a thread of the first slice and its new position first_new + tid, if there is one: the position's lookup
    // slot, and the lookup slot at its entry before this step.
    int new_lookup_slot, former;
    int* lookup_to_hot;                  // by lookup slot, of all rows
    int* hot_to_lookup;                  // by device slot, of all rows; so are the stamps
    int* stamps;
    const int* host_pages;               // [max_pages]
    const int* hot_pages;                // [pages of max_capacity], in shared memory
};

// The device slot of a hot_index, where the model reads its item and the tables have its words.
__device__ __forceinline__ int slot_of_entry(const HotRow& r, int entry) { return slot_of_entry(r.hot_pages, entry); }

// The host slot of a missing position.
__device__ __forceinline__ int host_slot_of(const HotRow& r, int position) {
    return slot_in_page(__ldg(r.host_pages + page_of(position)), position);
}

// The positions of one thread: slice[k * NUM_PLANNERS + tid].
struct Selection {
    int position[POSITIONS_PER_THREAD];
    int hot[POSITIONS_PER_THREAD];       // hot_index, ABSENT for a miss
    int lookup_slot[POSITIONS_PER_THREAD];
    int miss[POSITIONS_PER_THREAD];      // number of the miss that this thread claimed, or ABSENT
    int early[POSITIONS_PER_THREAD];     // number among the early copies, or ABSENT
    u32 is_claimed;                      // one bit for each k: this thread was the first to claim the missing position
};

__device__ __forceinline__ int num_new_of(const HotRow& r) { return MAX_NEW == 1 ? 1 : r.seq_len - r.first_new; }

__device__ __forceinline__ int entry_of_new(const HotRow& r, int number) {
    const int entry = r.first_entry + number;
    return MAX_NEW == 1 || entry < r.capacity ? entry : entry - MAX_NEW;
}

// Returns whether a new position takes this entry, which is ABSENT or belongs to a selected position that is not new.
__device__ __forceinline__ bool is_taken_by_new(const HotRow& r, int entry) {
    if (MAX_NEW == 1) return entry == r.first_entry;
    if (entry < r.capacity - MAX_NEW) return false;
    const int number = entry - r.first_entry;
    return (number < 0 ? number + MAX_NEW : number) < num_new_of(r);
}

// Marks the entries that hold selected positions of this slice. `mine` has valid positions and their values of
// lookup_to_hot; is_used must be clear. Returns whether any position is missing. Planners and courier call it.
__device__ __forceinline__ bool look_up(
    PlanShared& s, const HotRow& r, Selection& mine, bool reads_ahead, int max_early) {
    bool is_missing = false;
#pragma unroll
    for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
        if (is_taken_by_new(r, mine.hot[k])) mine.hot[k] = ABSENT;  // evicted in this step
        if (mine.position[k] >= r.first_new) mine.hot[k] = entry_of_new(r, mine.position[k] - r.first_new);
        if (mine.hot[k] >= 0) {
            atomicOr(&s.is_used[mine.hot[k] / 32], 1u << (mine.hot[k] % 32));
        } else if (mine.position[k] != ABSENT) {
            is_missing = true;
            if (!reads_ahead) continue;
            const int number = atomicAdd(&s.mail.num_early, 1);
            if (number >= max_early) continue;
            Mailbox::post(s.mail.host_slots[number], host_slot_of(r, mine.position[k]));
            Mailbox::post(s.mail.positions[number], mine.position[k]);
            Mailbox::post(s.mail.device_slots[number], ABSENT);
            mine.early[k] = number;
        }
    }
    return Planning::wait_or(is_missing);
}

// Marks this block's used entries in `is_used` of the whole request, if that is not null. Returns how many of them no
// other block had marked before. The courier's warp calls it.
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

// Gives a new position its fixed entry and evicts the former occupant. One thread of the request calls it for each new
// position.
__device__ __forceinline__ void place_new(PlanShared& s, const HotRow& r, int number) {
    const int entry = entry_of_new(r, number), slot = slot_of_entry(r, entry), occupant = r.former;
    if (occupant != r.new_lookup_slot) {
        if (occupant != ABSENT) {
            // Another thread may have claimed it as a miss already, or may do so now.
            atomicCAS(r.lookup_to_hot + occupant, entry, ABSENT);
            atomicAdd(&s.num_evictions, 1);
        }
        r.lookup_to_hot[r.new_lookup_slot] = entry;
        r.hot_to_lookup[slot] = r.new_lookup_slot;
    }
    r.stamps[slot] = r.now;
}

// Claims the misses that no other block has claimed, and numbers them [0, num_misses). Every planner calls it; a
// barrier must follow before the result is used.
__device__ __forceinline__ void claim_misses(
    PlanShared& s, const HotRow& r, Selection& mine, bool reads_ahead, int max_early, int lane) {
#pragma unroll
    for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
        if (mine.position[k] == ABSENT || mine.hot[k] >= 0) continue;
        // A thread that finds another value than CLAIMED is the first of the duplicates.
        if (atomicExch(r.lookup_to_hot + mine.lookup_slot[k], CLAIMED) != CLAIMED) mine.is_claimed |= 1u << k;
    }
    u32 claimed[POSITIONS_PER_THREAD];       // one bit for each lane
    int num_claimed = 0;
#pragma unroll
    for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
        claimed[k] = __ballot_sync(~0u, mine.is_claimed >> k & 1);
        num_claimed += __popc(claimed[k]);
    }
    if (num_claimed == 0) return;
    int first = 0;
    if (lane == 0) first = atomicAdd(&s.num_misses, num_claimed);
    first = __shfl_sync(~0u, first, 0);
    int num_late = 0;
#pragma unroll
    for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
        if (mine.is_claimed >> k & 1) {
            mine.miss[k] = first + __popc(claimed[k] & ((1u << lane) - 1));
            if (!reads_ahead && mine.miss[k] < max_early) {
                mine.early[k] = mine.miss[k];
                Mailbox::post(s.mail.host_slots[mine.miss[k]], host_slot_of(r, mine.position[k]));
                Mailbox::post(s.mail.positions[mine.miss[k]], mine.position[k]);
                Mailbox::post(s.mail.device_slots[mine.miss[k]], ABSENT);
            }
        }
        num_late += __popc(__ballot_sync(~0u, mine.miss[k] != ABSENT && mine.early[k] == ABSENT));
        first += __popc(claimed[k]);
    }
    if (lane == 0 && num_late) atomicAdd(&s.num_late, num_late);
}

__device__ __forceinline__ u32 age_class(int stamp, int now) {
    if (stamp < 0) return FREE;
    const u32 age = now - stamp;
    if (age < NUM_EXACT) return age;
    const u32 octave = 31 - __clz(age);
    return min(NUM_EXACT + 2 * (octave - 4) + (age >> (octave - 1) & 1), FREE - 1);
}

// Reads the row's stamps. This must be done before other blocks learn of this block's misses: they change stamps then.
__device__ __forceinline__ void read_ages(PlanShared& s, const PlanDynamic& d, const HotRow& r, int tid) {
    if (PAGE_SIZE % 4 == 0) {            // four entries from a multiple of 4 on are in one page
#pragma unroll 2
        for (int i = 4 * tid; i < r.capacity; i += 4 * NUM_PLANNERS) {
            const int4 stamp = __ldcg(reinterpret_cast<const int4*>(r.stamps + slot_of_entry(r, i)));
            *reinterpret_cast<u32*>(d.ages + i) =
                age_class(stamp.x, r.now) | age_class(stamp.y, r.now) << 8 | age_class(stamp.z, r.now) << 16 |
                age_class(stamp.w, r.now) << 24;
        }
    } else {
#pragma unroll 1
        for (int i = tid; i < r.capacity; i += NUM_PLANNERS)
            d.ages[i] = age_class(__ldcg(r.stamps + slot_of_entry(r, i)), r.now);
    }
    if (tid < WARP) s.num_of_class[tid] = 0;
}

// Returns a word with all bits of byte k set where bit k is set, k < 4.
__device__ __forceinline__ u32 bytes_of_bits(u32 bits) { return (bits * 0x00204081u & 0x01010101u) * 0xffu; }

// Orders the entries below the ring that this step does not use by age class, the oldest first, then by hot_index. Of
// the first num_wanted of them (or all), this block takes up to num_own, from number first_rank on, in any order: all
// blocks of the request agree on the set of entries. Returns how many it got. Planners and courier call it. `is_used`:
// the used entries of the whole request, in global memory if it is split, else null.
__device__ __forceinline__ int choose_victims(
    PlanShared& s, const PlanDynamic& d, const HotRow& r, const u32* is_used, int num_wanted, int first_rank,
    int num_own, int tid, int lane) {
    const int num_movable = r.capacity - MAX_NEW;
    const int per_thread = (num_movable + ENTRIES_PER_ROUND - 1) / ENTRIES_PER_ROUND * ENTRIES_PER_READ;
    const bool is_planner = tid < NUM_PLANNERS;
    const int begin = is_planner ? tid * per_thread : 0, end = is_planner ? begin + per_thread : 0;

    int num = 0;                         // number of the warp's entries whose class is the lane
#pragma unroll 1
    for (int first = begin; first < end; first += ENTRIES_PER_READ) {
        u32 out = ~0u;                   // bits of entries that this step uses or that are in the ring
        if (first < num_movable) {
            out = (is_used ? __ldcg(is_used + first / 32) : s.is_used[first / 32]) >> (first % 32);
            if (num_movable - first < ENTRIES_PER_READ) out |= ~0u << (num_movable - first);
        }
        uint2 ages = *reinterpret_cast<const uint2*>(d.ages + first);
        ages.x &= ~bytes_of_bits(out & 15);
        ages.y &= ~bytes_of_bits(out >> 4 & 15);
        *reinterpret_cast<uint2*>(d.ages + first) = ages;
#pragma unroll
        for (int k = 0; k < ENTRIES_PER_READ; ++k) {
            const u32 age = (k < 4 ? ages.x : ages.y) >> (k % 4 * 8);
            u32 same = ~0u;              // lanes whose entry has the class that is this lane's number
#pragma unroll
            for (int bit = 0; bit < 5; ++bit) {
                const u32 is_set = __ballot_sync(~0u, age >> bit & 1);
                same &= lane >> bit & 1 ? is_set : ~is_set;
            }
            num += __popc(same);
        }
    }
    if (num && lane != NOT_MOVABLE) atomicAdd(&s.num_of_class[lane], num);
    Planning::wait();

    // Running sum from the oldest class on: the class in which it reaches num_wanted is taken in part. Every warp
    // computes it for itself.
    const int of_class = s.num_of_class[WARP - 1 - lane];
    const int up_to = sum_up_to_lane(of_class, lane);
    num_wanted = min(num_wanted, __shfl_sync(~0u, up_to, WARP - 1));
    const int reached = __ffs(__ballot_sync(~0u, up_to >= num_wanted)) - 1;
    const u32 threshold = (WARP - 1 - reached) * 0x01010101u;
    const int num_older = __shfl_sync(~0u, up_to - of_class, reached);

    // Number the evicted entries by hot_index: entries of older classes in the high half of each sum, those of the
    // threshold's class in the low half.
    u32 mine = 0;
#pragma unroll 1
    for (int first = begin; first < end; first += ENTRIES_PER_READ) {
        const uint2 ages = *reinterpret_cast<const uint2*>(d.ages + first);
        mine += (__popc(__vcmpgtu4(ages.x, threshold)) + __popc(__vcmpgtu4(ages.y, threshold))) / 8 << 16;
        mine += (__popc(__vcmpeq4(ages.x, threshold)) + __popc(__vcmpeq4(ages.y, threshold))) / 8;
    }
    u32 index = sum_up_to_lane(mine, lane);
    if (lane == WARP - 1 && is_planner) s.warp_sums[tid / WARP] = index;
    Planning::wait();
    index += __reduce_add_sync(~0u, lane < tid / WARP && is_planner ? s.warp_sums[lane] : 0) - mine;
#pragma unroll 1
    for (int first = begin; first < end && mine != 0; first += ENTRIES_PER_READ) {
        const uint2 ages = *reinterpret_cast<const uint2*>(d.ages + first);
        const u32 older[2] = {__vcmpgtu4(ages.x, threshold), __vcmpgtu4(ages.y, threshold)};
        const u32 equal[2] = {__vcmpeq4(ages.x, threshold), __vcmpeq4(ages.y, threshold)};
#pragma unroll
        for (int k = 0; k < ENTRIES_PER_READ; ++k) {
            const int half = k / 4, shift = k % 4 * 8;
            const bool is_older = older[half] >> shift & 1, is_equal = equal[half] >> shift & 1;
            const int number = is_older ? index >> 16 : num_older + (index & 0xffff);
            const bool goes = is_older || (is_equal && number < num_wanted);
            if (goes && number >= first_rank && number < first_rank + num_own)
                d.entries[number - first_rank] = first + k;
            index += is_older << 16 | is_equal;
        }
    }
    Planning::wait();
    return max(0, min(num_wanted - first_rank, num_own));
}

// Enters the misses [0, num_served) of this block, whose entries are chosen, into the tables.
__device__ __forceinline__ void take_entries(
    PlanShared& s, const PlanDynamic& d, const HotRow& r, int num_served, Selection& mine) {
#pragma unroll
    for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
        if (!(mine.is_claimed >> k & 1)) continue;
        if (mine.miss[k] >= num_served) {
            mine.miss[k] = ABSENT;
            r.lookup_to_hot[mine.lookup_slot[k]] = ABSENT;
            continue;
        }
        const int entry = d.entries[mine.miss[k]], slot = slot_of_entry(r, entry);
        const int evicted = __ldcg(r.hot_to_lookup + slot);
        if (evicted != ABSENT) {
            r.lookup_to_hot[evicted] = ABSENT;
            atomicAdd(&s.num_evictions, 1);
        }
        r.lookup_to_hot[mine.lookup_slot[k]] = entry;
        r.hot_to_lookup[slot] = mine.lookup_slot[k];
        r.stamps[slot] = r.now;
        mine.hot[k] = entry;
    }
}

// Returns the hot_index, or ABSENT, that the thread which claimed a missing position got for it.
__device__ __forceinline__ int find_duplicate(const HotRow& r, int lookup_slot) {
    const volatile int* hot = r.lookup_to_hot + lookup_slot;
    int entry;
    SpinLimit spins;
    do {
        spins.count();
        entry = *hot;
    } while (entry == CLAIMED);
    return entry;
}
