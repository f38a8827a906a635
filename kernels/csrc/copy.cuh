// Items from one memory to another, one warp an item.
#pragma once
#include "params.cuh"

constexpr int LINE_BYTES = 128;

__device__ __forceinline__ uint4 load_once(const uint4* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}
__device__ __forceinline__ u64 load_once(const u64* from) { return __ldcs(from); }
__device__ __forceinline__ u32 load_once(const u32* from) { return __ldcs(from); }
__device__ __forceinline__ unsigned short load_once(const unsigned short* from) { return __ldcs(from); }
__device__ __forceinline__ u8 load_once(const u8* from) { return __ldcs(from); }

// Lanes start at the 128-byte line that holds the item's first byte, so that no line is asked for twice: PCIe
// moves whole requests. All loads of a round are issued before its first store.
template <typename Vector, int NUM_IN_FLIGHT>
__device__ __forceinline__ void copy_vectors(const u8* src, u8* dst, int num_bytes, int lane) {
    const Vector* from = reinterpret_cast<const Vector*>(src);
    Vector* to = reinterpret_cast<Vector*>(dst);
    const int num_vectors = num_bytes / static_cast<int>(sizeof(Vector));
    const int head = static_cast<int>((reinterpret_cast<u64>(src) & (LINE_BYTES - 1)) / sizeof(Vector));
    for (int first = lane - head; first < num_vectors; first += WARP * NUM_IN_FLIGHT) {
        Vector v[NUM_IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < NUM_IN_FLIGHT; ++k) {
            const int i = first + k * WARP;
            if (i >= 0 && i < num_vectors) v[k] = load_once(from + i);
        }
#pragma unroll
        for (int k = 0; k < NUM_IN_FLIGHT; ++k) {
            const int i = first + k * WARP;
            if (i >= 0 && i < num_vectors) to[i] = v[k];
        }
    }
}

__device__ __forceinline__ void copy_item(const u8* src, u8* dst, int num_bytes, int vector_bytes, int lane) {
    switch (vector_bytes) {
        case 16: copy_vectors<uint4, 4>(src, dst, num_bytes, lane); break;
        case 8: copy_vectors<u64, 4>(src, dst, num_bytes, lane); break;
        case 4: copy_vectors<u32, 4>(src, dst, num_bytes, lane); break;
        case 2: copy_vectors<unsigned short, 8>(src, dst, num_bytes, lane); break;
        default: copy_vectors<u8, 8>(src, dst, num_bytes, lane);
    }
}

// Host to device, of every pool.
__device__ __forceinline__ void fetch_item(
    const Pool (&pools)[MAX_POOLS], int layer, i64 src_host_slot, i64 dst_device_slot, int lane) {
#pragma unroll
    for (int i = 0; i < MAX_POOLS; ++i) {
        const Pool& pool = pools[i];
        if (pool.item_bytes == 0) break;
        copy_item(
            pool.host + layer * pool.host_layer_bytes + src_host_slot * pool.host_slot_bytes,
            pool.dev + layer * pool.dev_layer_bytes + dst_device_slot * pool.dev_slot_bytes,
            pool.item_bytes, pool.vector_bytes, lane);
    }
}

// Device to host, of every pool.
__device__ __forceinline__ void back_up_item(
    const Pool (&pools)[MAX_POOLS], int layer, i64 src_device_slot, i64 dst_host_slot, int lane) {
#pragma unroll
    for (int i = 0; i < MAX_POOLS; ++i) {
        const Pool& pool = pools[i];
        if (pool.item_bytes == 0) break;
        copy_item(
            pool.dev + layer * pool.dev_layer_bytes + src_device_slot * pool.dev_slot_bytes,
            pool.host + layer * pool.host_layer_bytes + dst_host_slot * pool.host_slot_bytes,
            pool.item_bytes, pool.vector_bytes, lane);
    }
}
