// Multiplies tokens by the int4 matrices of their experts on Hopper's tensor cores.
//
// There is one block for each multiprocessor, and it takes one piece of work after the other: one tile of tokens and
// BLOCK_ROWS rows of one of its expert's matrices. A ring in shared memory has a stage for each STAGE_COLUMNS columns.
// Three threads copy weights and tokens into it, and one warp scales, each as far ahead as the ring allows, so that
// weights come as fast as memory gives them. The tokens are already in the order of experts, and a tile's part of a
// stage is one or two pieces of memory (kernels/triton_int4_tokens.py). TEAMS teams of four warps multiply.
//
// The matrix is the left operand: a thread reads the 16 bytes that are its part of 64 rows and columns
// (kernels/int4.py), and makes numbers of them in the registers from which tensor cores take them, while the tensor
// cores multiply the numbers before these. A team has 64 rows and multiplies all tokens of the tile by them, so that a
// weight is taken apart once for each tile.
//
// In bfloat16, 0x4300 is 128, and with four bits at its end 128 + q; -(128 + zero) is added, which is exact. In fp8, q
// itself as a byte is q / 512; the zero times the sum of the tokens' numbers in the group is subtracted from the sum of
// the group. A row is added up by groups, and within a group in the instruction's steps, whatever the tile.
#include "hopper.cuh"

constexpr int TEAM = 4 * WARP;                 // threads
constexpr int UNIT_ROWS = 64;                  // rows of the matrix that a team multiplies
constexpr int BLOCK_ROWS = TEAMS * UNIT_ROWS;
constexpr int STAGE_COLUMNS = 128;
constexpr int UNIT_BYTES = UNIT_ROWS * STAGE_COLUMNS / 2;
constexpr int GROUPS = STAGE_COLUMNS / GROUP;  // of a stage
constexpr int NUMBER_BYTES = IS_ROUNDED ? 1 : 2;
constexpr int TOKEN_BYTES = STAGE_COLUMNS * NUMBER_BYTES;
constexpr int SLICES = TOKEN_BYTES / SWIZZLE_ROW;   // rows of shared memory that a stage's part of a token takes
constexpr int STEPS = GROUP * NUMBER_BYTES / 32;    // instructions for a group
constexpr int PARTS = STEPS > 1 ? 2 : 1;       // in which these are taken
constexpr int PART_STEPS = STEPS / PARTS;
constexpr int PART_WORDS = GROUP / 16 / PARTS; // of eight weights that a thread has of a part
constexpr int UNIT_WORDS = GROUP < 64 ? 2 : 4; // that are adjacent
constexpr int PART_DISTANCE = GROUP == 128 ? TEAM * UNIT_WORDS * 4 : PART_WORDS * 4;  // bytes from part to part
constexpr int NUM_MULTIPLYING = TEAMS * TEAM;
constexpr int NUM_THREADS = NUM_MULTIPLYING + TEAM;  // with those that copy
static_assert(TILE_ROWS == 16 || TILE_ROWS == 32 || TILE_ROWS == 64 || TILE_ROWS == 128, "sizes of instructions below");
static_assert(VECTOR == 4 || VECTOR == 16, "bytes of scales and zeros that a thread copies at a time");

struct Int4Params {
    const u8* tokens;              // [slices][num_rows][SWIZZLE_ROW]: the rows' numbers in the order of experts
    const float* token_sums;       // with fp8 [groups][num_rows]: sums of a group's numbers, divided by 512
    const float* factors;          // [num_rows]: of the rows' results
    const int* targets;            // [num_rows]: their rows of out
    const u8* values;              // int4 [num_experts][num_matrices][units down][units across]
    const u8* scales;              // [num_experts][num_matrices][groups][rows]
    const u8* zeros;               // of that shape
    u16* out;                      // bfloat16 [num_rows][num_matrices * rows]
    const int* starts;             // these three are those of Routing
    const int* tile_starts;
    const int* tile_experts;
    int first_expert, num_experts, num_matrices;
    int rows, columns;             // of a matrix
    int num_rows;                  // of tokens
};

// Where in a stage its parts begin. First are tokens [SLICES][TILE_ROWS][SWIZZLE_ROW], swizzled. Factors and targets
// are in the last stage of a piece only.
constexpr int WEIGHTS_AT = TILE_ROWS * TOKEN_BYTES;
constexpr int SCALES_AT = WEIGHTS_AT + TEAMS * UNIT_BYTES;
constexpr int GROUP_SCALES = BLOCK_ROWS * SCALE_BYTES;
constexpr int ZEROS_AT = SCALES_AT + GROUPS * GROUP_SCALES;
constexpr int GROUP_ZEROS = HAS_ZEROS ? BLOCK_ROWS : 16;
constexpr int SUMS_AT = ZEROS_AT + GROUPS * GROUP_ZEROS;
constexpr int GROUP_SUMS = IS_ROUNDED ? TILE_ROWS : 4;
constexpr int FACTORS_AT = SUMS_AT + GROUPS * GROUP_SUMS * 4;
constexpr int TARGETS_AT = FACTORS_AT + TILE_ROWS * 4;
// What the piece is: its number of tokens, of which 0 says that there are no more, and the first row of which matrix.
constexpr int PIECE_AT = TARGETS_AT + TILE_ROWS * 4;
static_assert(PIECE_AT + 12 <= STAGE_BYTES && STAGE_BYTES % SWIZZLE == 0, "the host knows the size");

// A stage is full when its bulk copies, the thread that says how many bytes they are, and one warp have arrived, and
// free when all teams have read it. The barriers of all stages are behind each other, first those that say it is full.
constexpr int FREE_AT = STAGES * 8;

// Where in the ring a warp is.
struct Place {
    u32 stage = 0, turn = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            ++turn;
        }
    }
};

// A tile of tokens and BLOCK_ROWS rows of a matrix.
struct Work {
    int expert;                    // counted from the first
    int matrix, first_row;
    int place, num_tokens;         // in the order of experts
    int num_rows;                  // of the matrix
};

// The pieces of work of a block.
struct Share {
    const Int4Params& p;
    int first_tile, across, num_pieces, piece;

    __device__ __forceinline__ Share(const Int4Params& params) : p(params), piece(blockIdx.x) {
        first_tile = p.tile_starts[p.first_expert];
        across = (p.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        num_pieces = (p.tile_starts[p.first_expert + p.num_experts] - first_tile) * p.num_matrices * across;
    }
    __device__ __forceinline__ bool take(Work& work) {
        if (piece >= num_pieces) return false;
        const int column = piece / across, tile = first_tile + column / p.num_matrices;
        const int expert = p.tile_experts[tile];
        work.expert = expert - p.first_expert;
        work.matrix = column % p.num_matrices;
        work.first_row = piece % across * BLOCK_ROWS;
        work.place = p.starts[expert] + (tile - p.tile_starts[expert]) * TILE_ROWS;
        const int rest = p.starts[expert + 1] - work.place;
        work.num_tokens = rest < TILE_ROWS ? rest : TILE_ROWS;
        work.num_rows = p.rows - work.first_row < BLOCK_ROWS ? p.rows - work.first_row : BLOCK_ROWS;
        piece += gridDim.x;
        return true;
    }
};

// Walks over the stages of this block's pieces: calls `begin` for each piece, and `copy` for each stage when it is
// free, with its address, that of its barrier, and its first column. Returns the free stage behind the last one.
template <typename Begin, typename Copy>
__device__ __forceinline__ Place for_each_stage(const Int4Params& p, u32 ring, u32 barriers, Begin begin, Copy copy) {
    Share share(p);
    Work work;
    Place at;
    while (share.take(work)) {
        begin(work);
        for (int column = 0; column < p.columns; column += STAGE_COLUMNS, at.advance()) {
            if (at.turn > 0) wait_for_phase(barriers + FREE_AT + at.stage * 8, at.turn - 1);
            copy(ring + at.stage * STAGE_BYTES, barriers + at.stage * 8, column);
        }
    }
    if (at.turn > 0) wait_for_phase(barriers + FREE_AT + at.stage * 8, at.turn - 1);
    return at;
}
__device__ __forceinline__ int columns_from(const Int4Params& p, int column) {
    return p.columns - column < STAGE_COLUMNS ? p.columns - column : STAGE_COLUMNS;
}

__device__ __forceinline__ void store_shared(u32 address, int value) {
    asm volatile("st.shared.u32 [%0], %1;" :: "r"(address), "r"(value) : "memory");
}

// One thread for the first half of the units, and one for the second: copies weights. The first also says what the
// piece is.
template <bool IS_FIRST>
__device__ void copy_weights(const Int4Params& p, u32 ring, u32 barriers) {
    constexpr int MOST = TEAMS < 2 ? 1 : TEAMS / 2, FIRST = IS_FIRST ? 0 : MOST;
    const i64 unit_stride = static_cast<i64>(p.columns) * (UNIT_ROWS / 2);
    const int units_down = (p.rows + UNIT_ROWS - 1) / UNIT_ROWS;
    const u8* from;
    int units, first_row, num_tokens, matrix;
    const Place end = for_each_stage(
        p, ring, barriers,
        [&](const Work& work) {
            matrix = work.matrix, first_row = work.first_row, num_tokens = work.num_tokens;
            units = (work.num_rows + UNIT_ROWS - 1) / UNIT_ROWS;
            const i64 number = static_cast<i64>(work.expert) * p.num_matrices + work.matrix;
            from = p.values + (number * units_down + work.first_row / UNIT_ROWS + FIRST) * unit_stride;
        },
        [&](u32 stage, u32 is_full, int column) {
            const int bytes = columns_from(p, column) * (UNIT_ROWS / 2);
            if (IS_FIRST) {
                store_shared(stage + PIECE_AT, num_tokens);
                store_shared(stage + PIECE_AT + 4, first_row);
                store_shared(stage + PIECE_AT + 8, matrix);
                expect_bytes(is_full, units * bytes + SLICES * num_tokens * SWIZZLE_ROW);
            }
#pragma unroll
            for (int unit = 0; unit < MOST; ++unit)
                if (FIRST + unit < units)
                    copy_bulk(stage + WEIGHTS_AT + (FIRST + unit) * UNIT_BYTES, from + unit * unit_stride, bytes,
                              is_full);
            from += UNIT_BYTES;
        });
    if (IS_FIRST) {
        store_shared(ring + end.stage * STAGE_BYTES + PIECE_AT, 0);
        arrive(barriers + end.stage * 8);
    }
}

// One thread: copies tokens, also the padding behind their last column.
__device__ void copy_tokens(const Int4Params& p, u32 ring, u32 barriers) {
    const i64 slice_stride = static_cast<i64>(p.num_rows) * SWIZZLE_ROW;
    const u8* from;
    int bytes;
    for_each_stage(
        p, ring, barriers,
        [&](const Work& work) {
            from = p.tokens + static_cast<i64>(work.place) * SWIZZLE_ROW;
            bytes = work.num_tokens * SWIZZLE_ROW;
        },
        [&](u32 stage, u32 is_full, int) {
#pragma unroll
            for (int slice = 0; slice < SLICES; ++slice) {
                copy_bulk(stage + slice * (TILE_ROWS * SWIZZLE_ROW), from, bytes, is_full);
                from += slice_stride;
            }
        });
}

// One warp: copies scales and zeros, the tokens' sums, and at the end of a piece what belongs to results.
__device__ void copy_scales(const Int4Params& p, u32 ring, u32 barriers, int lane) {
    const u8 *scales, *zeros;
    const float* sums;
    int scale_bytes, num_zeros, num_tokens, place;
    const Place end = for_each_stage(
        p, ring, barriers,
        [&](const Work& work) {
            const i64 matrix = static_cast<i64>(work.expert) * p.num_matrices + work.matrix;
            const i64 first = matrix * (p.columns / GROUP) * p.rows + work.first_row;
            scales = p.scales + first * SCALE_BYTES + lane * VECTOR;
            zeros = p.zeros + first + lane * VECTOR;
            num_tokens = work.num_tokens, place = work.place;
            sums = p.token_sums + place;
            scale_bytes = work.num_rows * SCALE_BYTES - lane * VECTOR;  // from this lane's on
            num_zeros = work.num_rows - lane * VECTOR;
        },
        [&](u32 stage, u32 is_full, int column) {
            const int columns = columns_from(p, column);
            const u32 scales_at = stage + SCALES_AT + lane * VECTOR, zeros_at = stage + ZEROS_AT + lane * VECTOR;
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                if (group * GROUP >= columns) break;
#pragma unroll
                for (int byte = 0; byte < GROUP_SCALES; byte += VECTOR * WARP)
                    if (byte < scale_bytes) copy_async(scales_at + group * GROUP_SCALES + byte, scales + byte, VECTOR);
                scales += p.rows * SCALE_BYTES;
                if constexpr (HAS_ZEROS) {
#pragma unroll
                    for (int byte = 0; byte < GROUP_ZEROS; byte += VECTOR * WARP)
                        if (byte < num_zeros) copy_async(zeros_at + group * GROUP_ZEROS + byte, zeros + byte, VECTOR);
                    zeros += p.rows;
                }
                if constexpr (IS_ROUNDED) {
                    const u32 sums_at = stage + SUMS_AT + group * (GROUP_SUMS * 4);
                    for (int token = lane; token < num_tokens; token += WARP)
                        copy_async(sums_at + token * 4, sums + token, 4);
                    sums += p.num_rows;
                }
            }
            if (column + STAGE_COLUMNS >= p.columns)
                for (int token = lane; token < num_tokens; token += WARP) {
                    copy_async(stage + FACTORS_AT + token * 4, p.factors + place + token, 4);
                    copy_async(stage + TARGETS_AT + token * 4, p.targets + place + token, 4);
                }
            arrive_after_async_copies(is_full);
        });
    arrive_after_async_copies(barriers + end.stage * 8);
}

#define SUMS4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SUMS16(i) SUMS4(i), SUMS4(i + 4), SUMS4(i + 8), SUMS4(i + 12)
#define PLACES8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PLACES16 PLACES8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PLACES32 PLACES16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PLACES48 PLACES32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define PLACES64 PLACES48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#if IS_ROUNDED
#define KIND(n) "wgmma.mma_async.sync.aligned.m64n" n "k32.f32.e4m3.e4m3 "
#define OPTIONS "p, 1, 1; }"
#else
#define KIND(n) "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 "
#define OPTIONS "p, 1, 1, 0; }"
#endif
#define OPERANDS "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(has_sums)

// Adds the products of one step to the sums. `left`: this thread's part of the matrix; `right`: the tokens' place.
template <int TOKENS>
__device__ __forceinline__ void multiply(float (&sums)[TOKENS / 2], const u32 (&left)[4], u64 right, int has_sums) {
#if __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (TOKENS == 16)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %13, 0;\n" KIND("16")
                     "{" PLACES8 "}, {%8, %9, %10, %11}, %12, " OPTIONS
                     : SUMS4(0), SUMS4(4) : OPERANDS);
    else if constexpr (TOKENS == 32)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %21, 0;\n" KIND("32")
                     "{" PLACES16 "}, {%16, %17, %18, %19}, %20, " OPTIONS
                     : SUMS16(0) : OPERANDS);
    else if constexpr (TOKENS == 64)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n" KIND("64")
                     "{" PLACES32 "}, {%32, %33, %34, %35}, %36, " OPTIONS
                     : SUMS16(0), SUMS16(16) : OPERANDS);
    else if constexpr (TOKENS == 96)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %53, 0;\n" KIND("96")
                     "{" PLACES48 "}, {%48, %49, %50, %51}, %52, " OPTIONS
                     : SUMS16(0), SUMS16(16), SUMS16(32) : OPERANDS);
    else
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0;\n" KIND("128")
                     "{" PLACES64 "}, {%64, %65, %66, %67}, %68, " OPTIONS
                     : SUMS16(0), SUMS16(16), SUMS16(32), SUMS16(48) : OPERANDS);
#endif
}

// Four bits of each half of a word, and what is to be the other bits.
__device__ __forceinline__ u32 bits_of(u32 word, u32 mask, u32 others) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "r"(mask), "r"(others));
    return result;
}
__device__ __forceinline__ u32 sum_of_pairs(u32 a, u32 b) {
    u32 result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(0x3f803f80), "r"(b));
    return result;
}

// Keeps the compiler from computing a value later than here, and from using one that the tensor cores write earlier.
__device__ __forceinline__ void keep(u32& value) { asm volatile("" : "+r"(value) :: "memory"); }
__device__ __forceinline__ void keep(float& value) { asm volatile("" : "+f"(value) :: "memory"); }

// A thread's zeros and scales are those of its two rows of a unit, 8 apart.
struct Zeros {
    u32 upper = 8, lower = 8;
};

// Makes the left operand of step `step` of a group.
__device__ __forceinline__ void take_apart(u32 (&left)[4], const u32 (&words)[PART_WORDS], int step, Zeros zeros) {
    if constexpr (IS_ROUNDED) {
        const u32 first = words[2 * step], second = words[2 * step + 1];
        left[0] = first & 0x0f0f0f0f;
        left[1] = first >> 4 & 0x0f0f0f0f;
        left[2] = second & 0x0f0f0f0f;
        left[3] = second >> 4 & 0x0f0f0f0f;
    } else {
        const u32 word = words[step];
        const u32 upper = zeros.upper * 0x10001 | 0xc300c300, lower = zeros.lower * 0x10001 | 0xc300c300;
        left[0] = sum_of_pairs(bits_of(word, 0x000f000f, 0x43004300), upper);
        left[1] = sum_of_pairs(bits_of(word >> 4, 0x000f000f, 0x43004300), lower);
        left[2] = sum_of_pairs(bits_of(word >> 8, 0x000f000f, 0x43004300), upper);
        left[3] = sum_of_pairs(bits_of(word >> 12, 0x000f000f, 0x43004300), lower);
    }
}

// Writes the transpose of 8 rows and 8 tokens: a lane has two adjacent rows' results of its token.
__device__ __forceinline__ u32 transposed(float first, float second) {
    u32 result;
    asm volatile("{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, %2, %1;"
                 " movmatrix.sync.aligned.m8n8.trans.b16 %0, pair; }"
                 : "=r"(result) : "f"(first), "f"(second));
    return result;
}

template <typename T>
__device__ __forceinline__ T shared_at(u32 address) {
    T result;
    if constexpr (sizeof(T) == 1) {
        u32 loaded;
        asm volatile("ld.shared.u8 %0, [%1];" : "=r"(loaded) : "r"(address) : "memory");
        result = static_cast<T>(loaded);
    } else if constexpr (sizeof(T) == 2)
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(result) : "r"(address) : "memory");
    else
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(result) : "r"(address) : "memory");
    return result;
}
__device__ __forceinline__ float2 two_floats_at(u32 address) {
    float2 result;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(result.x), "=f"(result.y) : "r"(address) : "memory");
    return result;
}
__device__ __forceinline__ float scale_at(u32 address) {
    float result;
#if SCALE_KIND == 0
    result = __uint_as_float(shared_at<u32>(address));
#elif SCALE_KIND == 1
    result = __uint_as_float(static_cast<u32>(shared_at<u16>(address)) << 16);
#else
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(shared_at<u16>(address)));
#endif
    return IS_ROUNDED ? 512.0f * result : result;
}

// Multiplies and stores what a team has of a piece. TOKENS: as many as the instructions take.
template <int TOKENS>
__device__ __forceinline__ void multiply_piece(const Int4Params& p, u32 ring, u32 barriers, Place& at, int team,
                                               int thread, int num_tokens) {
    constexpr int HALF = TOKENS / 2;
    constexpr u32 SLICE = TILE_ROWS * SWIZZLE_ROW >> 4;
    const int lane = thread % WARP, quad = lane / 4, in_quad = lane % 4;
    const int row = team * UNIT_ROWS + thread / WARP * 16 + quad;  // and 8 more: the thread's rows
    const int num_groups = p.columns / GROUP;
    // Where in a stage, or in a group's part of it, the thread has weights, scales, zeros and tokens.
    u32 weights_at = WEIGHTS_AT + team * UNIT_BYTES + thread * UNIT_WORDS * 4;
    u32 scales_at = SCALES_AT + row * SCALE_BYTES;
    const u32 zeros_at = ZEROS_AT + row;
    const u32 tokens_at = in_quad * 8;  // of the first float of two
    keep(weights_at);
    keep(scales_at);
    float total[HALF];
#pragma unroll
    for (int i = 0; i < HALF; ++i) total[i] = 0.0f;
    // A group's steps are multiplied in PARTS, each with registers of its own for the left operand. They are filled
    // while the tensor cores multiply the part before.
    u32 left[PARTS][PART_STEPS][4];
    Zeros zeros;
    const auto make_left = [&](u32 stage, int group, int number) {
        const u32 from = stage + weights_at + group * (GROUP * UNIT_ROWS / 2) + number * PART_DISTANCE;
        u32 words[PART_WORDS];
        if constexpr (PART_WORDS == 4)
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(from) : "memory");
        else if constexpr (PART_WORDS == 2)
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from) : "memory");
        else
            words[0] = shared_at<u32>(from);
        if (HAS_ZEROS && number == 0) {
            zeros.upper = shared_at<u8>(stage + zeros_at + group * GROUP_ZEROS);
            zeros.lower = shared_at<u8>(stage + zeros_at + group * GROUP_ZEROS + 8);
        }
#pragma unroll
        for (int step = 0; step < PART_STEPS; ++step) take_apart(left[number][step], words, step, zeros);
#pragma unroll
        for (int i = 0; i < 4 * PART_STEPS; ++i) keep(left[number][i / 4][i % 4]);
    };
    u32 stage = ring + at.stage * STAGE_BYTES;
    const u64 tokens = place_of(stage);
    u32 low = __shfl_sync(~0u, static_cast<u32>(tokens), 0);
    const u32 high = static_cast<u32>(tokens >> 32);
    make_left(stage, 0, 0);
    for (int number = 0; number < num_groups; ++number) {
        const int group = number % GROUPS;
        float sums[HALF];
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            if (i) make_left(stage, group, i);
            start_products();
#pragma unroll
            for (int step = 0; step < PART_STEPS; ++step) {
                const int in_group = i * PART_STEPS + step, in_stage = group * STEPS + in_group;
                const u32 right = low + in_stage / 4 * SLICE + in_stage % 4 * 2;
                multiply<TOKENS>(sums, left[i][step], static_cast<u64>(high) << 32 | right, in_group);
            }
            commit_products();
        }
        const u32 of_group = stage + scales_at + group * GROUP_SCALES;
        const float upper = scale_at(of_group), lower = scale_at(of_group + 8 * SCALE_BYTES);
        const float upper_zero = -static_cast<float>(zeros.upper), lower_zero = -static_cast<float>(zeros.lower);
        const u32 sums_at = stage + SUMS_AT + group * (4 * GROUP_SUMS) + tokens_at;
        const bool is_last = number + 1 == num_groups, ends_stage = (number + 1) % GROUPS == 0 && !is_last;
        const u32 is_free = barriers + FREE_AT + at.stage * 8;
        if constexpr (PARTS == 1) wait_for_products();
        else wait_for_products_but_last();  // the first part's registers are free then
        if (!is_last) {
            if (ends_stage) {
                at.advance();
                stage = ring + at.stage * STAGE_BYTES;
                wait_for_phase(barriers + at.stage * 8, at.turn);
                low = __shfl_sync(~0u, static_cast<u32>(place_of(stage)), 0);
            }
            make_left(stage, (number + 1) % GROUPS, 0);
        }
        wait_for_products();
#pragma unroll
        for (int i = 0; i < HALF; ++i) keep(sums[i]);
#pragma unroll
        for (int i = 0; i < HALF; i += 4) {
            if constexpr (IS_ROUNDED) {
                const float2 of_tokens = two_floats_at(sums_at + 8 * i);
                sums[i] = __fmaf_rn(upper_zero, of_tokens.x, sums[i]);
                sums[i + 1] = __fmaf_rn(upper_zero, of_tokens.y, sums[i + 1]);
                sums[i + 2] = __fmaf_rn(lower_zero, of_tokens.x, sums[i + 2]);
                sums[i + 3] = __fmaf_rn(lower_zero, of_tokens.y, sums[i + 3]);
            }
            total[i] = __fmaf_rn(sums[i], upper, total[i]);
            total[i + 1] = __fmaf_rn(sums[i + 1], upper, total[i + 1]);
            total[i + 2] = __fmaf_rn(sums[i + 2], lower, total[i + 2]);
            total[i + 3] = __fmaf_rn(sums[i + 3], lower, total[i + 3]);
        }
        if (ends_stage) release(is_free, lane);
    }
    const int first_row = shared_at<int>(stage + PIECE_AT + 4) + team * UNIT_ROWS + thread / WARP * 16 + 2 * in_quad;
    const i64 stride = static_cast<i64>(p.num_matrices) * p.rows;
    u16* out = p.out + static_cast<i64>(shared_at<int>(stage + PIECE_AT + 8)) * p.rows + first_row;
    const u32 targets_at = stage + TARGETS_AT + quad * 4;
#pragma unroll
    for (int i = 0; i < HALF; i += 4) {
        const float2 factors = two_floats_at(stage + FACTORS_AT + tokens_at + 8 * i);
        const u32 upper = transposed(total[i] * factors.x, total[i + 1] * factors.y);
        const u32 lower = transposed(total[i + 2] * factors.x, total[i + 3] * factors.y);
        if (2 * i + quad < num_tokens) {
            u32* to = reinterpret_cast<u32*>(out + shared_at<int>(targets_at + 8 * i) * stride);
            if (first_row < p.rows) to[0] = upper;
            if (first_row + 8 < p.rows) to[4] = lower;
        }
    }
    release(barriers + FREE_AT + at.stage * 8, lane);
    at.advance();
}

// One team: takes its rows of each piece.
__device__ void multiply_pieces(const Int4Params& p, u32 ring, u32 barriers, int team, int thread) {
    keep(ring);
    keep(barriers);
    Place at;
    for (;;) {
        wait_for_phase(barriers + at.stage * 8, at.turn);
        const int num_tokens = shared_at<int>(ring + at.stage * STAGE_BYTES + PIECE_AT);
        if (num_tokens == 0) return;
        if constexpr (TILE_ROWS <= 32) multiply_piece<TILE_ROWS>(p, ring, barriers, at, team, thread, num_tokens);
        else if constexpr (TILE_ROWS == 64) {
            if (num_tokens <= 32) multiply_piece<32>(p, ring, barriers, at, team, thread, num_tokens);
            else multiply_piece<64>(p, ring, barriers, at, team, thread, num_tokens);
        } else if (num_tokens <= 64) multiply_piece<64>(p, ring, barriers, at, team, thread, num_tokens);
        else if (num_tokens <= 96) multiply_piece<96>(p, ring, barriers, at, team, thread, num_tokens);
        else multiply_piece<128>(p, ring, barriers, at, team, thread, num_tokens);
    }
}

extern __shared__ u8 dynamic_shared[];

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM)
    int4_experts(const __grid_constant__ Int4Params p) {
    __shared__ u64 of_stages[2 * STAGES];
    const u32 barriers = shared_address(of_stages);
    // The order of swizzled pieces follows from addresses.
    const u32 ring = (shared_address(dynamic_shared) + SWIZZLE - 1) / SWIZZLE * SWIZZLE;
    if (threadIdx.x < STAGES) {
        start_barrier(&of_stages[threadIdx.x], 1 + WARP);
        start_barrier(&of_stages[STAGES + threadIdx.x], NUM_MULTIPLYING / WARP);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    let_next_kernel_get_ready();
    wait_for_kernel_in_front();
    const int team = threadIdx.x / TEAM, thread = threadIdx.x % TEAM;
    if (team < TEAMS) {
#if TEAMS == 4
        asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
#elif TEAMS == 2
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
        multiply_pieces(p, ring, barriers, team, thread);
    } else {
#if TEAMS == 4
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
#elif TEAMS == 2
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
        const int warp = thread / WARP, lane = thread % WARP;
        if (warp == 3) copy_scales(p, ring, barriers, lane);
        else if (lane == 0) {
            if (warp == 0) copy_weights<true>(p, ring, barriers);
            else if (warp == 1) copy_tokens(p, ring, barriers);
            else if (TEAMS > 1) copy_weights<false>(p, ring, barriers);
        }
    }
}
