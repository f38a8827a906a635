// Kernels of swap-in, backup, warm-up and row checks. kernels/cuda.py launches them, and kernels/reference.py is what
// they must agree with.
//
// One launch of swap_in plans and copies. The blocks of a request, for a single request up to the whole GPU, look up a
// slice of its selection each. As soon as a block knows its misses, it requests the first of them from the host. While
// these cross PCIe, the blocks of the request agree on the entries that the misses take. Then the remaining copies are
// spread over all blocks.
//
// A unit is the work of one block: the same slice of a request, then of every `stride`-th request behind it, one
// request a turn. In a turn, the warps of a block have three roles (plan.cuh):
//   planners   look positions up, claim the misses, choose their entries (victims), update the tables, write `out`
//   courier    tells other blocks of the request this block's misses, and all blocks when it has planned everything
//   fetchers   load the first misses, the early items, while planners choose; store them when their slots are known
// Copies that no fetcher makes go to `left`, in global memory. Planners and courier make them at the end: if the launch
// `spreads` copies, once all blocks have arrived, each block an equal share (Schedule); otherwise each block its own.
#include "copy.cuh"
#include "plan.cuh"
#include "sync.cuh"

constexpr int BLOCKS_PER_LANE = MAX_BLOCKS / WARP;  // of which a lane of make_schedule adds up the copies

// This block's share of the remaining copies. All blocks have equal shares: first their own copies, then copies of
// blocks that have more than a share (their surplus), which are numbered in the order of blocks.
struct Schedule {
    u32 next;                            // next copy of this block; its warps take copies one by one
    u32 num_own;                         // this block's own copies, up to a share
    u32 first_taken, num_taken;          // the surplus copies that this block makes
    u32 share;                           // all remaining copies / blocks, rounded up
    u32 surplus_start[MAX_BLOCKS];       // number of each block's first surplus copy
};

// What a thread knows of itself and its block.
struct Block {
    int tid, lane, warp;
    int slice;                           // the slice of the present request on which this block works
    bool is_planner;
    bool has_missed;                     // in any request of this launch
    u32 num_left;                        // copies written to `left`
    bool has_arrived;                    // `arrive` was called
    u32 launch;                          // number of this launch, whose lowest bit chooses the round
};

// Divides the dynamic shared memory; kernels/cuda.py computes its size.
__device__ __forceinline__ PlanDynamic carve(u8* memory, const SwapInParams& p) {
    const int capacity = (p.tables.max_capacity + ENTRIES_PER_ROUND - 1) / ENTRIES_PER_ROUND * ENTRIES_PER_ROUND;
    PlanDynamic d;
    d.hot_pages = reinterpret_cast<int*>(memory);
    d.ages = reinterpret_cast<u8*>(d.hot_pages + (num_pages_of(p.tables.max_capacity) + 3) / 4 * 4);
    d.entries = reinterpret_cast<u16*>(d.ages + capacity);
    return d;
}

// Copies the ids of the row's hot pages to shared memory, as many as the largest capacity has: this row's is not known
// yet.
__device__ __forceinline__ void prefetch_hot_pages(const SwapInParams& p, const PlanDynamic& d, int row, int tid) {
    const int* hot_pages = hot_pages_of(p.tables, row);
#pragma unroll 1
    for (int i = tid; i < num_pages_of(p.tables.max_capacity); i += NUM_PLANNERS + WARP)
        copy_async(d.hot_pages + i, hot_pages + i, sizeof(int));
}

// Updates the state that changes between launches. Called when all blocks have arrived and none reads it any more.
__device__ __forceinline__ void close_launch(const SwapInParams& p, const Round& round, u32 launch) {
    *p.num_launches = launch + 1;
    if (p.plan.src_host_slots != nullptr) *p.plan.num_misses = load_acquire(&round.num_planned);
}

constexpr u64 ONE_BLOCK = 1ull << 32;    // added to round.arrived, whose high half counts blocks

// Announces that this block has finished planning, and how many copies it left. Planners and courier call it, and the
// courier writes. A barrier must lie between writes to `left` and this call.
__device__ __forceinline__ void arrive(const SwapInParams& p, Round& round, Block& b) {
    if (b.tid == COURIER && p.spreads) {
        if (b.num_left > 0) {
            round.num_left[blockIdx.x] = b.num_left;
            add_release(&round.arrived, ONE_BLOCK | b.num_left);
        } else {
            add_relaxed(&round.arrived, ONE_BLOCK);
        }
    }
    b.has_arrived = true;
}

// Announces the same where blocks do not help each other. A fetcher does it, because it is idle. No block waits: the
// last one to arrive closes the launch.
__device__ __forceinline__ void arrive_alone(const SwapInParams& p, Round& round, const Block& b) {
    if (b.tid != FIRST_FETCHER * WARP || p.spreads) return;
    const bool records = p.plan.src_host_slots != nullptr;
    const u64 before = records ? add_acq_rel(&round.arrived, ONE_BLOCK) : add_relaxed(&round.arrived, ONE_BLOCK);
    if (before / ONE_BLOCK == gridDim.x - 1) close_launch(p, round, b.launch);
}

// Announces this block's misses to the other blocks of its request, which is split. Returns how many misses were
// announced before. The last block to announce increments the row's step, which all blocks have read. The courier calls
// it.
__device__ __forceinline__ int tell_misses(const SwapInParams& p, const HotRow& r, RequestWord& word, int num_misses) {
    const u32 before = add_release(&word.value, 1u << 16 | num_misses);
    if (before >> 16 == p.num_slices - 1) p.tables.step[r.row] = r.now;
    return before & 0xffff;
}

__device__ __forceinline__ void count(const Tables& t, int row, int which, int num) {
    if (num) atomicAdd(reinterpret_cast<u64*>(t.counters + static_cast<i64>(row) * 3 + which), static_cast<u64>(num));
}

// The address of the result for this thread's k-th position.
__device__ __forceinline__ int* out_of(const SwapInParams& p, const HotRow& r, int k, const Block& b) {
    return p.out + static_cast<i64>(r.req) * p.num_selected + b.slice * p.slice_len + k * NUM_PLANNERS + b.tid;
}

// Chooses the entries of the misses that this block has claimed, tells the fetchers where their items go, and writes
// the other copies to `left`.
__device__ __forceinline__ void place_misses(
    const SwapInParams& p, Round& round, PlanShared& s, const PlanDynamic& d, const HotRow& r, Selection& mine,
    RequestWord& word, const u32* is_used, bool is_last, Block& b) {
    const int num_misses = s.num_misses;
    if (b.tid == COURIER && p.num_slices > 1) {
        u32 value;
        SpinLimit spins;
        do {                             // until all blocks of the request have told their misses
            spins.count();
            value = load_acquire(&word.value);
        } while (value >> 16 != p.num_slices);
        s.request_misses = value & 0xffff;
    }
#pragma unroll
    for (int k = 0; k < POSITIONS_PER_THREAD; ++k)  // in a row that fits, a position has the entry of its own number
        if (r.fits && mine.miss[k] != ABSENT) d.entries[mine.miss[k]] = mine.position[k];
    Planning::wait();
    int num_served = num_misses;
    if (!r.fits && num_misses > 0) {
        num_served =
            choose_victims(s, d, r, is_used, s.request_misses, s.first_rank, num_misses, b.tid, b.lane);
        if (num_served < num_misses && b.tid == 0) atomicOr(&s.flags, TOO_MANY_MISSES);
    }
    const bool records = p.plan.src_host_slots != nullptr && num_served > 0;
    if (records) {
        if (b.tid == COURIER) s.plan_start = atomicAdd(&round.num_planned, static_cast<u32>(num_served));
        Planning::wait();
    }
    take_entries(s, d, r, num_served, mine);
    // Sort the remaining copies by bucket of position: count, add up, and write. The shift is the smallest one that
    // makes at most NUM_BUCKETS buckets.
    const int bucket_shift = 32 - __clz((r.seq_len - 1) / NUM_BUCKETS);
    int dst_device_slot[POSITIONS_PER_THREAD], in_bucket[POSITIONS_PER_THREAD];
#pragma unroll
    for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
        if (mine.miss[k] == ABSENT) continue;
        const int dst = dst_device_slot[k] = slot_of_entry(r, mine.hot[k]);
        *out_of(p, r, k, b) = dst;
        if (records) {
            p.plan.src_host_slots[s.plan_start + mine.miss[k]] = host_slot_of(r, mine.position[k]);
            p.plan.dst_device_slots[s.plan_start + mine.miss[k]] = dst;
            p.plan.req_rows[s.plan_start + mine.miss[k]] = r.row;
            p.plan.positions[s.plan_start + mine.miss[k]] = mine.position[k];
        }
        if (mine.early[k] != ABSENT) Mailbox::post(s.mail.device_slots[mine.early[k]], dst);
        else in_bucket[k] = atomicAdd(&s.buckets[mine.position[k] >> bucket_shift], 1);
    }
    Planning::wait();
    if (b.is_planner) EarlyPlaced::arrive();
    if (b.warp == 0) {
        int num = 0;
#pragma unroll
        for (int i = 0; i < NUM_BUCKETS / WARP; ++i) num += s.buckets[b.lane * (NUM_BUCKETS / WARP) + i];
        const int up_to = sum_up_to_lane(num, b.lane);
        int start = up_to - num;
#pragma unroll
        for (int i = 0; i < NUM_BUCKETS / WARP; ++i) {
            const int num_of_bucket = s.buckets[b.lane * (NUM_BUCKETS / WARP) + i];
            s.buckets[b.lane * (NUM_BUCKETS / WARP) + i] = start;
            start += num_of_bucket;
        }
        if (b.lane == WARP - 1) s.num_left = up_to;
    }
    Planning::wait();
    Copy* left = p.left + static_cast<i64>(blockIdx.x) * p.left_per_block + b.num_left;
#pragma unroll
    for (int k = 0; k < POSITIONS_PER_THREAD; ++k)
        if (mine.miss[k] != ABSENT && mine.early[k] == ABSENT)
            left[s.buckets[mine.position[k] >> bucket_shift] + in_bucket[k]] =
                {host_slot_of(r, mine.position[k]), dst_device_slot[k], mine.position[k], r.row};
    Planning::wait();
    b.num_left += s.num_left;
    if (is_last && !b.has_arrived) arrive(p, round, b);
#pragma unroll
    for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
        // A duplicate miss takes the entry that its first claimer got, if there was one.
        if (mine.position[k] == ABSENT || mine.hot[k] >= 0) continue;
        const int entry = mine.is_claimed >> k & 1 ? ABSENT : find_duplicate(r, mine.lookup_slot[k]);
        *out_of(p, r, k, b) = entry == ABSENT ? ABSENT : slot_of_entry(r, entry);
    }
}

// Resolves a slice of a hisparse request. Planners and courier call it.
__device__ __forceinline__ void resolve_hisparse(
    const SwapInParams& p, Round& round, PlanShared& s, const PlanDynamic& d, const HotRow& r, Selection& mine,
    int flags, bool is_last, Block& b) {
    const Tables& t = p.tables;
    const bool is_split = p.num_slices > 1, reads_ahead = p.reads_ahead;
    u32* is_used = is_split ? reinterpret_cast<u32*>(&round + 1) + r.req * ((t.max_capacity + 31) / 32) : nullptr;
    RequestWord& word = round.requests[is_split ? r.req : 0];

    if (flags) atomicOr(&s.flags, flags);
    const bool has_misses = look_up(s, r, mine, reads_ahead, p.max_early);
    if (b.is_planner && (reads_ahead || !has_misses)) EarlyKnown::arrive();
    b.has_missed |= has_misses;
    if (!has_misses && is_last) arrive(p, round, b);
    if (!b.is_planner) {
        const int num_hits = share_used(s, r, is_used, b.lane);
        if (b.lane == 0) {
            // Without misses this is the block's last announcement.
            if (is_split && !has_misses) tell_misses(p, r, word, 0);
            count(t, r.row, HITS, num_hits);
        }
    } else if (has_misses) {
        claim_misses(s, r, mine, reads_ahead, p.max_early, b.lane);
        if (!r.fits) read_ages(s, d, r, b.tid);
    }
    if (has_misses) {
        Planning::wait();
        if (b.is_planner && !reads_ahead) {
            if (b.tid == 0) Mailbox::post(s.mail.num_early, s.num_misses);
            EarlyKnown::arrive();
        }
        if (b.tid == COURIER) {
            s.request_misses = s.num_misses;
            s.first_rank = is_split ? tell_misses(p, r, word, s.num_misses) : 0;
        }
        const bool leaves_any = p.spreads && (b.num_left > 0 || s.num_late > 0);
        if (is_last && !leaves_any && p.plan.src_host_slots == nullptr) arrive(p, round, b);
    }

    // Hits. Many stamps are written in the order of entries, few in the order of positions.
    const bool in_order = p.stamps_in_order;
#pragma unroll
    for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
        const int in_slice = k * NUM_PLANNERS + b.tid;
        const bool is_inside =
            b.is_planner && in_slice < p.slice_len && b.slice * p.slice_len + in_slice < p.num_selected;
        if (mine.hot[k] >= 0) {
            const int slot = slot_of_entry(r, mine.hot[k]);
            *out_of(p, r, k, b) = slot;
            if (!in_order) r.stamps[slot] = r.now;
        } else if (is_inside && mine.position[k] == ABSENT) {
            *out_of(p, r, k, b) = ABSENT;
        }
    }
    if (in_order && b.is_planner)
#pragma unroll 4
        for (int i = b.tid; i < r.capacity; i += NUM_PLANNERS)
            if (s.is_used[i / 32] >> (i % 32) & 1) r.stamps[slot_of_entry(r, i)] = r.now;
    if (b.slice == 0 && b.tid < num_new_of(r)) place_new(s, r, b.tid);
    if (has_misses) place_misses(p, round, s, d, r, mine, word, is_used, is_last, b);
    else if (b.is_planner) EarlyPlaced::arrive();
    if (MAX_NEW > 1) __syncwarp();       // the first warp's threads have counted evictions
    if (b.tid == 0) {
        if (!is_split) t.step[r.row] = r.now;
        count(t, r.row, MISSES, s.num_misses);
        count(t, r.row, EVICTIONS, s.num_evictions);
        if (s.flags) atomicOr(t.error_flags + r.row, s.flags);
    }
}

// Computes this block's share of the remaining copies. The courier's warp calls it when all blocks have arrived.
// Blocks with fewer copies than a share have a deficit. In the order of blocks, the first deficits take the first
// surplus copies; every block computes the running sums of both for itself.
__device__ __forceinline__ void make_schedule(Schedule& schedule, const Round& round, u32 total, int lane) {
    const u32 num_blocks = gridDim.x;
    const u32 share = (total + num_blocks - 1) / num_blocks;
    u32 num_left[BLOCKS_PER_LANE], surplus = 0, deficit = 0;
#pragma unroll
    for (int i = 0; i < BLOCKS_PER_LANE; ++i) {
        const u32 block = lane * BLOCKS_PER_LANE + i;
        num_left[i] = block < num_blocks ? __ldcg(round.num_left + block) : share;
        surplus += max(num_left[i], share) - share;
        deficit += share - min(num_left[i], share);
    }
    u32 surplus_up_to = surplus, deficit_up_to = deficit;
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const u32 s = __shfl_up_sync(~0u, surplus_up_to, offset), d = __shfl_up_sync(~0u, deficit_up_to, offset);
        if (lane >= offset) surplus_up_to += s, deficit_up_to += d;
    }
    const u32 all_surplus = __shfl_sync(~0u, surplus_up_to, WARP - 1);
    u32 surplus_start = surplus_up_to - surplus, deficit_start = deficit_up_to - deficit;
#pragma unroll
    for (int i = 0; i < BLOCKS_PER_LANE; ++i) {
        const u32 block = lane * BLOCKS_PER_LANE + i;
        schedule.surplus_start[block] = surplus_start;
        if (block == blockIdx.x) {
            const u32 wanted = share - min(num_left[i], share);
            schedule.num_own = min(num_left[i], share);
            schedule.first_taken = deficit_start;
            schedule.num_taken = min(deficit_start + wanted, all_surplus) - min(deficit_start, all_surplus);
            schedule.share = share;
        }
        surplus_start += max(num_left[i], share) - share;
        deficit_start += share - min(num_left[i], share);
    }
}

// Copies this block's share of the remaining copies, one warp for each item.
__device__ __forceinline__ void copy_left(const SwapInParams& p, Schedule& schedule, int lane) {
    const u32 num = schedule.num_own + schedule.num_taken;
#pragma unroll 1
    while (true) {
        u32 i = 0;
        if (lane == 0) i = atomicAdd(&schedule.next, 1u);
        i = __shfl_sync(~0u, i, 0);
        if (i >= num) return;
        u32 block = blockIdx.x;
        if (i >= schedule.num_own) {
            const u32 number = schedule.first_taken + i - schedule.num_own;
            // Find the last block that starts at or before `number`.
            block = 0;
#pragma unroll 1
            for (u32 stride = 128; stride > 0; stride /= 2)
                if (block + stride < MAX_BLOCKS && schedule.surplus_start[block + stride] <= number) block += stride;
            i = schedule.share + number - schedule.surplus_start[block];
        }
        const int4 copy =                // a Copy, read at once
            __ldcg(reinterpret_cast<const int4*>(p.left + static_cast<i64>(block) * p.left_per_block + i));
        fetch_item(p.pool, p.checks, p.layer, {copy.x, copy.y, copy.z, copy.w}, index_pages_of(p.checks, copy.w), lane);
    }
}

__device__ __forceinline__ int multiprocessor() {
    int id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    return id;
}

// Returns the unit that this block probably gets, before other blocks are consulted. In large batches a multiprocessor
// should have the same requests in every launch: it, and its part of the GPU, can cache the address translations for
// these requests' host rows, but not for those of all requests.
__device__ __forceinline__ int presumed_unit(const SwapInParams& p) {
    if (!p.keeps_place) return blockIdx.x;
    const int unit = multiprocessor();
    return unit < p.num_units ? unit : ABSENT;
}

// Returns the first request of a unit: unit / num_slices, without a slow division; unit < MAX_BLOCKS.
__device__ __forceinline__ u32 request_of(const SwapInParams& p, int unit) {
    return static_cast<u32>(unit) * p.slice_reciprocal >> 16;
}

// Takes a unit for this block. If its presumed unit is taken, or it has none, it waits until all blocks are present and
// takes a free unit, if there is any. The courier's warp calls it.
__device__ __forceinline__ int take_unit(const SwapInParams& p, Round& round, int unit, int lane) {
    if (!p.keeps_place) return unit;
    bool is_mine = false;
    if (lane == 0) {
        is_mine = unit != ABSENT && atomicExch(&round.is_taken[unit], 1u) == 0;
        add_release(&round.num_present, 1u);
        SpinLimit spins;
        while (!is_mine && load_acquire(&round.num_present) != gridDim.x) spins.count();
    }
    if (__shfl_sync(~0u, is_mine, 0)) return unit;
#pragma unroll 1
    for (int first = 0; first < p.num_units; first += WARP) {
        const int unit_of_lane = first + lane;
        u32 free = __ballot_sync(~0u, unit_of_lane < p.num_units && __ldcg(&round.is_taken[unit_of_lane]) == 0);
        while (free != 0) {
            const int candidate = __ffs(free) - 1;
            const bool got_it = lane == candidate && atomicExch(&round.is_taken[unit_of_lane], 1u) == 0;
            if (__any_sync(~0u, got_it)) return first + candidate;
            free &= free - 1;
        }
    }
    return ABSENT;
}

// Plans the requests of this block: the request of its unit, then every stride-th one. Planners and courier call it.
//
// A turn loads the selection and the request, looks its positions up in the tables (all loads of one kind before the
// next kind, which depends on them), and hands a hisparse request to resolve_hisparse. Until the barrier, a block works
// on its presumed unit; if another block has that, it begins again with the unit that it got.
__device__ __forceinline__ void plan_requests(
    const SwapInParams& p, Round& round, PlanShared& s, const PlanDynamic& d, Block& b) {
    const u32 num_reqs = p.requests.num_reqs;
    int unit = presumed_unit(p);
    if (!b.is_planner) {
        const int taken = take_unit(p, round, unit, b.lane);
        if (b.lane == 0) {
            s.unit = taken;
            Mailbox::post(s.mail.unit, taken);
        }
    }
    if (unit == ABSENT) {
        Planning::wait();
        unit = s.unit;
    }
    u32 turn = 0;
#pragma unroll 1
    while (true) {
        const u32 first_req = request_of(p, unit), req = first_req + turn * p.stride;
        if (unit == ABSENT || req >= num_reqs) break;
        const bool is_last = req + p.stride >= num_reqs;
        if (turn > 0) {                  // wait until the previous request no longer uses shared memory
            if (b.is_planner) EarlyDone::wait();
            Planning::wait();
        }
        b.slice = unit - first_req * p.num_slices;
        Selection mine;
#pragma unroll
        for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
            const int in_slice = k * NUM_PLANNERS + b.tid, i = b.slice * p.slice_len + in_slice;
            mine.position[k] = b.is_planner && in_slice < p.slice_len && i < p.num_selected
                ? p.selected[static_cast<i64>(req) * p.num_selected + i] : ABSENT;
            mine.miss[k] = mine.early[k] = ABSENT;
        }
        mine.is_claimed = 0;
        const Request request = load_request(p.requests, p.tables, req);
        int row = request.row;
        HotRow r;
        r.row = row;
        r.req = req;
        r.seq_len = MAX_NEW == 1 ? request.seq_len : min(request.seq_len, p.tables.max_context);
        r.first_new = request.seq_len - num_new_of(p.requests);
        r.capacity = 0;
        r.lookup_to_hot = p.tables.lookup_to_hot;
        r.hot_to_lookup = p.tables.hot_to_lookup;
        r.stamps = p.tables.stamps;
        r.hot_pages = d.hot_pages;
        if (row != ABSENT) {
            r.host_pages = p.tables.host_pages + static_cast<i64>(row) * p.tables.max_pages;
            r.capacity = min(p.tables.capacity[row], p.tables.max_capacity);
            r.now = __ldcg(p.tables.step + row) + 1;
            // Before the look-ups, which depend on each other.
            prefetch_hot_pages(p, d, row, b.tid);
        }
        int flags = 0;
        const int* lookup_pages = p.tables.lookup_pages + static_cast<i64>(max(row, 0)) * p.tables.max_pages;
        int page_id[POSITIONS_PER_THREAD];       // all loads are issued before one is used, the new positions' too
#pragma unroll
        for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
            const int position = mine.position[k];
            const bool is_valid = row != ABSENT && position >= 0 && position < r.seq_len;
            // Selecting drafts beyond the context has no effect.
            const bool is_draft = MAX_NEW > 1 && position >= r.first_new && position < request.seq_len;
            if (row != ABSENT && position != ABSENT && !is_valid && !is_draft) flags = BAD_POSITION;
            if (!is_valid) mine.position[k] = ABSENT;
            page_id[k] = is_valid ? __ldg(lookup_pages + page_of(position)) : ABSENT;
        }
        const int first_page_id = row != ABSENT ? __ldg(lookup_pages + page_of(r.first_new)) : ABSENT;
        const int last_page_id =
            MAX_NEW > 1 && row != ABSENT ? __ldg(lookup_pages + page_of(r.seq_len - 1)) : first_page_id;
#pragma unroll
        for (int k = 0; k < POSITIONS_PER_THREAD; ++k)
            mine.lookup_slot[k] = slot_in_page(page_id[k], mine.position[k]);
        const int new_position = r.first_new + (MAX_NEW == 1 ? 0 : b.tid);
        r.new_lookup_slot = slot_in_page(
            MAX_NEW == 1 || page_of(new_position) == page_of(r.first_new) ? first_page_id : last_page_id, new_position);
#pragma unroll
        for (int k = 0; k < POSITIONS_PER_THREAD; ++k)
            mine.hot[k] = mine.lookup_slot[k] >= 0 ? __ldcg(r.lookup_to_hot + mine.lookup_slot[k]) : ABSENT;
        r.first_entry = ring_entry(r.first_new, r.capacity);
        // Drafts beyond the request's pages do not exist.
        if (MAX_NEW > 1 && r.capacity > 0 && last_page_id == ABSENT) r.seq_len = page_of(r.seq_len - 1) * PAGE_SIZE;
        if (r.capacity > 0 && first_page_id == ABSENT) {  // treated as padding: its token could not be backed up
            if (b.slice == 0 && b.tid == 0) atomicOr(p.tables.error_flags + row, NO_HOST_SLOT);
            row = ABSENT;
            r.capacity = 0;
            flags = 0;
        }
#pragma unroll
        for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
            if (MAX_NEW > 1 && r.capacity > 0 && mine.position[k] >= r.seq_len) mine.position[k] = ABSENT;
            if (r.capacity > 0 && mine.position[k] != ABSENT && mine.lookup_slot[k] < 0) flags |= NO_HOST_SLOT;
            if (row == ABSENT || (r.capacity > 0 && mine.lookup_slot[k] < 0)) mine.position[k] = ABSENT;
        }
#pragma unroll 1
        for (int i = b.tid; i < (p.tables.max_capacity + 31) / 32; i += NUM_PLANNERS + WARP) s.is_used[i] = 0;
        if (b.tid < NUM_BUCKETS) s.buckets[b.tid] = 0;
        if (b.tid == 0) {
            Mailbox::post(s.mail.num_early, 0);
            s.num_misses = s.num_late = s.num_left = s.num_evictions = s.flags = 0;
        }
        wait_for_async_copies();
        Planning::wait();
        if (s.unit != unit) {            // another block has the presumed unit
            unit = s.unit;
            continue;
        }
        ++turn;
        if (r.capacity > 0) {
            r.fits = r.first_new + MAX_NEW <= r.capacity;
            // Nobody else writes there: misses take other entries than the new positions.
            if (b.slice == 0 && b.tid < num_new_of(r))
                r.former = __ldcg(r.hot_to_lookup + slot_of_entry(r, entry_of_new(r, b.tid)));
            resolve_hisparse(p, round, s, d, r, mine, flags, is_last, b);
        } else {
#pragma unroll
            for (int k = 0; k < POSITIONS_PER_THREAD; ++k) {
                const int in_slice = k * NUM_PLANNERS + b.tid, i = b.slice * p.slice_len + in_slice;
                if (b.is_planner && in_slice < p.slice_len && i < p.num_selected)
                    p.out[static_cast<i64>(req) * p.num_selected + i] =
                        mine.position[k] == ABSENT ? ABSENT : dense_slot(p.tables, row, mine.position[k]);
            }
            if (flags) atomicOr(&p.tables.error_flags[row], flags);
            if (b.is_planner) {
                EarlyKnown::arrive();
                EarlyPlaced::arrive();
            }
        }
    }
    if (unit == ABSENT && b.is_planner) EarlyKnown::arrive();
    if (!b.has_arrived) arrive(p, round, b);
}

// Fetches early items of the requests that plan_requests plans meanwhile, turn by turn. A fetcher's warp calls it. Each
// turn meets the planners at EarlyKnown (which items to load) and EarlyPlaced (where to store them), and each but the
// last at EarlyDone (the mailbox may be used for the next turn).
__device__ __forceinline__ void fetch_early(const SwapInParams& p, Round& round, Mailbox& mail, const Block& b) {
    const u32 num_reqs = p.requests.num_reqs;
    const bool records = p.plan.src_host_slots != nullptr;
#pragma unroll 1
    for (u32 turn = 0;; ++turn) {
        EarlyKnown::wait();
        const int unit = Mailbox::read(mail.unit, b.lane);
        if (unit == ABSENT) return;
        const u32 req = request_of(p, unit) + turn * p.stride;
        const bool is_last = req + p.stride >= num_reqs;
        const int num_early = min(Mailbox::read(mail.num_early, b.lane), p.max_early);
        const bool verifies = p.checks.row_checks != nullptr && num_early > 0;
        const int row = verifies ? load_integer(p.requests.req_rows, p.requests.req_rows_are_64, req) : 0;
        EarlyItem items[ITEMS_PER_FETCHER];
        Copy copies[ITEMS_PER_FETCHER];
        u32 expected[ITEMS_PER_FETCHER];
#pragma unroll
        for (int k = 0; k < ITEMS_PER_FETCHER; ++k) {
            const int number = k * NUM_FETCHERS + b.warp - FIRST_FETCHER;
            if (number >= num_early) continue;
            copies[k].src_host_slot = Mailbox::read(mail.host_slots[number], b.lane);
            begin_fetch(p.pool, p.layer, copies[k].src_host_slot, b.lane, items[k]);
        }
        if (verifies) {
            const int* index_pages = index_pages_of(p.checks, row);
            Expected checks[ITEMS_PER_FETCHER];
#pragma unroll
            for (int k = 0; k < ITEMS_PER_FETCHER; ++k) {
                const int number = k * NUM_FETCHERS + b.warp - FIRST_FETCHER;
                checks[k] = {nullptr, 0, 0};
                if (number >= num_early) continue;
                copies[k].row = row;
                copies[k].position = Mailbox::read(mail.positions[number], b.lane);
                checks[k] = Expected::of(p.checks, p.layer, index_pages, copies[k].position);
            }
            // After all pages are loaded, so that the check of one item does not wait for the page of another.
#pragma unroll
            for (int k = 0; k < ITEMS_PER_FETCHER; ++k) expected[k] = checks[k].load();
        }
        if (is_last && !records) arrive_alone(p, round, b);
        EarlyPlaced::wait();
        if (is_last && records) arrive_alone(p, round, b);
#pragma unroll
        for (int k = 0; k < ITEMS_PER_FETCHER; ++k) {
            const int number = k * NUM_FETCHERS + b.warp - FIRST_FETCHER;
            copies[k].dst_device_slot = number < num_early ? Mailbox::read(mail.device_slots[number], b.lane) : ABSENT;
        }
        if (!is_last) EarlyDone::arrive();
#pragma unroll
        for (int k = 0; k < ITEMS_PER_FETCHER; ++k)
            if (copies[k].dst_device_slot != ABSENT)
                finish_fetch(p.pool, p.checks, p.layer, copies[k], expected[k], b.lane, items[k]);
        if (is_last) return;
    }
}

// grid: num_units blocks, or more, which only help; all must be resident at once, and one on each multiprocessor if
// units keep their place. With more than one slice, a block has at most one request. Dynamic shared memory:
// PlanDynamic.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) swap_in(const __grid_constant__ SwapInParams p) {
    extern __shared__ __align__(16) u8 dynamic[];
    __shared__ PlanShared s;
    __shared__ Schedule schedule;
    const PlanDynamic d = carve(dynamic, p);
    Block b;
    b.tid = threadIdx.x, b.lane = b.tid % WARP, b.warp = b.tid / WARP;
    b.is_planner = b.tid < NUM_PLANNERS;
    b.slice = 0;
    b.num_left = 0;
    b.has_arrived = b.has_missed = false;
    wait_for_kernel_in_front();
    let_next_kernel_get_ready();
    b.launch = __ldcg(p.num_launches);
    Round& round = *reinterpret_cast<Round*>(p.rounds + static_cast<i64>(b.launch & 1) * p.round_bytes);
    if (b.warp >= FIRST_FETCHER) {
        fetch_early(p, round, s.mail, b);
        return;
    }
    plan_requests(p, round, s, d, b);

    if (b.is_planner) {                  // clear the round of the next launch
        uint4* next_round = reinterpret_cast<uint4*>(p.rounds + static_cast<i64>(~b.launch & 1) * p.round_bytes);
#pragma unroll 1
        for (int i = blockIdx.x * NUM_PLANNERS + b.tid; i < p.round_bytes / 16; i += gridDim.x * NUM_PLANNERS)
            next_round[i] = make_uint4(0, 0, 0, 0);
    }
    if (!p.spreads && !b.has_missed) return;  // this block has no copies and helps no other
    if (p.pool.item_bytes == 0) return;   // another launch makes the planned copies
    if (!b.is_planner) {
        u32 num_left = 0;                // remaining copies of all blocks
        if (b.lane == 0) {
            if (p.spreads) {
                u64 arrived;
                SpinLimit spins;
                do {
                    spins.count();
                    arrived = load_acquire(&round.arrived);
                } while (arrived >> 32 != gridDim.x);
                num_left = static_cast<u32>(arrived);
                if (blockIdx.x == 0) close_launch(p, round, b.launch);
            }
            schedule.next = 0;
            schedule.num_own = b.num_left;
            schedule.num_taken = 0;
        }
        num_left = __shfl_sync(~0u, num_left, 0);
        if (num_left > 0) make_schedule(schedule, round, num_left, b.lane);
    }
    Planning::wait();
    copy_left(p, schedule, b.lane);
}

// grid: any; one warp for each item. Every block takes consecutive copies, which are likely to be near each other in
// host memory.
extern "C" __global__ void copy_planned(const __grid_constant__ CopyParams p) {
    wait_for_kernel_in_front();
    let_next_kernel_get_ready();
    const int lane = threadIdx.x % WARP, num_warps_of_block = blockDim.x / WARP;
    const i64 num_misses = *p.plan.num_misses;
    const i64 begin = num_misses * blockIdx.x / gridDim.x, end = num_misses * (blockIdx.x + 1) / gridDim.x;
#pragma unroll 1
    for (i64 i = begin + threadIdx.x / WARP; i < end; i += num_warps_of_block) {
        Copy copy = {static_cast<int>(p.plan.src_host_slots[i]), static_cast<int>(p.plan.dst_device_slots[i]), 0, 0};
        if (p.checks.row_checks != nullptr) copy.position = p.plan.positions[i], copy.row = p.plan.req_rows[i];
        fetch_item(p.pool, p.checks, p.layer, copy, index_pages_of(p.checks, copy.row), lane);
    }
}

// grid: [any, num_layers]; one warp for each item.
extern "C" __global__ void check_rows(const __grid_constant__ CheckRowsParams p) {
    wait_for_kernel_in_front();
    let_next_kernel_get_ready();
    const int lane = threadIdx.x % WARP, num_warps_of_block = blockDim.x / WARP, layer = blockIdx.y;
    const i64 num_warps = static_cast<i64>(gridDim.x) * num_warps_of_block;
    const i64 first = static_cast<i64>(blockIdx.x) * num_warps_of_block + threadIdx.x / WARP;
#pragma unroll 1
    for (i64 i = first; i < p.num_items; i += num_warps) {
        const i64 position = p.positions[i], out_slot = p.out_slots == nullptr ? i : p.out_slots[i];
        const u8* item = device_item(p.pool, layer, p.slots[i]);
        const Passed passed = pass_item(item, nullptr, p.pool, {nullptr, 0, 0}, lane);
        const u32 check = row_check(passed.sum_of_lane, p.first_layer + layer, position);
        if (lane == 0) p.out[layer * p.layer_out + out_slot] = check;
    }
}

// grid: [any, num_layers]; one warp for each position.
extern "C" __global__ void check_dense_row(const __grid_constant__ CheckDenseRowParams p) {
    wait_for_kernel_in_front();
    let_next_kernel_get_ready();
    const int lane = threadIdx.x % WARP, num_warps_of_block = blockDim.x / WARP, layer = blockIdx.y;
    const int num_warps = gridDim.x * num_warps_of_block;
    const int* index_pages = index_pages_of(p.checks, p.row);
#pragma unroll 1
    for (int i = blockIdx.x * num_warps_of_block + threadIdx.x / WARP; i < p.num_tokens; i += num_warps) {
        const Expected expected = Expected::of(p.checks, layer, index_pages, i);
        const int slot = dense_slot(p.tables, p.row, i);
        const Passed passed = pass_item(device_item(p.pool, layer, slot), nullptr, p.pool, expected, lane);
        verify(p.checks, layer, {slot, 0, i, p.row}, passed.expected, passed.sum_of_lane, lane);
    }
}

// grid: [any, num_layers]; one warp for each item.
extern "C" __global__ void check_pages(const __grid_constant__ CheckPagesParams p) {
    wait_for_kernel_in_front();
    let_next_kernel_get_ready();
    const int lane = threadIdx.x % WARP, num_warps_of_block = blockDim.x / WARP, layer = blockIdx.y;
    const int num_warps = gridDim.x * num_warps_of_block, num_items = p.num_pages * PAGE_SIZE;
    const int* row_checks = p.row_checks + layer * p.num_slots;
#pragma unroll 1
    for (int i = blockIdx.x * num_warps_of_block + threadIdx.x / WARP; i < num_items; i += num_warps) {
        const int* page = p.pages + 3 * page_of(i);
        if (i % PAGE_SIZE >= page[2]) continue;
        const int position = page[1] + i % PAGE_SIZE;
        const Expected expected = {row_checks, page[0], position};
        const u8* item = device_item(p.pool, layer, slot_in_page(page[0], position));
        const Passed passed = pass_item(item, nullptr, p.pool, expected, lane);
        const u32 check = row_check(passed.sum_of_lane, layer, position);
        if (lane == 0 && check != passed.expected) *p.is_wrong = 1;
    }
}

// grid: any; one warp for each item and layer. The row is empty and its swap-ins come later, so order does not matter.
extern "C" __global__ void fill_row(const __grid_constant__ FillParams p) {
    wait_for_kernel_in_front();
    let_next_kernel_get_ready();
    const int num_hot_pages = num_pages_of(p.num_entries);
    const int* hot_pages = p.staged;
    const int* host_pages = hot_pages + num_hot_pages;
    const int* lookup_pages = host_pages + p.num_host_pages;
    const int* index_pages = lookup_pages + p.num_host_pages;
    const FilledLayer* layers = reinterpret_cast<const FilledLayer*>(index_pages + p.num_index_pages);
    const int* num_warm = reinterpret_cast<const int*>(layers + p.num_layers);
    const int* positions = num_warm + p.num_groups;
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, num_threads = gridDim.x * blockDim.x;
#pragma unroll 1
    for (int i = thread; i < num_hot_pages; i += num_threads) p.hot_pages[i] = hot_pages[i];
#pragma unroll 1
    for (int i = thread; i < p.num_host_pages; i += num_threads) {
        p.host_pages[i] = host_pages[i];
        p.lookup_pages[i] = lookup_pages[i];
    }
#pragma unroll 1
    for (int i = thread; i < p.num_index_pages; i += num_threads) p.index_pages[i] = index_pages[i];
    if (thread == 0) *p.capacity = p.num_entries;

    const int lane = threadIdx.x % WARP, num_warps_of_block = blockDim.x / WARP;
    const i64 num_items = static_cast<i64>(p.num_layers) * p.max_warm;
    const i64 begin = num_items * blockIdx.x / gridDim.x, end = num_items * (blockIdx.x + 1) / gridDim.x;
#pragma unroll 1
    for (i64 i = begin + threadIdx.x / WARP; i < end; i += num_warps_of_block) {
        const FilledLayer filled = layers[i / p.max_warm];
        const int entry = static_cast<int>(i % p.max_warm);
        if (entry >= num_warm[filled.group]) continue;
        const int position = positions[(p.num_hints == 1 ? 0 : static_cast<i64>(filled.group)) * p.max_warm + entry];
        const int host_slot = slot_in_page(host_pages[page_of(position)], position);
        const int device_slot = slot_of_entry(hot_pages, entry);
        if (lane == 0 && filled.enters) {
            const i64 word = filled.group * p.group_device_slots + device_slot;
            const int lookup_slot = slot_in_page(lookup_pages[page_of(position)], position);
            p.tables.lookup_to_hot[filled.group * p.group_lookup_slots + lookup_slot] = entry;
            p.tables.hot_to_lookup[word] = lookup_slot;
            p.tables.stamps[word] = 0;
        }
        // index_pages are the staged ones, because the row's part of the table is being written.
        fetch_item(p.pool, p.checks, filled.layer, {host_slot, device_slot, position, p.row}, index_pages, lane);
    }
}

// grid: any; one warp for each request, position and layer.
extern "C" __global__ void backup_newest(const __grid_constant__ BackupParams p) {
    wait_for_kernel_in_front();
    let_next_kernel_get_ready();
    const Tables& t = p.tables;
    const int lane = threadIdx.x % WARP, num_warps_of_block = blockDim.x / WARP;
    const int num_warps = gridDim.x * num_warps_of_block;
    const int num_each = MAX_NEW == 1 || p.num_newest == nullptr ? 1 : MAX_NEW;
    const int num_items = p.requests.num_reqs * num_each * p.num_layers;
#pragma unroll 1
    for (int i = threadIdx.x / WARP * gridDim.x + blockIdx.x; i < num_items; i += num_warps) {
        const int layer = i % p.num_layers;
        const int req = i / p.num_layers / num_each, number = i / p.num_layers % num_each;  // 0 is the newest position
        const Request request = load_request(p.requests, t, req);
        if (request.row == ABSENT) continue;
        const int position = request.seq_len - 1 - number;
        if (position < 0 || (p.num_newest != nullptr && number >= p.num_newest[req])) continue;
        const int capacity = t.capacity[request.row];
        const int host_slot = host_slot_of(t, request.row, position);
        if (host_slot < 0) {             // the row is dense, unless it has a hot buffer
            if (capacity > 0 && lane == 0 && layer == 0) atomicOr(t.error_flags + request.row, NO_HOST_SLOT);
            continue;
        }
        const int device_slot = capacity == 0
            ? dense_slot(t, request.row, position)
            : slot_of_entry(hot_pages_of(t, request.row), ring_entry(position, capacity));
        if (device_slot < 0) {           // of a resident row, without a page for its newest item
            if (lane == 0 && layer == 0) atomicOr(t.error_flags + request.row, NO_HOST_SLOT);
            continue;
        }
        back_up_item(p.pool, layer, device_slot, host_slot, lane);
    }
}

// grid * block >= num_reqs * num_new; one thread for each position.
extern "C" __global__ void newest_slots(const __grid_constant__ NewestSlotsParams p) {
    wait_for_kernel_in_front();
    let_next_kernel_get_ready();
    const Tables& t = p.tables;
    const int i = blockIdx.x * blockDim.x + threadIdx.x, num_new = num_new_of(p.requests);
    const int req = i / num_new, number = i % num_new;
    if (req >= p.requests.num_reqs) return;
    const Request request = load_request(p.requests, t, req);
    int slot = ABSENT;
    const int position = request.seq_len - num_new + number;
    if (request.row != ABSENT && position < t.max_context) {
        const int capacity = t.capacity[request.row];
        if (capacity == 0) slot = dense_slot(t, request.row, position);
        else if (host_slot_of(t, request.row, position - number) < 0)
            atomicOr(t.error_flags + request.row, NO_HOST_SLOT);
        else if (MAX_NEW == 1 || host_slot_of(t, request.row, position) >= 0)
            slot = slot_of_entry(hot_pages_of(t, request.row), ring_entry(position, capacity));
    }
    p.out[i] = slot;
}
