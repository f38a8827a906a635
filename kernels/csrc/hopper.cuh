// What Hopper adds: barriers that count bytes, bulk copies to shared memory, and products of a warp group (four warps).
#pragma once
#include "sync.cuh"

constexpr int SWIZZLE_ROW = 128;            // bytes of a row whose 16-byte pieces are in an order of their own
constexpr int SWIZZLE = 8 * SWIZZLE_ROW;    // bytes after which the order of pieces repeats

__device__ __forceinline__ u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

// A phase of the barrier ends with this many arrivals, and when all expected bytes are there.
__device__ __forceinline__ void start_barrier(u64* barrier, u32 num_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(num_arrivals)
                 : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier_address) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier_address) : "memory");
}
__device__ __forceinline__ void arrive(u64* barrier) { arrive(shared_address(barrier)); }
// Arrives when this thread's copies so far (copy_async) are there.
__device__ __forceinline__ void arrive_after_async_copies(u32 barrier_address) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier_address) : "memory");
}
// Arrives, and makes the phase wait for bytes of bulk copies.
__device__ __forceinline__ void expect_bytes(u32 barrier_address, u32 num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(barrier_address), "r"(num_bytes)
                 : "memory");
}
// Returns whether the barrier's phase `turn`, counted from 0, has ended, for which it may wait a little.
__device__ __forceinline__ bool has_ended(u32 barrier_address, u32 turn) {
    u32 is_over;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(is_over)
                 : "r"(barrier_address), "r"(turn & 1)
                 : "memory");
    return is_over;
}
// Waits for the end of the barrier's phase `turn`.
__device__ __forceinline__ void wait_for_phase(u32 barrier_address, u32 turn) {
    if (has_ended(barrier_address, turn)) return;
    for (SpinLimit limit; !has_ended(barrier_address, turn); limit.count()) {
    }
}
__device__ __forceinline__ void wait_for_phase(u64* barrier, u32 turn) {
    wait_for_phase(shared_address(barrier), turn);
}
// Copies a multiple of 16 aligned bytes, which count for the barrier.
__device__ __forceinline__ void copy_bulk(u32 to_address, const void* from, u32 num_bytes, u32 barrier_address) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to_address), "l"(from), "r"(num_bytes), "r"(barrier_address)
                 : "memory");
}
// Orders what this thread has read and written in shared memory before products and bulk copies that begin later,
// which do not wait for it by themselves.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Arrives for a warp whose lanes have read what bulk copies may now overwrite.
__device__ __forceinline__ void release(u32 barrier_address, int lane) {
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) arrive(barrier_address);
}
__device__ __forceinline__ void release(u64* barrier, int lane) { release(shared_address(barrier), lane); }

__device__ __forceinline__ void start_products() {
#if __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void commit_products() {
#if __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits for all products that were committed, or for all but those of the last commit.
__device__ __forceinline__ void wait_for_products() {
#if __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_products_but_last() {
#if __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
#endif
}

// Returns what the tensor cores need to know of an operand of rows of SWIZZLE_ROW bytes, whose pieces are swizzled: its
// address and the bytes of 8 rows.
__device__ __forceinline__ u64 place_of(u32 address) {
    return (address & 0x3ffff) >> 4 | static_cast<u64>(SWIZZLE >> 4) << 32 | 1ull << 62;
}
__device__ __forceinline__ u64 place_of(const void* at) { return place_of(shared_address(at)); }
