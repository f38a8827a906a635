// The row check, which docs/kv-layout.md defines. The lanes of a warp add up their parts of an item.
#pragma once
#include "params.cuh"

constexpr u32 WORD_FACTOR = 0x9E3779B1u, PLACE_FACTOR = 0x85EBCA6Bu;
constexpr int POSITION_BITS = 22;

__device__ __forceinline__ u32 word_factor(u32 word) {
    const u32 mixed = (word + 1) * WORD_FACTOR;
    return (mixed ^ mixed >> 15) | 1;
}

// The contribution of an item's i-th vector to its check; a vector below 4 bytes is a part of a word.
__device__ __forceinline__ u32 check_part(const uint4& v, u32 i) {
    return v.x * word_factor(4 * i) + v.y * word_factor(4 * i + 1) + v.z * word_factor(4 * i + 2) +
           v.w * word_factor(4 * i + 3);
}
__device__ __forceinline__ u32 check_part(u64 v, u32 i) {
    return static_cast<u32>(v) * word_factor(2 * i) + static_cast<u32>(v >> 32) * word_factor(2 * i + 1);
}
__device__ __forceinline__ u32 check_part(u32 v, u32 i) { return v * word_factor(i); }
__device__ __forceinline__ u32 check_part(u16 v, u32 i) {
    return (static_cast<u32>(v) << 16 * (i % 2)) * word_factor(i / 2);
}
__device__ __forceinline__ u32 check_part(u8 v, u32 i) {
    return (static_cast<u32>(v) << 8 * (i % 4)) * word_factor(i / 4);
}

// The check of an item from the sums of its lanes; a whole warp calls it.
__device__ __forceinline__ u32 row_check(u32 sum_of_lane, int layer, i64 position) {
    const u32 place = (static_cast<u32>(layer) << POSITION_BITS) + static_cast<u32>(position);
    return __reduce_add_sync(~0u, sum_of_lane) + (2 * place + 1) * PLACE_FACTOR;
}

// The expected check of one item. The page id is loaded before the item and the check after it, so that neither load
// delays the item.
struct Expected {
    const int* row_checks;               // the layer's checks; null: the item is not verified
    int page_id, position;

    // index_pages: the pages of the item's row
    static __device__ __forceinline__ Expected of(
        const RowChecks& checks, int layer, const int* index_pages, int position) {
        if (checks.row_checks == nullptr) return {nullptr, 0, position};
        return {checks.row_checks + layer * checks.num_slots, __ldg(index_pages + page_of(position)), position};
    }
    __device__ __forceinline__ bool is_there() const { return row_checks != nullptr; }
    __device__ __forceinline__ u32 load() const {
        return is_there() ? static_cast<u32>(__ldcg(row_checks + slot_in_page(page_id, position))) : 0;
    }
};

__device__ __forceinline__ const int* index_pages_of(const RowChecks& checks, int row) {
    return checks.index_pages + static_cast<i64>(row) * checks.max_pages;
}

// Records the first wrong item of a row; a whole warp calls it.
__device__ __forceinline__ void verify(
    const RowChecks& checks, int layer, const Copy& copy, u32 expected, u32 sum_of_lane, int lane) {
    const u32 actual = row_check(sum_of_lane, layer, copy.position);
    if (actual == expected || lane != 0) return;
    if (atomicOr(checks.error_flags + copy.row, WRONG_ROW) & WRONG_ROW) return;
    int* record = checks.wrong_rows + static_cast<i64>(copy.row) * NUM_WRONG_ROW_FIELDS;
    record[0] = checks.read_at;
    record[1] = layer;
    record[2] = copy.position;
    record[3] = copy.src_host_slot;
    record[4] = expected;
    record[5] = actual;
}
