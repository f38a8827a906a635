// Copies of items from one memory to another, one warp for each item.
#pragma once
#include "params.cuh"
#include "row_check.cuh"

#ifndef ONLY_WIDE_ITEMS
#define ONLY_WIDE_ITEMS 0                // 1: all addresses allow 16-byte vectors
#endif

constexpr int LINE_BYTES = 128;

__device__ __forceinline__ uint4 load_once(const uint4* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}
__device__ __forceinline__ u64 load_once(const u64* from) { return __ldcs(from); }
__device__ __forceinline__ u32 load_once(const u32* from) { return __ldcs(from); }
__device__ __forceinline__ u16 load_once(const u16* from) { return __ldcs(from); }
__device__ __forceinline__ u8 load_once(const u8* from) { return __ldcs(from); }

// The part of an item that one warp has loaded and not yet stored: NUM vectors in each lane. Lanes start at the
// 128-byte line that holds the item's first byte, so that no line is requested twice: PCIe moves whole requests. (The
// bulk copy engine and cp.async reach half the rate of plain loads from host memory.)
template <typename Vector, int NUM>
struct InFlight {
    Vector v[NUM];

    // The number of this lane's first vector in the item; below 0 for a lane in front of the item.
    static __device__ __forceinline__ int first_vector(const u8* src, int lane) {
        return lane - static_cast<int>((reinterpret_cast<u64>(src) & (LINE_BYTES - 1)) / sizeof(Vector));
    }
    __device__ __forceinline__ void load(const u8* src, int num_vectors, int first) {
#pragma unroll
        for (int k = 0; k < NUM; ++k) {
            const int i = first + k * WARP;
            if (i >= 0 && i < num_vectors) v[k] = load_once(reinterpret_cast<const Vector*>(src) + i);
        }
    }
    __device__ __forceinline__ void store(u8* dst, int num_vectors, int first) const {
#pragma unroll
        for (int k = 0; k < NUM; ++k) {
            const int i = first + k * WARP;
            if (i >= 0 && i < num_vectors) reinterpret_cast<Vector*>(dst)[i] = v[k];
        }
    }
    // This lane's part of the item's check.
    __device__ __forceinline__ u32 check_parts(int num_vectors, int first) const {
        u32 sum = 0;
#pragma unroll
        for (int k = 0; k < NUM; ++k) {
            const int i = first + k * WARP;
            if (i >= 0 && i < num_vectors) sum += check_part(v[k], i);
        }
        return sum;
    }
};

// The checks of an item that has passed through a warp.
struct Passed {
    u32 expected;                        // 0 if none is expected
    u32 sum_of_lane;                     // this lane's part of the actual check
};

// Moves an item through one warp: reads it from src, stores it at dst unless that is null, and adds up its check if one
// is expected or dst is null.
template <typename Vector, int NUM>
__device__ __forceinline__ Passed pass_vectors(
    const u8* src, u8* dst, int num_bytes, const Expected& expected, int lane) {
    const int num_vectors = num_bytes / static_cast<int>(sizeof(Vector));
    InFlight<Vector, NUM> round;
    Passed passed = {0, 0};
    int first = round.first_vector(src, lane);
    round.load(src, num_vectors, first);
    passed.expected = expected.load();
#pragma unroll 1
    while (true) {
        if (dst != nullptr) round.store(dst, num_vectors, first);
        if (dst == nullptr || expected.is_there()) passed.sum_of_lane += round.check_parts(num_vectors, first);
        first += WARP * NUM;
        if (first >= num_vectors) return passed;
        round.load(src, num_vectors, first);
    }
}

__device__ __forceinline__ Passed pass_item(
    const u8* src, u8* dst, const Pool& pool, const Expected& expected, int lane) {
#if ONLY_WIDE_ITEMS
    return pass_vectors<uint4, 4>(src, dst, pool.item_bytes, expected, lane);
#else
    switch (pool.vector_bytes) {
        case 16: return pass_vectors<uint4, 4>(src, dst, pool.item_bytes, expected, lane);
        case 8: return pass_vectors<u64, 4>(src, dst, pool.item_bytes, expected, lane);
        case 4: return pass_vectors<u32, 4>(src, dst, pool.item_bytes, expected, lane);
        case 2: return pass_vectors<u16, 8>(src, dst, pool.item_bytes, expected, lane);
        default: return pass_vectors<u8, 8>(src, dst, pool.item_bytes, expected, lane);
    }
#endif
}

__device__ __forceinline__ u8* host_item(const Pool& pool, int layer, i64 slot) {
    return pool.host + layer * pool.host_layer_bytes + slot * pool.host_slot_bytes;
}
__device__ __forceinline__ u8* device_item(const Pool& pool, int layer, i64 slot) {
    return pool.dev + layer * pool.dev_layer_bytes + slot * pool.dev_slot_bytes;
}

// Copies an item from host to device and verifies it. index_pages: the pages of the copy's row
__device__ __forceinline__ void fetch_item(
    const Pool& pool, const RowChecks& checks, int layer, const Copy& copy, const int* index_pages, int lane) {
    const Expected expected = Expected::of(checks, layer, index_pages, copy.position);
    const Passed passed = pass_item(host_item(pool, layer, copy.src_host_slot),
                                    device_item(pool, layer, copy.dst_device_slot), pool, expected, lane);
    if (expected.is_there()) verify(checks, layer, copy, passed.expected, passed.sum_of_lane, lane);
}

// fetch_item in two steps, for items that are requested before their destination is known. The item must fit into one
// round from any address, and its addresses must allow the widest vectors.
typedef InFlight<uint4, 4> EarlyItem;

__device__ __forceinline__ void begin_fetch(
    const Pool& pool, int layer, i64 src_host_slot, int lane, EarlyItem& early) {
    const u8* src = host_item(pool, layer, src_host_slot);
    early.load(src, pool.item_bytes / static_cast<int>(sizeof(uint4)), early.first_vector(src, lane));
}
__device__ __forceinline__ void finish_fetch(
    const Pool& pool, const RowChecks& checks, int layer, const Copy& copy, u32 expected, int lane,
    const EarlyItem& early) {
    const u8* src = host_item(pool, layer, copy.src_host_slot);
    const int num_vectors = pool.item_bytes / static_cast<int>(sizeof(uint4)), first = early.first_vector(src, lane);
    early.store(device_item(pool, layer, copy.dst_device_slot), num_vectors, first);
    if (checks.row_checks != nullptr)
        verify(checks, layer, copy, expected, early.check_parts(num_vectors, first), lane);
}

// Copies an item from device to host.
__device__ __forceinline__ void back_up_item(
    const Pool& pool, int layer, i64 src_device_slot, i64 dst_host_slot, int lane) {
    pass_item(device_item(pool, layer, src_device_slot), host_item(pool, layer, dst_host_slot), pool,
              {nullptr, 0, 0}, lane);
}
