// Parameters of the kernels: plain structs, passed by value; kernels/cuda_params.py mirrors them field by field.
#pragma once

#ifndef PAGE_SIZE
#define PAGE_SIZE 64             // token slots of a page, in every pool
#endif
#ifndef MAX_NEW
#define MAX_NEW 1                // most new positions of a request in one step; at most PAGE_SIZE and a warp's lanes
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int ABSENT = -1;       // no position, no hot_index, no slot
constexpr int CLAIMED = -2;      // lookup_to_hot of a miss whose entry is being chosen; only within one launch
constexpr int HITS = 0, MISSES = 1, EVICTIONS = 2;
constexpr int TOO_MANY_MISSES = 1, BAD_POSITION = 2, NO_HOST_SLOT = 4, WRONG_ROW = 8;
constexpr int WARP = 32;
static_assert(MAX_NEW <= WARP && MAX_NEW <= PAGE_SIZE, "one thread of a warp for each, in at most two pages");
constexpr int MAX_BLOCKS = 160;  // most blocks of one swap_in

// A host and a device pool, [num_layers][num_slots][item_bytes].
struct Pool {
    u8* host;                    // pinned memory at its device address
    u8* dev;
    i64 host_layer_bytes, host_slot_bytes;
    i64 dev_layer_bytes, dev_slot_bytes;
    int item_bytes;              // 0: nothing is copied
    int vector_bytes;            // 16, 8, 4, 2 or 1: divides the item, all strides and both addresses
};

// The tables of one group; those of rows are row-major. kernels/hot_state.py describes them.
struct Tables {
    int* lookup_to_hot;          // [number of lookup slots + 1]
    int* hot_to_lookup;          // [number of device slots + PAGE_SIZE]
    int* stamps;                 // [number of device slots + PAGE_SIZE]
    int* step;                   // [num_rows]
    const int* hot_pages;        // [num_rows][pages of max_capacity], page ids in hot_to_lookup and stamps
    const int* capacity;         // [num_rows]
    const int* page_table;       // [num_rows][max_pages]
    const int* host_pages;       // [num_rows][max_pages], page ids in the host pool
    const int* lookup_pages;     // [num_rows][max_pages], page ids in lookup_to_hot; both are set, or neither
    i64* counters;               // [num_rows][3]
    int* error_flags;            // [num_rows]
    int num_rows, max_context, max_capacity, max_pages;
};

// The expected check of each item, and where wrong items are recorded (kernels/row_check.py).
struct RowChecks {
    const int* row_checks;       // [num_layers][num_slots], or null: items are not verified
    const int* index_pages;      // [num_rows][max_pages]
    int* wrong_rows;             // [num_rows][NUM_WRONG_ROW_FIELDS]
    int* error_flags;            // [num_rows]
    i64 num_slots;
    int max_pages;
    int read_at;                 // the ReadAt that is recorded
};
constexpr int NUM_WRONG_ROW_FIELDS = 6;

// The batch; padding requests come last.
struct Requests {
    const void* seq_lens;        // [num_reqs] int32 or int64
    const void* req_rows;        // [num_reqs] int32 or int64
    const int* num_real_reqs;    // [1]
    int num_reqs;
    int seq_lens_are_64, req_rows_are_64;
    int num_new;                 // new positions of each request, the last ones below its seq_len; 1 to MAX_NEW
};

// The number of new positions: a constant if there are no drafts.
__device__ __forceinline__ int num_new_of(const Requests& requests) { return MAX_NEW == 1 ? 1 : requests.num_new; }

// The copies of one swap-in.
struct Plan {
    i64* src_host_slots;         // [max_misses], or null: no plan is recorded
    i64* dst_device_slots;       // [max_misses]
    int* req_rows;               // [max_misses]
    int* positions;              // [max_misses]
    int* num_misses;             // [1]
};

struct alignas(16) Copy {
    int src_host_slot, dst_device_slot;
    int position, row;           // of the item
};

// State through which the blocks of one launch synchronise. A workspace holds two rounds, used in turn: a launch clears
// the round of the next one, which no other launch uses meanwhile, so that a replayed graph needs no memset. Words that
// many blocks write have separate 128-byte lines.
struct RequestWord {
    u32 value;                   // high half: blocks of the request that have looked up their slice; low half: misses
    u32 unused[31];
};
struct Round {
    u64 arrived;                 // high half: blocks that have finished planning; low half: copies left for later
    u64 unused0[15];
    u32 num_planned;             // copies in the recorded plan
    u32 unused1[31];
    u32 num_present;             // blocks that have tried to take the unit of their multiprocessor
    u32 unused2[31];
    u32 is_taken[MAX_BLOCKS];    // by unit
    u32 num_left[MAX_BLOCKS];    // copies that each block left for later
    RequestWord requests[MAX_BLOCKS / 2];
    // followed by u32 is_used[number of requests that are split][max_capacity / 32, rounded up]
};

struct SwapInParams {
    Tables tables;
    Requests requests;
    Plan plan;
    Pool pool;
    RowChecks checks;
    const int* selected;         // [num_reqs][num_selected]
    int* out;                    // [num_reqs][num_selected]
    u32* num_launches;           // [1]; its lowest bit chooses the round
    u8* rounds;                  // [2][round_bytes]
    Copy* left;                  // [grid][left_per_block]
    int round_bytes;             // a multiple of 16
    int left_per_block;          // copies
    int num_selected;            // entries of one request's selection: top_k for each new position
    int num_units;               // slices in the first turn, one block each; unit i has slice i % num_slices
    int num_slices;              // units that share a request
    int slice_reciprocal;        // 2^16 / num_slices, rounded up
    int stride;                  // num_units / num_slices: from one request of a unit to its next
    int slice_len;               // positions of a slice; the last slice may be shorter
    int layer;
    int stamps_in_order;         // stamps are written in the order of entries: slices are long
    int max_early;               // most misses that a block fetches while their entries are being chosen
    int reads_ahead;             // early fetches are chosen as they are seen, before duplicates are removed
    int spreads;                 // blocks help each other with copies; otherwise each makes its own
    int keeps_place;             // units are assigned by multiprocessor; each multiprocessor has one block
};

struct CopyParams {
    Plan plan;
    Pool pool;
    RowChecks checks;
    int layer;
    int padding;
};

// The initial content of one row of the tables. `staged` holds int32 arrays one after the other: [pages of
// num_entries] hot_pages, [num_host_pages] host_pages and as many lookup_pages, [num_index_pages] index_pages,
// [num_layers] FilledLayer, [num_groups] numbers of positions to warm up, and [num_hints][max_warm] these positions.
struct FilledLayer {
    int layer, group;
    int enters;                  // 1 for the first layer of its group, which enters the positions in the tables
};
struct FillParams {
    Tables tables;               // of the first group
    Pool pool;
    RowChecks checks;
    const int* staged;
    int* hot_pages;              // from here to capacity: the row's part of the tables that swap-ins only read
    int* host_pages;
    int* lookup_pages;
    int* index_pages;
    int* capacity;
    i64 group_lookup_slots;      // ints from one group's lookup_to_hot to the next group's
    i64 group_device_slots;      // ints from one group's hot_to_lookup and stamps to the next group's
    int row, num_entries;        // num_entries: the capacity
    int num_host_pages, num_index_pages;
    int num_layers, num_groups;
    int max_warm;                // most positions to warm up in any group
    int num_hints;               // num_groups, or 1 if all groups share one hint
};

struct BackupParams {
    Tables tables;
    Requests requests;
    Pool pool;
    const int* num_newest;       // [num_reqs], or null: one position of each request
    int num_layers;
    int padding;
};

// Parameters for computing the checks of items in each layer of one pool, the device part of `pool`.
struct CheckRowsParams {
    Pool pool;
    const i64* slots;            // [num_items]
    const i64* positions;        // [num_items]
    const i64* out_slots;        // [num_items], or null: the check of item i goes to slot i
    int* out;                    // [num_layers][layer_out]
    i64 layer_out, num_items;
    int first_layer, padding;
};

// Parameters for verifying all items of a dense row in each layer of the device pool.
struct CheckDenseRowParams {
    Tables tables;
    Pool pool;
    RowChecks checks;
    int row, num_tokens;
};

// Parameters for comparing the items of pages with their checks, which have the same slots, in each layer.
struct CheckPagesParams {
    Pool pool;
    const int* row_checks;       // [num_layers][num_slots]
    const int* pages;            // [num_pages][3]: page id, position of the page's first item, number of items
    int* is_wrong;               // set to 1 if any item does not match
    i64 num_slots;
    int num_pages, padding;
};

struct NewestSlotsParams {
    Tables tables;
    Requests requests;
    int* out;                    // [num_reqs][num_new]
};

// One request of the batch; row is ABSENT if it is padding or out of range. Its first new position is inside the
// context; the others may be beyond it.
struct Request {
    int row, seq_len;
};

__device__ __forceinline__ i64 load_integer(const void* values, int is_64, int i) {
    return is_64 ? static_cast<const i64*>(values)[i] : static_cast<const int*>(values)[i];
}

__device__ __forceinline__ Request load_request(const Requests& requests, const Tables& tables, int req) {
    const int num_real = *requests.num_real_reqs;
    const i64 seq_len = load_integer(requests.seq_lens, requests.seq_lens_are_64, req);
    const i64 row = load_integer(requests.req_rows, requests.req_rows_are_64, req);
    const bool is_real = req < num_real && row >= 0 && row < tables.num_rows;
    const int num_new = num_new_of(requests);
    if (is_real && (seq_len < num_new || seq_len >= tables.max_context + num_new)) {
        atomicOr(&tables.error_flags[row], BAD_POSITION);
        return {ABSENT, 0};
    }
    return {is_real ? static_cast<int>(row) : ABSENT, static_cast<int>(seq_len)};
}

__device__ __forceinline__ int page_of(int position) { return static_cast<u32>(position) / PAGE_SIZE; }

__device__ __forceinline__ int slot_in_page(int page_id, int position) {
    return page_id == ABSENT ? ABSENT : page_id * PAGE_SIZE + static_cast<int>(static_cast<u32>(position) % PAGE_SIZE);
}

// The number of pages that hold this many slots.
__device__ __forceinline__ int num_pages_of(int num_slots) { return page_of(num_slots + PAGE_SIZE - 1); }

// The hot_index of a position in a step in which it is new (kernels/step_requests.py: ring_entries).
__device__ __forceinline__ int ring_entry(int position, int capacity) {
    const int turn = static_cast<int>(static_cast<u32>(position - capacity) % MAX_NEW);
    return position < capacity ? position : capacity - MAX_NEW + turn;
}

__device__ __forceinline__ int dense_slot(const Tables& tables, int row, int position) {
    return slot_in_page(tables.page_table[static_cast<i64>(row) * tables.max_pages + page_of(position)], position);
}

__device__ __forceinline__ const int* hot_pages_of(const Tables& tables, int row) {
    return tables.hot_pages + static_cast<i64>(row) * num_pages_of(tables.max_capacity);
}

// The device slot of a hot_index below the row's capacity, which has a page.
__device__ __forceinline__ int slot_of_entry(const int* hot_pages, int entry) {
    return hot_pages[page_of(entry)] * PAGE_SIZE + static_cast<int>(static_cast<u32>(entry) % PAGE_SIZE);
}

__device__ __forceinline__ int host_slot_of(const Tables& tables, int row, int position) {
    return slot_in_page(__ldg(tables.host_pages + static_cast<i64>(row) * tables.max_pages + page_of(position)),
                        position);
}
