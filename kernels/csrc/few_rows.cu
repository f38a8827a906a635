// Multiplies up to 64 tokens by a matrix on Hopper's tensor cores, as fast as memory gives the weights.
//
// A block has one tile of the result after the other: tile_rows rows of the matrix, all tokens, and one part of the
// columns. The host chooses tile_rows so that all multiprocessors have as many bytes. A ring in shared memory has a
// stage for each block of columns. One thread copies weights into it, one warp tokens and scales. Weights depend on no
// kernel in front, so the first ones are on their way before that one ends; with more of them on their way at a time
// than memory delivers meanwhile, tokens, which can come only then, would have to wait behind them. The two blocks of a
// cluster have the same part, and each copies half of the tokens to both, because every tile reads all tokens of its
// part from L2. Teams of four warps multiply 64 rows each by all tokens: the matrix is the left operand.
//
// The rows of a tile end in the middle of a team's if tile_rows is no multiple of 64. The tensor cores multiply what
// lies behind them in shared memory, too, and nobody reads those results. The blocks of a part are added up in order,
// whatever the tile: a token has the bits of kernels/gluon_linear.py.
#include "hopper.cuh"

constexpr int TEAM = 4 * WARP;                 // threads
constexpr int UNIT_ROWS = 64;                  // rows of the matrix that a team multiplies
constexpr int STEPS = 4;                       // instructions for a block of columns, of 32 bytes each
constexpr int BLOCK_COLUMNS = IS_FP8 ? 128 : 64;
constexpr int SCALE_ROWS = 128;                // rows of the matrix that share a scale
constexpr int ROW_SCALES = 4;                  // room for those of a tile's rows, at most three
constexpr int CLUSTER = 2;                     // blocks; each copies at least 8 tokens, after which SWIZZLE repeats
constexpr int MOST_TEAMS = 4;
constexpr int RESULT_BYTES = UNIT_ROWS * 4 + 16;  // of a token's results of a team, in shared memory
constexpr int NUM_THREADS = MOST_TEAMS * TEAM + 2 * WARP;  // at most, with those that copy

struct alignas(64) TensorMap {
    u64 words[16];                 // as the driver encodes it
};

struct FewRowsParams {
    TensorMap values;              // [rows][columns], in boxes of tile_rows rows and BLOCK_COLUMNS columns, swizzled
    TensorMap x;                   // [num_tokens][columns], in boxes of TOKENS / CLUSTER rows
    const float* x_scales;         // with fp8 [blocks][x_scales_stride]
    const float* scales;           // with fp8 [rows / SCALE_ROWS][blocks]
    void* out;                     // [parts][num_tokens][rows]: float32, or bfloat16 if there is one part
    int x_scales_stride;
    int num_tokens, rows;
    int num_blocks, part_blocks, num_parts;
    int tile_rows, num_stages;
    u32 tiles_across;              // those of a part, a multiple of CLUSTER
    short first_window, window;    // stages whose weights are on their way: before the first has arrived, and later
};

// What the warps know of the ring. A stage has weights [tile_rows][SWIZZLE_ROW], tokens [TOKENS][SWIZZLE_ROW], both
// swizzled, and with fp8 the scales of tokens [TOKENS] and of rows [ROW_SCALES]. Three barriers say that its weights
// have arrived, that its tokens and scales have, and that all teams of the cluster have read it.
template <int TOKENS>
struct Ring {
    u32 data, barriers;            // where they begin
    u32 tokens_at, stage_bytes;
    u32 num_stages;
    u32 stage = 0, turn = 0;

    __device__ __forceinline__ Ring(const FewRowsParams& p, u32 data, u32 barriers) : data(data), barriers(barriers) {
        tokens_at = p.tile_rows * SWIZZLE_ROW;
        stage_bytes = (tokens_at + scales_at() + TOKENS * 4 + ROW_SCALES * 4 + SWIZZLE - 1) / SWIZZLE * SWIZZLE;
        num_stages = p.num_stages;
    }
    static __device__ __forceinline__ constexpr u32 scales_at() { return TOKENS * SWIZZLE_ROW; }  // behind tokens_at
    __device__ __forceinline__ u32 at() const { return data + stage * stage_bytes; }
    __device__ __forceinline__ u32 has_weights() const { return barriers + stage * 8; }
    __device__ __forceinline__ u32 has_tokens() const { return barriers + (MOST_STAGES + stage) * 8; }
    __device__ __forceinline__ u32 is_free() const { return barriers + (2 * MOST_STAGES + stage) * 8; }
    __device__ __forceinline__ void advance() {
        if (++stage == num_stages) {
            stage = 0;
            ++turn;
        }
    }
    __device__ __forceinline__ void wait_until_free() const {
        if (turn > 0) wait_for_phase(is_free(), turn - 1);
    }
};

// The tiles of this block, one after the other.
struct Tile {
    const FewRowsParams& p;
    u32 number;
    int part, first_row, first_block, end_block;

    __device__ __forceinline__ Tile(const FewRowsParams& params) : p(params), number(blockIdx.x) {
        find();
    }
    __device__ __forceinline__ bool is_one() const { return part < p.num_parts; }
    __device__ __forceinline__ void find() {
        part = number / p.tiles_across;
        first_row = (number - part * p.tiles_across) * p.tile_rows;
        first_block = part * p.part_blocks;
        end_block = first_block + p.part_blocks < p.num_blocks ? first_block + p.part_blocks : p.num_blocks;
    }
    __device__ __forceinline__ void advance() {
        number += gridDim.x;
        find();
    }
};

// Copies a box of a tensor map, swizzled, which counts for the barrier.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, int column, int row, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%2, %3}], [%4], %5;"
                 :: "r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
                 : "memory");
}
// Copies a box to the same place of all blocks of the cluster, where it counts for the barriers at the same place.
__device__ __forceinline__ void copy_box_to_all(u32 to, const TensorMap& map, int column, int row, u32 barrier,
                                                u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;"
                 :: "r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier),
                    "h"(static_cast<u16>((1 << CLUSTER) - 1)), "l"(policy)
                 : "memory");
}
// All threads of a cluster arrive, and wait until all have. They say nothing to each other of memory but barriers.
__device__ __forceinline__ void arrive_in_cluster() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
    __syncwarp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Arrives, for a warp that has read a stage, at the barriers of all blocks of the cluster. What boxes may now overwrite
// was read by the tensor cores alone, after which no fence is needed.
__device__ __forceinline__ void release_to_all(u32 barrier, int lane) {
    __syncwarp();
    if (lane < CLUSTER)
        asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
                     " mbarrier.arrive.shared::cluster.b64 _, [there]; }"
                     :: "r"(barrier), "r"(lane)
                     : "memory");
}
__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

// One thread: copies weights, of as many stages at a time as the windows have.
template <int TOKENS>
struct WeightLoader {
    const FewRowsParams& p;
    Ring<TOKENS> ring, arrived;    // the next stage, and the first that may be on its way
    Tile tile;
    int block;
    u64 once;                      // tells L2 that weights are read once

    __device__ __forceinline__ WeightLoader(const FewRowsParams& p, Ring<TOKENS> ring)
        : p(p), ring(ring), arrived(ring), tile(p), block(tile.first_block) {
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    }
    __device__ __forceinline__ void load_stages(int num_stages) {
        for (; num_stages > 0 && tile.is_one(); --num_stages) {
            ring.wait_until_free();
            expect_bytes(ring.has_weights(), ring.tokens_at);
            copy_box(ring.at(), p.values, block * BLOCK_COLUMNS, tile.first_row, ring.has_weights(), once);
            ring.advance();
            if (++block == tile.end_block) {
                tile.advance();
                block = tile.first_block;
            }
        }
    }
    // Weights depend on no kernel in front.
    __device__ __forceinline__ void load_first() { load_stages(p.first_window); }
    __device__ __forceinline__ void load_others() {
        for (int num_next = 1 + p.window - p.first_window; tile.is_one(); num_next = 1) {
            wait_for_phase(arrived.has_weights(), arrived.turn);
            arrived.advance();
            load_stages(num_next);
        }
    }
};

// One warp: copies tokens and scales.
template <int TOKENS>
struct TokenLoader {
    const FewRowsParams& p;
    int lane, first_token;
    u64 often;                     // tells L2 that tokens are read as often as there are tiles

    __device__ __forceinline__ TokenLoader(const FewRowsParams& p, int lane) : p(p), lane(lane) {
        first_token = rank_in_cluster() * (TOKENS / CLUSTER);
        asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(often));
    }
    __device__ __forceinline__ void load_row_scales(const Ring<TOKENS>& ring, const Tile& tile, int block) const {
        if constexpr (IS_FP8) {
            const int down = tile.first_row / SCALE_ROWS + lane;
            if (lane < ROW_SCALES && down * SCALE_ROWS < p.rows)
                copy_async(ring.at() + ring.tokens_at + ring.scales_at() + (TOKENS + lane) * 4,
                           p.scales + static_cast<i64>(down) * p.num_blocks + block, 4);
        }
    }
    __device__ __forceinline__ void load_tokens(const Ring<TOKENS>& ring, int block) const {
        const u32 to = ring.at() + ring.tokens_at;
        if (lane == 0) {
            expect_bytes(ring.has_tokens(), ring.scales_at());
            copy_box_to_all(to + first_token * SWIZZLE_ROW, p.x, block * BLOCK_COLUMNS, first_token, ring.has_tokens(),
                            often);
        }
        if constexpr (IS_FP8) {
            const float* from = p.x_scales + static_cast<i64>(block) * p.x_scales_stride + lane;
#pragma unroll
            for (int first = 0; first < TOKENS; first += WARP)
                if (first + lane < p.num_tokens)
                    copy_async(to + ring.scales_at() + (first + lane) * 4, from + first, 4);
        }
        arrive_after_async_copies(ring.has_tokens());
    }
    __device__ __forceinline__ void load(Ring<TOKENS> ring) const {
        Tile tile(p);
        // Scales of rows depend on no kernel in front. Those of the first stages come before its end.
        Ring<TOKENS> early = ring;
        for (int block = tile.first_block; block < tile.end_block && early.turn == 0; ++block, early.advance())
            load_row_scales(early, tile, block);
        wait_for_kernel_in_front();
        wait_for_cluster();
        for (bool is_first = true; tile.is_one(); tile.advance(), is_first = false)
            for (int block = tile.first_block; block < tile.end_block; ++block, ring.advance()) {
                ring.wait_until_free();
                if (ring.turn > 0 || !is_first) load_row_scales(ring, tile, block);
                load_tokens(ring, block);
            }
    }
};

#define SUMS4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SUMS16(i) SUMS4(i), SUMS4(i + 4), SUMS4(i + 8), SUMS4(i + 12)
#define PLACES8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PLACES16 PLACES8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PLACES32 PLACES16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#if IS_FP8
#define KIND(n) "wgmma.mma_async.sync.aligned.m64n" n "k32.f32.e4m3.e4m3 "
#define OPTIONS "p, 1, 1; }"
#else
#define KIND(n) "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 "
#define OPTIONS "p, 1, 1, 0, 0; }"
#endif

// Adds the products of one step to the sums, if these exist. `left`, `right`: the places of the matrix and the tokens.
template <int TOKENS>
__device__ __forceinline__ void multiply(float (&sums)[TOKENS / 2], u64 left, u64 right, int has_sums) {
#if __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (TOKENS == 16)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %10, 0;\n" KIND("16") "{" PLACES8 "}, %8, %9, " OPTIONS
                     : SUMS4(0), SUMS4(4) : "l"(left), "l"(right), "r"(has_sums));
    else if constexpr (TOKENS == 32)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %18, 0;\n" KIND("32") "{" PLACES16 "}, %16, %17, " OPTIONS
                     : SUMS16(0) : "l"(left), "l"(right), "r"(has_sums));
    else
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n" KIND("64") "{" PLACES32 "}, %32, %33, " OPTIONS
                     : SUMS16(0), SUMS16(16) : "l"(left), "l"(right), "r"(has_sums));
#endif
}

__device__ __forceinline__ float float_at(u32 address) {
    float result;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(result) : "r"(address) : "memory");
    return result;
}
__device__ __forceinline__ float2 two_floats_at(u32 address) {
    float2 result;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(result.x), "=f"(result.y) : "r"(address) : "memory");
    return result;
}

__device__ __forceinline__ void store_shared(u32 address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" :: "r"(address), "f"(value) : "memory");
}
__device__ __forceinline__ void store_rounded(u32 address, float value) {
    asm volatile("{ .reg .b16 rounded; cvt.rn.bf16.f32 rounded, %1; st.shared.b16 [%0], rounded; }"
                 :: "r"(address), "f"(value)
                 : "memory");
}
__device__ __forceinline__ uint4 sixteen_bytes_at(u32 address) {
    uint4 result;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(result.x), "=r"(result.y), "=r"(result.z), "=r"(result.w) : "r"(address) : "memory");
    return result;
}

// A barrier of one team. The numbers are constants, because a block would otherwise have all barriers that there are.
__device__ __forceinline__ void team_barrier(int team) {
    static_assert(MOST_TEAMS == 4, "a case for each");
    if (team == 0) Barrier<2, TEAM>::wait();
    else if (team == 1) Barrier<3, TEAM>::wait();
    else if (team == 2) Barrier<4, TEAM>::wait();
    else Barrier<5, TEAM>::wait();
}

// Stores a team's part of a tile by way of shared memory, [TOKENS] rows of results, so that threads write 16 bytes.
// Of the rows `row` and `row + 8` of the team a thread has two tokens in eight.
template <int TOKENS, bool IS_ROUNDED>
__device__ __forceinline__ void store(const FewRowsParams& p, const Tile& tile, const float (&total)[TOKENS / 2],
                                      u32 results, int team, int thread) {
    constexpr int NUMBER_BYTES = IS_ROUNDED ? 2 : 4, PIECES = UNIT_ROWS * NUMBER_BYTES / 16;
    constexpr int ROW_BYTES = UNIT_ROWS * NUMBER_BYTES + 16;  // lanes that write a column then have banks of their own
    const int lane = thread % WARP, row = thread / WARP * 16 + lane / 4, in_quad = lane % 4;
    results += team * TOKENS * RESULT_BYTES;
    const u32 to = results + row * NUMBER_BYTES + 2 * in_quad * ROW_BYTES;
    team_barrier(team);  // the results of the tile before have been read
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
        const int token = i / 4 * 8 + i % 2, lower = i % 4 / 2;  // and 2 * in_quad
        const u32 at = to + token * ROW_BYTES + 8 * lower * NUMBER_BYTES;
        if constexpr (IS_ROUNDED) store_rounded(at, total[i]);
        else store_shared(at, total[i]);
    }
    team_barrier(team);
    const int piece = thread % PIECES, first_row = tile.first_row + team * UNIT_ROWS + piece * (16 / NUMBER_BYTES);
    if (first_row >= p.rows || first_row >= tile.first_row + p.tile_rows) return;
    u8* out = static_cast<u8*>(p.out);
#pragma unroll
    for (int first = 0; first < TOKENS; first += TEAM / PIECES) {
        const int token = first + thread / PIECES;
        const i64 number = (static_cast<i64>(tile.part) * p.num_tokens + token) * p.rows + first_row;
        if (token < p.num_tokens)
            *reinterpret_cast<uint4*>(out + number * NUMBER_BYTES) =
                sixteen_bytes_at(results + token * ROW_BYTES + piece * 16);
    }
}

// One team: multiplies its rows of each tile.
template <int TOKENS>
__device__ __forceinline__ void multiply_tiles(const FewRowsParams& p, Ring<TOKENS> ring, int team, int thread) {
    constexpr int HALF = TOKENS / 2;
    const int warp = thread / WARP, lane = thread % WARP, in_quad = lane % 4;
    wait_for_kernel_in_front();
    wait_for_cluster();
    for (Tile tile(p); tile.is_one(); tile.advance()) {
        const int warp_row = tile.first_row + team * UNIT_ROWS + warp * 16;
        const u32 row_scale_at =
            ring.tokens_at + ring.scales_at() + (TOKENS + warp_row / SCALE_ROWS - tile.first_row / SCALE_ROWS) * 4;
        const u32 token_scales_at = ring.tokens_at + ring.scales_at() + in_quad * 8;
        float total[HALF];
#pragma unroll
        for (int i = 0; i < HALF; ++i) total[i] = 0.0f;
        for (int block = tile.first_block; block < tile.end_block; ++block, ring.advance()) {
            const u32 stage = ring.at();
            const u64 left = place_of(stage + team * UNIT_ROWS * SWIZZLE_ROW), right = place_of(stage + ring.tokens_at);
            wait_for_phase(ring.has_tokens(), ring.turn);
            wait_for_phase(ring.has_weights(), ring.turn);
            if constexpr (IS_FP8) {
                float sums[HALF];
                start_products();
#pragma unroll
                for (int step = 0; step < STEPS; ++step)
                    multiply<TOKENS>(sums, left + 2 * step, right + 2 * step, step);
                commit_products();
                const float row_scale = float_at(stage + row_scale_at);
                wait_for_products();
#pragma unroll
                for (int i = 0; i < HALF; ++i) asm volatile("" : "+f"(sums[i]) :: "memory");
#pragma unroll
                for (int i = 0; i < HALF; i += 4) {
                    const float2 of_tokens = two_floats_at(stage + token_scales_at + 8 * i);
                    const float first = __fmul_rn(of_tokens.x, row_scale), second = __fmul_rn(of_tokens.y, row_scale);
                    total[i] = __fmaf_rn(sums[i], first, total[i]);
                    total[i + 1] = __fmaf_rn(sums[i + 1], second, total[i + 1]);
                    total[i + 2] = __fmaf_rn(sums[i + 2], first, total[i + 2]);
                    total[i + 3] = __fmaf_rn(sums[i + 3], second, total[i + 3]);
                }
            } else {
                start_products();
#pragma unroll
                for (int step = 0; step < STEPS; ++step)
                    multiply<TOKENS>(total, left + 2 * step, right + 2 * step, 1);
                commit_products();
                wait_for_products();
#pragma unroll
                for (int i = 0; i < HALF; ++i) asm volatile("" : "+f"(total[i]) :: "memory");
            }
            release_to_all(ring.is_free(), lane);
        }
        // Results lie behind the stages, or if the tile is the only one in their place, once all teams have read them.
        const bool is_only = p.tiles_across * p.num_parts <= gridDim.x;
        const u32 results = ring.data + (is_only ? 0 : ring.num_stages * ring.stage_bytes);
        if (is_only) asm volatile("bar.sync 1, %0;" :: "r"(blockDim.x / TEAM * TEAM) : "memory");
        if (p.num_parts == 1) store<TOKENS, true>(p, tile, total, results, team, thread);
        else store<TOKENS, false>(p, tile, total, results, team, thread);
    }
}

extern __shared__ u8 dynamic_shared[];

template <int TOKENS>
__device__ __forceinline__ void multiply_few_rows(const FewRowsParams& p) {
    __shared__ u64 of_stages[3 * MOST_STAGES];
    // Exchanges tell the compiler that a warp's lanes have the same, and keep it from computing that again.
    const u32 num_teams = blockDim.x / TEAM, warp = __shfl_sync(~0u, threadIdx.x / WARP, 0);
    const u32 team = warp / (TEAM / WARP);
    // The order of swizzled pieces follows from addresses.
    const u32 data = (shared_address(dynamic_shared) + SWIZZLE - 1) / SWIZZLE * SWIZZLE;
    const Ring<TOKENS> ring(p, __shfl_sync(~0u, data, 0), __shfl_sync(~0u, shared_address(of_stages), 0));
    const int lane = threadIdx.x % WARP;
    const auto begin = [] {
        __syncthreads();
        arrive_in_cluster();
        let_next_kernel_get_ready();
    };
    if (warp == num_teams * (TEAM / WARP)) {
        WeightLoader<TOKENS> loader(p, ring);
        if (lane == 0) {
            for (int stage = 0; stage < p.num_stages; ++stage) start_barrier(&of_stages[stage], 1);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            loader.load_first();
        }
        __syncwarp();
        begin();
        if (lane == 0) loader.load_others();
        wait_for_cluster();
    } else if (team == num_teams) {
        if (lane == 0) {
            prefetch_map(p.x);
            for (int stage = 0; stage < p.num_stages; ++stage) {
                start_barrier(&of_stages[MOST_STAGES + stage], 1 + WARP);
                start_barrier(&of_stages[2 * MOST_STAGES + stage], CLUSTER * num_teams * (TEAM / WARP));
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
        begin();
        TokenLoader<TOKENS>(p, lane).load(ring);
    } else {
        begin();
        multiply_tiles<TOKENS>(p, ring, team, threadIdx.x % TEAM);
    }
    // The other blocks of the cluster arrive at barriers of this one.
    arrive_in_cluster();
    wait_for_cluster();
}

#define KERNEL(tokens)                                                                         \
    extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)                               \
        few_rows_##tokens(const __grid_constant__ FewRowsParams p) {                           \
        multiply_few_rows<tokens>(p);                                                          \
    }
KERNEL(16)
KERNEL(32)
KERNEL(64)
