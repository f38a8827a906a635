// Scores the positions that queries see, over paged fp8 keys, on Hopper's tensor cores.
//
// All blocks are resident, and each has an equal share of all tiles of all queries, however unequal these are: a tile
// is 64 positions of one query. One warp copies the share's tiles into a ring in shared memory, each by one bulk copy
// as far ahead as the ring allows, so that the keys come as fast as memory gives them. The other four warps have a tile
// each and multiply four at a time with all heads, 16 positions of each in one instruction. A stage of the ring always
// has tiles of the same warp: one that waited for every second tile of a stage would take the tile before for its own,
// because a barrier tells phases apart by whether their number is even.
#include "index_logits.cuh"

constexpr int SCORERS = 4;                     // warps that multiply
constexpr int NUM_THREADS = WARP_GROUP + WARP;
static_assert(STAGES % SCORERS == 0, "a stage has one warp's tiles");

// Dynamic shared memory, which begins where queries may lie.
struct Shared {
    u8 query[QUERY_BYTES];
    u32 ring[STAGES][TILE_WORDS];
    u64 is_full[STAGES], is_free[STAGES];
    float head_weights[NUM_HEADS];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host knows the size");

// Tiles of one query that a block scores.
struct Piece {
    int token, row, length;
    int first_tile, num_tiles;
    // How many tiles of the ring it takes: as many of each warp. Those behind its own have nothing in them.
    __device__ int num_places() const { return (num_tiles + SCORERS - 1) / SCORERS * SCORERS; }
};

// This block's share of all tiles, as pieces of queries. All lanes of a warp have the same pieces.
struct Share {
    const LogitsParams& p;
    int stop;                      // queries from this one on are padding
    int token, tile;               // where the next piece begins
    int left;                      // tiles that the share still has

    __device__ Share(const LogitsParams& params, int lane) : p(params), token(params.first_token), tile(0) {
        const int num_real = *p.num_real;
        stop = p.stop_token < num_real ? p.stop_token : num_real;
        int total = 0;
        for (int at = token + lane; at < p.stop_token; at += WARP) total += tiles_of(length_of(p, at, stop));
        total = __reduce_add_sync(~0u, total);
        const int blocks = static_cast<int>(gridDim.x), even = (total + blocks - 1) / blocks;
        const int size = even > p.min_tiles ? even : p.min_tiles;
        const i64 first = static_cast<i64>(blockIdx.x) * size;
        left = first < total ? (size < total - first ? size : static_cast<int>(total - first)) : 0;
        if (left) find(static_cast<int>(first), lane);
    }

    // Finds the query with this tile, the numbers of tiles being counted over all queries.
    __device__ void find(int wanted, int lane) {
        for (;; token += WARP) {
            const int tiles = tiles_of(length_of(p, token + lane, stop));
            const int behind = sum_up_to_lane(tiles, lane);
            const u32 ends_later = __ballot_sync(~0u, behind > wanted);
            if (ends_later) {
                const int found = __ffs(ends_later) - 1;
                tile = wanted - __shfl_sync(~0u, behind - tiles, found);
                token += found;
                return;
            }
            wanted -= __shfl_sync(~0u, behind, WARP - 1);
        }
    }

    // Takes the next piece. False: there is none.
    __device__ bool take(Piece& piece) {
        if (left == 0) return false;
        int length = length_of(p, token, stop);
        while (length == 0) length = length_of(p, ++token, stop);
        const int rest = tiles_of(length) - tile;
        piece = {token, static_cast<int>(p.req_rows[token]), length, tile, rest < left ? rest : left};
        left -= piece.num_tiles;
        ++token;
        tile = 0;
        return true;
    }
};

// The loading warp: copies the tiles of all pieces.
__device__ void load_tiles(const LogitsParams& p, Shared& shared, int lane) {
    Share share(p, lane);
    Piece piece;
    Loader loader{shared.ring, shared.is_full, shared.is_free};
    while (share.take(piece)) {
        const int* pages = p.page_table + static_cast<i64>(piece.row) * p.max_pages;
        loader.load(p.keys, pages, piece.first_tile, piece.num_tiles, piece.num_places(), lane);
    }
}

// Adds to the sums the products of 16 positions of each warp's tile, 32 of their numbers, with those of all heads.
// `query`: what the instruction knows of the heads' place.
__device__ __forceinline__ void multiply(float (&sums)[NUM_HEADS / 2], const u32 (&keys)[4], u64 query, int has_sums) {
#if __CUDA_ARCH_FEAT_SM90_ALL
#if NUM_HEADS == 64
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12,"
        " %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},"
        " {%32, %33, %34, %35}, %36, p, 1, 1; }"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]),
          "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]),
          "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]),
          "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), "+f"(sums[24]), "+f"(sums[25]),
          "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31])
        : "r"(keys[0]), "r"(keys[1]), "r"(keys[2]), "r"(keys[3]), "l"(query), "r"(has_sums));
#else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12,"
        " %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1; }"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]),
          "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]),
          "+f"(sums[14]), "+f"(sums[15])
        : "r"(keys[0]), "r"(keys[1]), "r"(keys[2]), "r"(keys[3]), "l"(query), "r"(has_sums));
#endif
#endif
}

// The four scoring warps: each scores every fourth tile of a piece.
__device__ void score_tiles(const LogitsParams& p, Shared& shared, int thread) {
    const int warp = thread / WARP, lane = thread % WARP, quad = lane / 4, in_quad = lane % 4;
    Share share(p, lane);
    Piece piece;
    u32 before = 0;  // tiles of the ring that the pieces before took
    for (bool is_first = true; share.take(piece); is_first = false) {
        if (!is_first) Barrier<1, WARP_GROUP>::wait();  // nobody reads the last query any more
        prepare_query(p, piece.token, shared.query, shared.head_weights, thread);
        Barrier<1, WARP_GROUP>::wait();
        float weights[2 * COLUMNS];
        read_weights(weights, shared.head_weights, in_quad);
        const u64 place = place_of(shared.query);
        const int num_places = piece.num_places();
        float* logits = p.logits + (piece.token - p.first_token) * p.logits_stride;

        for (int at = warp; at < num_places; at += SCORERS) {
            const u32 number = before + at, stage = number % STAGES;
            // Positions 4 * quad + i and 32 + 4 * quad + i are rows quad and quad + 8 of product i.
            const u32* tile = shared.ring[stage] + 4 * quad * KEY_WORDS;
            wait_for_phase(&shared.is_full[stage], number / STAGES);
            float scores[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 keys[DIM / 32][4];
#pragma unroll
                for (int k = 0; k < DIM / 32; ++k)
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const int word = (i + 32 * (j % 2)) * KEY_WORDS + 8 * k + 4 * (j / 2) + in_quad;
                        keys[k][j] = tile[word];
                    }
                float products[NUM_HEADS / 2];
                start_products();
#pragma unroll
                for (int k = 0; k < DIM / 32; ++k) multiply(products, keys[k], place + 2 * k, k);
                commit_products();
                wait_for_products();
#pragma unroll
                for (int which = 0; which < 2; ++which) {
                    // Every lane of four has the sum over all heads then.
                    float total = add_heads(products, weights, which);
                    total = sum(total, __shfl_xor_sync(~0u, total, 2));
                    scores[which][i] = sum(total, __shfl_xor_sync(~0u, total, 1));
                }
            }
            // Of the four lanes with the same scores the first writes the lower positions, the second the others.
            const int half = 32 * (in_quad % 2);
            float scored[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float scale = __uint_as_float(tile[(half + i) * KEY_WORDS + DIM / 4]);
                scored[i] = product(in_quad % 2 ? scores[1][i] : scores[0][i], scale);
            }
            release(&shared.is_free[stage], lane);
            const int position = (piece.first_tile + at) * TILE + half + 4 * quad;
            if (in_quad < 2 && at < piece.num_tiles) {
                if (position + 4 <= piece.length)
                    *reinterpret_cast<float4*>(logits + position) = {scored[0], scored[1], scored[2], scored[3]};
                else
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (position + i < piece.length) logits[position + i] = scored[i];
            }
        }
        before += num_places;
    }
}

extern __shared__ __align__(SWIZZLE) u8 dynamic_shared[];

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) paged_logits(const LogitsParams p) {
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
    // The order of swizzled pieces follows from addresses.
    if (shared_address(shared.query) % SWIZZLE != 0) __trap();
    if (threadIdx.x < STAGES) {
        start_barrier(&shared.is_full[threadIdx.x], 1);
        start_barrier(&shared.is_free[threadIdx.x], 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    let_next_kernel_get_ready();
    wait_for_kernel_in_front();
    if (threadIdx.x < WARP_GROUP) score_tiles(p, shared, threadIdx.x);
    else load_tiles(p, shared, threadIdx.x - WARP_GROUP);
}
