// Scores the positions that a prompt's queries see, over paged fp8 keys, on Hopper's tensor cores.
//
// A block has a group of neighbouring queries and one split of the positions that they see. One warp copies tiles of
// keys into a ring in shared memory, as far ahead as the ring allows. Two groups of four warps multiply each tile, each
// with all heads of half of the queries, and add up over the heads. A group multiplies by two instructions' worth of
// heads in turn: the tensor cores have the one while it adds up the other.
#include "index_logits.cuh"

constexpr int COLUMNS_AT_ONCE = 128;           // heads of some queries, with which one instruction multiplies
constexpr int QUERIES = COLUMNS_AT_ONCE / NUM_HEADS;  // of one instruction
constexpr int HALVES = 2;                      // instructions' worth of a warp group
constexpr int GROUPS = 2;                      // warp groups that score
constexpr int QUERIES_OF_GROUP = HALVES * QUERIES, QUERIES_OF_BLOCK = GROUPS * QUERIES_OF_GROUP;
constexpr int NUM_THREADS = (GROUPS + 1) * WARP_GROUP;
constexpr int SCORING_WARPS = GROUPS * WARP_GROUP / WARP;
constexpr int SCORING_REGISTERS = 232, LOADING_REGISTERS = 40;  // of a thread
constexpr int OWN = QUERIES / 2;               // queries of one instruction whose sums a lane writes
static_assert(QUERIES_OF_BLOCK <= WARP, "each lane of a warp looks at one query");

struct Barriers {
    u64 is_full[STAGES], is_free[STAGES];
    float head_weights[QUERIES_OF_BLOCK][NUM_HEADS];
};

// What the block's queries see. Lane i has query i, in every warp.
struct Seen {
    int row, length;               // 0 positions if the query is not scored
    int num_runs;                  // 1 if all queries are of one row, otherwise one for each; a run has one row's keys

    __device__ Seen(const LogitsParams& p, int first, int lane) : row(0), length(0) {
        if (lane < QUERIES_OF_BLOCK) {
            length = length_of(p, first + lane, p.stop_token < *p.num_real ? p.stop_token : *p.num_real);
            if (length) row = static_cast<int>(p.req_rows[first + lane]);
        }
        const int lowest = __reduce_min_sync(~0u, length ? row : 0x7fffffff);
        const int highest = __reduce_max_sync(~0u, length ? row : -1);
        num_runs = lowest >= highest ? 1 : QUERIES_OF_BLOCK;
    }
    // How many positions this lane's query sees of a run's row.
    __device__ int length_in(int run, int lane) const { return num_runs == 1 || lane == run ? length : 0; }
};

// The tiles of a run that the block scores.
struct Run {
    int row, first_tile, stop_tile;

    __device__ Run(const Seen& seen, int run, int lane) {
        const int length = seen.length_in(run, lane);
        row = __reduce_max_sync(~0u, length ? seen.row : 0);
        const int num_tiles = tiles_of(__reduce_max_sync(~0u, length)), splits = static_cast<int>(gridDim.x);
        const int size = (num_tiles + splits - 1) / splits;
        first_tile = static_cast<int>(blockIdx.x) * size;
        stop_tile = first_tile + size < num_tiles ? first_tile + size : num_tiles;
        first_tile = __shfl_sync(~0u, first_tile, 0);
        stop_tile = __shfl_sync(~0u, stop_tile, 0);
    }
};

// The loading warp: copies the tiles of all runs.
__device__ void load_tiles(const LogitsParams& p, int first, Loader loader, int lane) {
    const Seen seen(p, first, lane);
    for (int number = 0; number < seen.num_runs; ++number) {
        const Run run(seen, number, lane);
        const int* pages = p.page_table + static_cast<i64>(run.row) * p.max_pages;
        const int num_tiles = run.stop_tile - run.first_tile;
        loader.load(p.keys, pages, run.first_tile, num_tiles, num_tiles, lane);
    }
}

typedef float Products[COLUMNS_AT_ONCE / 2];   // a lane's, of its two positions with some queries' heads
typedef u32 Keys[DIM / 32][4];                 // a lane's part of two positions' keys

// Adds to the sums the products of 64 positions, 32 of their numbers, with those of the heads of some queries. `query`:
// what the instruction knows of the heads' place.
__device__ __forceinline__ void multiply(Products& sums, const u32 (&keys)[4], u64 query, int has_sums) {
#if __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11,"
        " %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32,"
        " %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53,"
        " %54, %55, %56, %57, %58, %59, %60, %61, %62, %63},"
        " {%64, %65, %66, %67}, %68, p, 1, 1; }"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]),
          "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]),
          "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]),
          "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), "+f"(sums[24]), "+f"(sums[25]),
          "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]),
          "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]), "+f"(sums[36]), "+f"(sums[37]),
          "+f"(sums[38]), "+f"(sums[39]), "+f"(sums[40]), "+f"(sums[41]), "+f"(sums[42]), "+f"(sums[43]),
          "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]), "+f"(sums[48]), "+f"(sums[49]),
          "+f"(sums[50]), "+f"(sums[51]), "+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]), "+f"(sums[55]),
          "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]), "+f"(sums[60]), "+f"(sums[61]),
          "+f"(sums[62]), "+f"(sums[63])
        : "r"(keys[0]), "r"(keys[1]), "r"(keys[2]), "r"(keys[3]), "l"(query), "r"(has_sums));
#endif
}

// Lets the tensor cores multiply a tile with the heads at `query`.
__device__ __forceinline__ void start_tile(Products& products, const Keys& keys, u64 query) {
    start_products();
#pragma unroll
    for (int k = 0; k < DIM / 32; ++k) multiply(products, keys[k], query + 2 * k, k);
    commit_products();
}

// Keeps the compiler from reading products before the wait that is in front of this.
__device__ __forceinline__ void have_arrived(Products& products) {
#pragma unroll
    for (int i = 0; i < COLUMNS_AT_ONCE / 2; ++i) asm volatile("" : "+f"(products[i]) :: "memory");
}

// What a lane writes of one instruction's products: the sums of its own queries, for one of its two positions.
struct Results {
    float* logits;                 // of its first query
    i64 stride;
    int lengths[OWN];              // positions that its queries see

    // Adds up over the heads, and writes for a position with this scale.
    __device__ __forceinline__ void write(const Products& products, const float (&weights)[QUERIES][2 * COLUMNS],
                                          int position, float scale, int in_quad) const {
        float sums[QUERIES][2];
#pragma unroll
        for (int query = 0; query < QUERIES; ++query)
#pragma unroll
            for (int which = 0; which < 2; ++which)
                sums[query][which] = add_heads(products + query * (NUM_HEADS / 2), weights[query], which);
        // Lanes 2 apart give each other the sums of half of the queries, those 1 apart those of one position.
        const bool has_last = in_quad & 2, has_second = in_quad & 1;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            float both[2];
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const float mine = has_last ? sums[OWN + i][which] : sums[i][which];
                const float others = has_last ? sums[i][which] : sums[OWN + i][which];
                both[which] = sum(mine, __shfl_xor_sync(~0u, others, 2));
            }
            const float mine = has_second ? both[1] : both[0], others = has_second ? both[0] : both[1];
            const float total = sum(mine, __shfl_xor_sync(~0u, others, 1));
            if (position < lengths[i]) logits[i * stride + position] = product(total, scale);
        }
    }
};

// All warps of a group ask at once for as many registers of a thread.
template <int COUNT>
__device__ __forceinline__ void take_registers() {
#if __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT));
#endif
}
template <int COUNT>
__device__ __forceinline__ void leave_registers() {
#if __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT));
#endif
}

// The warps of a group: they score the group's queries in all tiles.
__device__ void score_tiles(const LogitsParams& p, int first, const u32* ring, u8* queries, Barriers& shared, int group,
                            int thread) {
    const int warp = thread / WARP, lane = thread % WARP, quad = lane / 4, in_quad = lane % 4;
    const Seen seen(p, first, lane);
    for (int query = 0; query < QUERIES_OF_GROUP; ++query) {  // padding has the last query's heads
        const int number = group * QUERIES_OF_GROUP + query;
        const int token = first + number < p.stop_token ? first + number : p.stop_token - 1;
        prepare_query(p, token, queries + query * QUERY_BYTES, shared.head_weights[number], thread);
    }
    asm volatile("bar.sync %0, %1;" :: "r"(1 + group), "n"(WARP_GROUP) : "memory");
    float weights[HALVES][QUERIES][2 * COLUMNS];
    Results results[HALVES];
    u64 places[HALVES];
    int own[HALVES];               // the first of the lane's own queries, among the block's
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        const int number = group * QUERIES_OF_GROUP + half * QUERIES;
#pragma unroll
        for (int query = 0; query < QUERIES; ++query)
            read_weights(weights[half][query], shared.head_weights[number + query], in_quad);
        places[half] = place_of(queries + half * QUERIES * QUERY_BYTES);
        own[half] = number + in_quad / 2 * OWN;
        results[half].logits = p.logits + (first + own[half] - p.first_token) * p.logits_stride;
        results[half].stride = p.logits_stride;
    }

    // Positions 4 * quad + warp and 32 more are rows quad and quad + 8 of a warp's part of the product.
    const u32* lane_keys = ring + (4 * quad + warp) * KEY_WORDS + in_quad;
    const int own_position = 32 * (in_quad % 2) + 4 * quad + warp;
    const u32* own_scale = ring + own_position * KEY_WORDS + DIM / 4;
    u32 number = 0;                // tiles so far, of all runs
    for (int at = 0; at < seen.num_runs; ++at) {
        const Run run(seen, at, lane);
#pragma unroll
        for (int half = 0; half < HALVES; ++half)
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                results[half].lengths[i] = __shfl_sync(~0u, seen.length_in(at, lane), own[half] + i);
        Products products[HALVES];
        Keys keys;
        float scale;
        // Reads the next tile's keys, and has them multiplied with the first half of the heads.
        const auto start_next_tile = [&] {
            const u32 stage = number % STAGES;
            wait_for_phase(&shared.is_full[stage], number / STAGES);
#pragma unroll
            for (int k = 0; k < DIM / 32; ++k)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    keys[k][j] = lane_keys[stage * TILE_WORDS + 32 * (j % 2) * KEY_WORDS + 8 * k + 4 * (j / 2)];
            scale = __uint_as_float(own_scale[stage * TILE_WORDS]);
            ++number;
            start_tile(products[0], keys, places[0]);
            release(&shared.is_free[stage], lane);
        };
        if (run.first_tile >= run.stop_tile) continue;
        start_next_tile();
        int position = run.first_tile * TILE + own_position;
        for (int left = run.stop_tile - run.first_tile - 1; ; --left) {
            start_tile(products[1], keys, places[1]);
            wait_for_products_but_last();
            have_arrived(products[0]);
            results[0].write(products[0], weights[0], position, scale, in_quad);
            wait_for_products();
            have_arrived(products[1]);
            const float last_scale = scale;
            if (left == 0) {
                results[1].write(products[1], weights[1], position, last_scale, in_quad);
                break;
            }
            start_next_tile();
            results[1].write(products[1], weights[1], position, last_scale, in_quad);
            position += TILE;
        }
    }
}

extern __shared__ u8 dynamic_shared[];

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) prompt_logits(const LogitsParams p) {
    __shared__ Barriers shared;
    // The order of swizzled pieces follows from addresses.
    u8* queries = dynamic_shared + (SWIZZLE - shared_address(dynamic_shared) % SWIZZLE) % SWIZZLE;
    auto* ring = reinterpret_cast<u32(*)[TILE_WORDS]>(queries + QUERIES_OF_BLOCK * QUERY_BYTES);
    if (threadIdx.x < STAGES) {
        start_barrier(&shared.is_full[threadIdx.x], 1);
        start_barrier(&shared.is_free[threadIdx.x], SCORING_WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    let_next_kernel_get_ready();
    wait_for_kernel_in_front();
    const int first = p.first_token + static_cast<int>(blockIdx.y) * QUERIES_OF_BLOCK;
    const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / WARP_GROUP, 0), thread = threadIdx.x % WARP_GROUP;
    if (group < GROUPS) {
        take_registers<SCORING_REGISTERS>();
        score_tiles(p, first, ring[0], queries + group * QUERIES_OF_GROUP * QUERY_BYTES, shared, group, thread);
    } else {
        leave_registers<LOADING_REGISTERS>();
        if (thread < WARP) load_tiles(p, first, {ring, shared.is_full, shared.is_free}, thread);
    }
}
