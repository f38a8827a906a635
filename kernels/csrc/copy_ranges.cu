// Copies many short byte ranges between memory of this GPU and memory that it reaches: main memory that CUDA has
// registered, or another GPU's. Each warp copies a range, and each lane loads four words before it stores the first.
// hisparse_pd/core/memory/gpu_copies.py launches it.

typedef unsigned long long u64;

constexpr int WARP = 32;
constexpr int AT_ONCE = 4;

// addresses: [3][num_ranges]: source addresses, destination addresses and lengths in bytes, all multiples of a Word
template <typename Word>
__device__ void copy_ranges(const u64* __restrict__ addresses, int num_ranges) {
    const int lane = threadIdx.x % WARP;
    const int warps = gridDim.x * (blockDim.x / WARP);
    for (int range = (blockIdx.x * blockDim.x + threadIdx.x) / WARP; range < num_ranges; range += warps) {
        const Word* __restrict__ src = reinterpret_cast<const Word*>(addresses[range]);
        Word* __restrict__ dst = reinterpret_cast<Word*>(addresses[num_ranges + range]);
        const u64 num_words = addresses[2 * static_cast<u64>(num_ranges) + range] / sizeof(Word);
        for (u64 first = lane; first < num_words; first += AT_ONCE * WARP) {
            Word words[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (first + i * WARP < num_words) words[i] = src[first + i * WARP];
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (first + i * WARP < num_words) dst[first + i * WARP] = words[i];
            }
        }
    }
}

extern "C" __global__ void copy_ranges_16(const u64* addresses, int num_ranges) {
    copy_ranges<uint4>(addresses, num_ranges);
}
extern "C" __global__ void copy_ranges_8(const u64* addresses, int num_ranges) {
    copy_ranges<u64>(addresses, num_ranges);
}
extern "C" __global__ void copy_ranges_4(const u64* addresses, int num_ranges) {
    copy_ranges<unsigned>(addresses, num_ranges);
}
extern "C" __global__ void copy_ranges_1(const u64* addresses, int num_ranges) {
    copy_ranges<unsigned char>(addresses, num_ranges);
}
