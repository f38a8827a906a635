// Collectives of the ranks of one machine in every layer of experts. Each GPU writes to memory of the others, which it
// has opened, and never reads there. kernels/rank_exchange.py launches them.
//
// A rank's part for another rank is cut into pieces, which the blocks send in turn. A block is a channel: it
// communicates only with the block of the same number on every other GPU. The pieces of a channel are numbered across
// launches, with 32 bits that wrap. For each piece, a block writes the piece to its slot in every peer, then releases
// the piece's number to that peer, and only then waits for the peers' pieces. A rank's write of a piece therefore never
// waits for the same piece of another rank, and blocks need not run at the same time.
//
// A slot is reused NUM_BANKS pieces later. Before a block writes piece n + 4, it has received piece n + 2 of every
// peer, because it receives each piece before it writes the next but one. For the same reason that peer had received
// piece n before it wrote piece n + 2. Four banks are therefore enough, however far ranks drift apart.
//
// Each rank adds up its own part, in float32 in the order of ranks, and rounds once. An element's block and round
// depend on the number of elements, but its value does not.
#include "sync.cuh"

constexpr int MAX_RANKS = 8;
constexpr int NUM_THREADS = 512;
constexpr int NUM_CHANNELS = 32;
constexpr int NUM_BANKS = 4;
constexpr int MAX_PIECE_BYTES = 65536;
constexpr int HEADER_BYTES = 8192;
constexpr int AT_ONCE = 4;                 // words that a thread loads before it stores
constexpr int LOADS_PER_CLOCK = 256;       // loads between two reads of the clock

struct Header {
    u32 last_of[NUM_CHANNELS][WARP];       // [channel][rank]: number of the rank's last piece here; one line a channel
    u32 last_own[NUM_CHANNELS];            // number of the last piece in each of this rank's own channels
    u32 is_overdue;
};
static_assert(sizeof(Header) <= HEADER_BYTES && MAX_RANKS <= WARP, "slots follow the header");

struct ExchangeParams {
    u8* memory[MAX_RANKS];                 // each rank's memory: a header, then slots [bank][source][channel]
    const u8* x;                           // the data of this rank
    u8* out;
    i64 part_bytes;                        // bytes that a rank gets from each other rank
    i64 part_stride;                       // from one rank's part of x to the next rank's; 0: all get the same part
    u64 timeout_ns;                        // how late a peer may be
    int rank, num_ranks;
    int num_rounds, piece_bytes;           // grid * num_rounds pieces cover a part; piece_bytes is a multiple of 16
    int only_notes_overdue;                // 1: the header records that a peer is late; 0: the kernel fails
    int padding;
};

// The piece of a part that a block sends or receives in one round.
struct Piece {
    i64 start;                             // in bytes
    int num_bytes;
    u32 number;
};

__device__ __forceinline__ Header* header_of(const ExchangeParams& params, int rank) {
    return reinterpret_cast<Header*>(params.memory[rank]);
}
__device__ __forceinline__ u8* slot_of(const ExchangeParams& params, int owner, int source, u32 number) {
    const i64 slot = static_cast<i64>(number % NUM_BANKS * params.num_ranks + source) * NUM_CHANNELS + blockIdx.x;
    return params.memory[owner] + HEADER_BYTES + slot * MAX_PIECE_BYTES;
}

// Orders this block's earlier reads and writes before the store, as other GPUs see them.
__device__ __forceinline__ void store_release_system(u32* to, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ u32 load_acquire_system(const u32* from) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
__device__ __forceinline__ u64 clock_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

template <typename Word>
__device__ __forceinline__ void copy_words(u8* to_bytes, const u8* from_bytes, int num_bytes) {
    Word* to = reinterpret_cast<Word*>(to_bytes);
    const Word* from = reinterpret_cast<const Word*>(from_bytes);
    const int num_words = num_bytes / static_cast<int>(sizeof(Word));
#pragma unroll 1
    for (int first = threadIdx.x; first < num_words; first += AT_ONCE * NUM_THREADS) {
        Word words[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i * NUM_THREADS < num_words) words[i] = __ldcg(from + first + i * NUM_THREADS);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i * NUM_THREADS < num_words) to[first + i * NUM_THREADS] = words[i];
    }
}

template <typename Word>
__device__ __forceinline__ void send(const ExchangeParams& params, const Piece& piece) {
#pragma unroll 1
    for (int distance = 1; distance < params.num_ranks; distance++) {
        const int peer = (params.rank + distance) % params.num_ranks;
        copy_words<Word>(slot_of(params, peer, params.rank, piece.number),
                         params.x + peer * params.part_stride + piece.start, piece.num_bytes);
    }
    __syncthreads();
    const int peer = threadIdx.x;
    if (peer < params.num_ranks && peer != params.rank)
        store_release_system(&header_of(params, peer)->last_of[blockIdx.x][params.rank], piece.number);
}

// Waits until the piece of every other rank is here.
__device__ __forceinline__ void wait_for_all(const ExchangeParams& params, u32 number, u64& timeout_ns) {
    const int peer = threadIdx.x;
    if (peer < params.num_ranks && peer != params.rank) {
        Header* own = header_of(params, params.rank);
        const u64 start = clock_ns();
        u32 num_loads = 0;
        while (static_cast<int>(load_acquire_system(&own->last_of[blockIdx.x][peer]) - number) < 0) {
            if (++num_loads % LOADS_PER_CLOCK != 0 || clock_ns() - start < timeout_ns) continue;
            if (!params.only_notes_overdue) __trap();
            own->is_overdue = 1;
            timeout_ns = 0;
            break;
        }
    }
    __syncthreads();
}

// The address of a rank's piece.
__device__ __forceinline__ const u8* piece_of(const ExchangeParams& params, const Piece& piece, int source) {
    if (source == params.rank) return params.x + source * params.part_stride + piece.start;
    return slot_of(params, params.rank, source, piece.number);
}

template <typename Word>
struct Gather {
    static __device__ __forceinline__ void receive(const ExchangeParams& params, const Piece& piece) {
#pragma unroll 1
        for (int source = 0; source < params.num_ranks; source++)
            copy_words<Word>(params.out + source * params.part_bytes + piece.start, piece_of(params, piece, source),
                             piece.num_bytes);
    }
};

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(u16 bfloat16) { return __uint_as_float(static_cast<u32>(bfloat16) << 16); }
__device__ __forceinline__ void round_to(float& to, float value) { to = value; }
__device__ __forceinline__ void round_to(u16& to, float value) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to) : "f"(value));
}

// Element: float, or u16 for bfloat16.
template <typename Word, typename Element>
struct Sum {
    static constexpr int NUM = sizeof(Word) / sizeof(Element);
    union Values {
        Word word;
        Element elements[NUM];
    };

    static __device__ __forceinline__ void receive(const ExchangeParams& params, const Piece& piece) {
        const int num_words = piece.num_bytes / static_cast<int>(sizeof(Word));
        Word* to = reinterpret_cast<Word*>(params.out + piece.start);
#pragma unroll 1
        for (int i = threadIdx.x; i < num_words; i += NUM_THREADS) {
            Values parts[MAX_RANKS];
#pragma unroll
            for (int source = 0; source < MAX_RANKS; source++)
                if (source < params.num_ranks)
                    parts[source].word = __ldcg(reinterpret_cast<const Word*>(piece_of(params, piece, source)) + i);
            Values rounded;
#pragma unroll
            for (int k = 0; k < NUM; k++) {
                float sum = to_float(parts[0].elements[k]);
#pragma unroll
                for (int source = 1; source < MAX_RANKS; source++)
                    if (source < params.num_ranks) sum += to_float(parts[source].elements[k]);
                round_to(rounded.elements[k], sum);
            }
            to[i] = rounded.word;
        }
    }
};

__device__ __forceinline__ Piece piece_at(const ExchangeParams& params, int round, u32 last) {
    const i64 start = (static_cast<i64>(round) * gridDim.x + blockIdx.x) * params.piece_bytes;
    const i64 left = params.part_bytes - start;
    const int num_bytes = left <= 0 ? 0 : left < params.piece_bytes ? static_cast<int>(left) : params.piece_bytes;
    return {start, num_bytes, last + 1 + round};
}

// Exchanges all pieces of a channel. A piece is sent before the preceding one is received.
template <typename Word, typename Operation>
__device__ __forceinline__ void exchange(const ExchangeParams& params) {
    wait_for_kernel_in_front();
    u32* last_own = &header_of(params, params.rank)->last_own[blockIdx.x];
    const u32 last = __ldcg(last_own);
    u64 timeout_ns = params.timeout_ns;
#pragma unroll 1
    for (int round = 0; round <= params.num_rounds; round++) {
        if (round < params.num_rounds) send<Word>(params, piece_at(params, round, last));
        if (round == 0) continue;
        const Piece piece = piece_at(params, round - 1, last);
        wait_for_all(params, piece.number, timeout_ns);
        Operation::receive(params, piece);
    }
    if (threadIdx.x == 0) *last_own = last + params.num_rounds;
}

#define KERNEL(name, Word, ...)                                                                                     \
    extern "C" __global__ void __launch_bounds__(NUM_THREADS) name(const __grid_constant__ ExchangeParams params) { \
        exchange<Word, __VA_ARGS__>(params);                                                                        \
    }

KERNEL(ranks_gather_16, uint4, Gather<uint4>)
KERNEL(ranks_gather_4, u32, Gather<u32>)
KERNEL(ranks_gather_1, u8, Gather<u8>)
KERNEL(ranks_sum_bfloat16_16, uint4, Sum<uint4, u16>)
KERNEL(ranks_sum_bfloat16_2, u16, Sum<u16, u16>)
KERNEL(ranks_sum_float32_16, uint4, Sum<uint4, float>)
KERNEL(ranks_sum_float32_4, u32, Sum<u32, float>)
