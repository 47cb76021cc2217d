// Changes of a cache's rows: sums of those that fresh rows show, and rows that are added to spans of slots. Caches are Hkv × capacity × d, rows
// Hkv × d. A rotation takes element i of a head with element i + half, by tables; a thread takes such a pair, or an element that is left alone.
#pragma once
#include "device.h"

// sums (groups × Hkv × d) = Σ over the pairs (row, slot) of a group, bounds[group] .. bounds[group + 1], of a row of `fresh` minus a slot of the
// cache, turned back by the row's entry of the tables. A block has 32 threads' elements of group blockIdx.y, and each of its 8 warps every
// eighth pair.
template <class T>
DEVICE void sum_changes(const typename T::Stored* fresh, const typename T::Stored* cache, const float* cosines, const float* sines,
                        const Pair* pairs, const u32* bounds, float* sums, u32 heads, u32 d, u32 half, u32 capacity) {
    float* parts = (float*)shared_memory; // 2 × 8 × 32
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, at = blockIdx.x * 32 + lane, each = d - half;
    const bool live = at < heads * each, rotated = at % each < half;
    const u32 head = at / each, one = rotated ? at % each : at % each + half, other = one + half;
    float first = 0, second = 0;
    if (live)
        UNROLL_BY(4) for (u32 p = bounds[blockIdx.y] + warp; p < bounds[blockIdx.y + 1]; p += 8) {
            const Pair pair = pairs[p];
            const typename T::Stored* now = fresh + ((size_t)pair.x * heads + head) * d;
            const typename T::Stored* then = cache + ((size_t)head * capacity + pair.y) * d;
            if (rotated) {
                const float c = cosines[(size_t)pair.x * half + one], s = sines[(size_t)pair.x * half + one], square = c * c + s * s;
                const float a = T::widen(then[one]), b = T::widen(then[other]);
                first += T::widen(now[one]) - (a * c + b * s) / square;
                second += T::widen(now[other]) - (b * c - a * s) / square;
            } else {
                first += T::widen(now[one]) - T::widen(then[one]);
            }
        }
    parts[warp * 32 + lane] = first;
    parts[256 + warp * 32 + lane] = second;
    block_barrier();
    if (warp || !live) return;
    for (u32 i = 1; i < 8; i++) first += parts[i * 32 + lane], second += parts[256 + i * 32 + lane];
    sums += ((size_t)blockIdx.y * heads + head) * d;
    sums[one] = first;
    if (rotated) sums[other] = second;
}

// Adds row blockIdx.y, rotated by each slot's entry of the tables, to the slots of span blockIdx.y of a cache.
template <class T>
DEVICE void add_rows(const float* rows, const float* cosines, const float* sines, typename T::Stored* cache, const Pair* spans, u32 heads,
                     u32 d, u32 half, u32 capacity) {
    const Pair span = spans[blockIdx.y];
    const u32 each = d - half, i = thread_index() % each, head = thread_index() / each % heads;
    const size_t slot = span.x + thread_index() / each / heads;
    if (slot >= span.y) return;
    const float* row = rows + ((size_t)blockIdx.y * heads + head) * d;
    typename T::Stored* to = cache + ((size_t)head * capacity + slot) * d;
    if (i >= half) {
        to[i + half] = T::narrow(T::widen(to[i + half]) + row[i + half]);
        return;
    }
    const float c = cosines[slot * half + i], s = sines[slot * half + i], a = row[i], b = row[i + half];
    to[i] = T::narrow(T::widen(to[i]) + (a * c - b * s));
    to[i + half] = T::narrow(T::widen(to[i + half]) + (b * c + a * s));
}

#define CHANGES(suffix, T)                                                                                                                \
    KERNEL(256, sum_changes_##suffix,                                                                                                     \
           (const T::Stored* fresh, const T::Stored* cache, const float* cosines, const float* sines, const Pair* pairs,                  \
            const u32* bounds, float* sums, u32 heads, u32 d, u32 half, u32 capacity)) {                                                  \
        begin_kernel();                                                                                                                   \
        sum_changes<T>(fresh, cache, cosines, sines, pairs, bounds, sums, heads, d, half, capacity);                                      \
    }                                                                                                                                     \
    KERNEL(256, add_rows_##suffix,                                                                                                        \
           (const float* rows, const float* cosines, const float* sines, T::Stored* cache, const Pair* spans, u32 heads, u32 d, u32 half, \
            u32 capacity)) {                                                                                                              \
        begin_kernel();                                                                                                                   \
        add_rows<T>(rows, cosines, sines, cache, spans, heads, d, half, capacity);                                                        \
    }
CHANGES(f32, F32)
CHANGES(f16, F16)
CHANGES(bf16, Bf16)
