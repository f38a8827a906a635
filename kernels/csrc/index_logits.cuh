// What the kernels of the indexer's logits on Hopper's tensor cores share: their parameters, tiles of fp8 keys that
// bulk copies bring into shared memory, queries in fp8, and the order of additions.
//
// A key is DIM bytes and the word of its scale: 33 words. A warp reads them by word into the registers from which the
// tensor cores take them, positions 4 apart in one load, so that the 32 words lie in different banks. The products and
// their sums are those of kernels/triton_indexer.py, in the same order: for each lane its heads 8 apart in pairs, then
// the lanes 2 and 1 apart. Additions and products are written in PTX, because a compiler's option would flush small
// numbers to 0.
#pragma once
#include "hopper.cuh"

constexpr int DIM = 128;                       // numbers of a head's query, and of a key
constexpr int KEY_WORDS = DIM / 4 + 1;
constexpr int TILE = 64;                       // positions
constexpr int TILE_WORDS = TILE * KEY_WORDS;
constexpr int TILE_BYTES = 4 * TILE_WORDS;
constexpr int WARP_GROUP = 4 * WARP;           // threads that multiply together
constexpr int COLUMNS = NUM_HEADS / 8;         // pairs of heads that a lane has
constexpr int THREADS_OF_HEAD = WARP_GROUP / NUM_HEADS;
constexpr int QUERY_BYTES = NUM_HEADS * DIM;
constexpr float FP8_MAX = 448.0f;
static_assert(NUM_HEADS == 32 || NUM_HEADS == 64, "sizes of the instructions");
static_assert(DIM == SWIZZLE_ROW, "a head is one row of swizzled pieces");
static_assert(TILE_BYTES % 16 == 0 && PAGE_SIZE % TILE == 0, "a tile is one aligned piece of a page");

struct LogitsParams {
    const u16* q_index;            // bfloat16 [num_tokens][NUM_HEADS][DIM]
    const float* weights;          // [num_tokens][NUM_HEADS]
    const u8* keys;                // [num_slots][DIM + 4]
    const int* page_table;         // [num_rows][max_pages]
    const i64* req_rows;           // [num_tokens]
    const i64* query_positions;    // [num_tokens]
    const int* num_real;           // [1]
    float* logits;                 // [block_tokens][logits_stride], 16-byte aligned rows
    i64 logits_stride;
    int first_token, stop_token;   // queries to score; the first has the first row of logits
    int num_rows, max_pages;
    int max_len;                   // positions from this one on are not seen
    int top_k;                     // queries that see no more are not scored
    float score_scale;
    int min_tiles;                 // fewest tiles that are worth a block's start (paged_logits.cu)
};

__device__ __forceinline__ float product(float a, float b) {
    float result;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ float sum(float a, float b) {
    float result;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ float product_and_sum(float a, float b, float c) {
    float result;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
    return result;
}
// The positive part, and NaN of NaN.
__device__ __forceinline__ float positive_part(float value) {
    float result;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(value));
    return result;
}

// Returns how many positions of its row a query sees; 0 if it is padding, as all from `stop` on, or selects all that it
// sees. Padding is read, too, so that the loads need not wait for that of `stop`.
__device__ __forceinline__ int length_of(const LogitsParams& p, int token, int stop) {
    if (token >= p.stop_token) return 0;
    const i64 row = p.req_rows[token], seen = p.query_positions[token] + 1;
    const int length = static_cast<int>(seen < p.max_len ? seen : p.max_len);
    return token < stop && row >= 0 && row < p.num_rows && length > p.top_k ? length : 0;
}
__device__ __forceinline__ int tiles_of(int length) { return (length + TILE - 1) / TILE; }

// Returns where a tile of a row with these pages begins in the keys.
__device__ __forceinline__ i64 first_byte_of(const int* pages, int tile) {
    const int start = tile * TILE;
    return (static_cast<i64>(pages[start / PAGE_SIZE]) * PAGE_SIZE + start % PAGE_SIZE) * (4 * KEY_WORDS);
}

// The loading warp's side of a ring of tiles in shared memory.
struct Loader {
    u32 (*ring)[TILE_WORDS];       // [STAGES]
    u64 *is_full, *is_free;        // [STAGES]: a phase ends when a tile has arrived, and when it has been read
    u32 stage = 0, turn = 0;

    // Copies tiles of a row with these pages, each as soon as a stage is free. The places behind the tiles, up to
    // `num_places`, are full with nothing in them.
    __device__ void load(const u8* keys, const int* pages, int first_tile, int num_tiles, int num_places, int lane) {
        for (int first = 0; first < num_places; first += WARP) {
            const int rest = num_tiles - first, count = num_places - first < WARP ? num_places - first : WARP;
            i64 own_from = 0;
            if (lane < rest) own_from = first_byte_of(pages, first_tile + first + lane);
            for (int number = 0; number < count; ++number) {
                const i64 from = __shfl_sync(~0u, own_from, number);
                if (lane == 0) {
                    const u32 full = shared_address(&is_full[stage]);
                    if (turn > 0) wait_for_phase(&is_free[stage], turn - 1);
                    if (number < rest) {
                        expect_bytes(full, TILE_BYTES);
                        copy_bulk(shared_address(ring[stage]), keys + from, TILE_BYTES, full);
                    } else arrive(full);
                }
                if (++stage == STAGES) {
                    stage = 0;
                    ++turn;
                }
            }
        }
    }
};

// Rounds a query's heads to fp8 and writes them where the tensor cores read them, and to `head_weights` the heads'
// weights times the scales, which are those of kernels/triton_kv_format.py. All threads of a warp group call it.
__device__ void prepare_query(const LogitsParams& p, int token, u8* query, float* head_weights, int thread) {
    constexpr int NUMBERS = DIM / THREADS_OF_HEAD;
    const int head = thread / THREADS_OF_HEAD, part = thread % THREADS_OF_HEAD;
    const i64 head_row = static_cast<i64>(token) * NUM_HEADS + head;
    const uint4* from = reinterpret_cast<const uint4*>(p.q_index + head_row * DIM + part * NUMBERS);
    float numbers[NUMBERS], peak = 0.0f;
#pragma unroll
    for (int i = 0; i < NUMBERS / 8; ++i) {
        const uint4 loaded = from[i];
        const u32 words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            numbers[8 * i + 2 * j] = __uint_as_float(words[j] << 16);
            numbers[8 * i + 2 * j + 1] = __uint_as_float(words[j] & 0xffff0000u);
        }
    }
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) peak = fmaxf(peak, fabsf(numbers[i]));
#pragma unroll
    for (int apart = 1; apart < THREADS_OF_HEAD; apart *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, apart));
    float quotient;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(quotient) : "f"(peak), "f"(FP8_MAX));
    u32 bits = (__float_as_uint(quotient) + 0x7fffffu) & 0x7f800000u;
    if (bits == 0 || bits == 0x7f800000u) bits = 0x3f800000u;
    const float reciprocal = __uint_as_float(0x7f000000u - bits);
#pragma unroll
    for (int i = 0; i < NUMBERS / 16; ++i) {
        u32 words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float* four = numbers + 16 * i + 4 * j;
            asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;"
                " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high}; }"
                : "=r"(words[j])
                : "f"(product(four[0], reciprocal)), "f"(product(four[1], reciprocal)),
                  "f"(product(four[2], reciprocal)), "f"(product(four[3], reciprocal)));
        }
        const int piece = (part * NUMBERS) / 16 + i;
        *reinterpret_cast<uint4*>(query + head * DIM + (piece ^ head % 8) * 16) = {words[0], words[1], words[2], words[3]};
    }
    if (part == 0)
        head_weights[head] = product(p.weights[head_row], product(__uint_as_float(bits), p.score_scale));
    fence_async_proxy();
}

// Returns the weighted sum over a lane's heads of one query for one of its two positions. `products`: those of the query
// that the lane has, of two heads for the first position, then for the second, and so on; `weights`: those of its heads.
__device__ __forceinline__ float add_heads(const float* products, const float* weights, int which) {
    float total = product(weights[1], positive_part(products[2 * which + 1]));
    total = product_and_sum(weights[0], positive_part(products[2 * which]), total);
#pragma unroll
    for (int column = 1; column < COLUMNS; ++column) {
        const int at = 4 * column + 2 * which;
        total = product_and_sum(weights[2 * column], positive_part(products[at]), total);
        total = product_and_sum(weights[2 * column + 1], positive_part(products[at + 1]), total);
    }
    return total;
}

// Reads the weights of the lane's heads of one query.
__device__ __forceinline__ void read_weights(float* weights, const float* head_weights, int in_quad) {
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
        weights[2 * column] = head_weights[8 * column + 2 * in_quad];
        weights[2 * column + 1] = head_weights[8 * column + 2 * in_quad + 1];
    }
}
