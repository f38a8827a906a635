// Synchronisation between kernels, between blocks and between the warps of a block, and helpers for a warp's lanes.
#pragma once
#include "params.cuh"

// Programmatic dependent launch: the blocks of this kernel may be resident before the preceding kernel is done, and
// wait here for its end. Older architectures launch without it.
__device__ __forceinline__ void wait_for_kernel_in_front() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_get_ready() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ u64 load_acquire(const u64* from) {
    u64 v;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ u32 load_acquire(const u32* from) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ u32 add_release(u32* to, u32 value) {
    u32 before;
    asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(value) : "memory");
    return before;
}
__device__ __forceinline__ void add_release(u64* to, u64 value) {
    asm volatile("red.add.release.gpu.global.u64 [%0], %1;" :: "l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ u64 add_acq_rel(u64* to, u64 value) {
    u64 before;
    asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(to), "l"(value) : "memory");
    return before;
}
__device__ __forceinline__ u64 add_relaxed(u64* to, u64 value) {
    u64 before;
    asm volatile("atom.add.relaxed.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(to), "l"(value) : "memory");
    return before;
}

// The sum of this lane's value and those of all lanes before it.
template <typename T>
__device__ __forceinline__ T sum_up_to_lane(T value, int lane) {
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const T other = __shfl_up_sync(~0u, value, offset);
        if (lane >= offset) value += other;
    }
    return value;
}

// Bounds a loop that waits for another block's write; count() is called in every iteration. All blocks of a launch are
// resident and none waits for a later one, so a wait of seconds means a defect: the kernel then ends with an error
// instead of hanging the GPU.
struct SpinLimit {
    u32 num_spins = 0;
    __device__ __forceinline__ void count() {
        if (++num_spins > 1u << 26) __trap();
    }
};

// A barrier of some of a block's warps. It opens when NUM_THREADS_MEETING threads have called one of its functions.
template <int ID, int NUM_THREADS_MEETING>
struct Barrier {
    static __device__ __forceinline__ void wait() {
        asm volatile("bar.sync %0, %1;" :: "n"(ID), "n"(NUM_THREADS_MEETING) : "memory");
    }
    // Counts for the barrier, and does not wait.
    static __device__ __forceinline__ void arrive() {
        asm volatile("bar.arrive %0, %1;" :: "n"(ID), "n"(NUM_THREADS_MEETING) : "memory");
    }
    // Waits, and returns whether any thread has given true.
    static __device__ __forceinline__ bool wait_or(bool is_one) {
        u32 any;
        asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, %2, %3, p; selp.u32 %0, 1, 0, q; }"
                     : "=r"(any)
                     : "r"(static_cast<u32>(is_one)), "n"(ID), "n"(NUM_THREADS_MEETING)
                     : "memory");
        return any;
    }
};

// Copies 16 or 4 bytes to shared memory without a register.
__device__ __forceinline__ void copy_async(u32 to, const void* from, int num_bytes) {
    if (num_bytes == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_async(void* to_shared, const void* from, int num_bytes) {
    copy_async(static_cast<u32>(__cvta_generic_to_shared(to_shared)), from, num_bytes);
}
// Waits for the asynchronous copies of this thread.
__device__ __forceinline__ void wait_for_async_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
