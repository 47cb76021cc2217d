// Kernels on keys and values: what moves them, rotates them and compares them. Caches are Hkv × capacity × d, rows are tokens × Hkv × d.
//
// A rotation takes element i of a head with element i + half, for i < half, by tables of tokens × half; elements from 2·half on are left
// alone. A thread takes one such pair, or one element that is left alone: d − half threads a head.
#pragma once
#include "device.h"

// Which pair or element of which head of which token a thread has.
struct HeadElement {
    size_t token;
    u32 head, i, second;
    bool rotated;
};
DEVICE HeadElement head_element(size_t at, u32 heads, u32 d, u32 half) {
    const u32 each = d - half, i = at % each;
    const u32 head = at / each % heads;
    const size_t token = at / each / heads;
    if (i < half) return {token, head, i, i + half, true};
    return {token, head, i + half, 0, false};
}

// Rotates a head from `from` into `to`.
template <class T>
DEVICE void rotate_into(const typename T::Stored* from, typename T::Stored* to, const HeadElement& e, const float* cosines,
                        const float* sines, u32 half) {
    if (!e.rotated) {
        to[e.i] = from[e.i];
        return;
    }
    const float c = cosines[e.token * half + e.i], s = sines[e.token * half + e.i];
    const float a = T::widen(from[e.i]), b = T::widen(from[e.second]);
    to[e.i] = T::narrow(a * c - b * s);
    to[e.second] = T::narrow(b * c + a * s);
}

// Rows, rotated, to slots of a cache.
template <class T>
DEVICE void place(const typename T::Stored* rows, const float* cosines, const float* sines, const u32* slots, typename T::Stored* cache,
                  u32 tokens, u32 heads, u32 d, u32 half, u32 capacity) {
    const size_t at = thread_index();
    if (at >= (size_t)tokens * heads * (d - half)) return;
    const HeadElement e = head_element(at, heads, d, half);
    rotate_into<T>(rows + (e.token * heads + e.head) * d, cache + ((size_t)e.head * capacity + slots[e.token]) * d, e, cosines, sines, half);
}

// Keys in some slots of a cache, rotated: Hkv × count × d.
template <class T>
DEVICE void rotate_slots(const typename T::Stored* cache, const float* cosines, const float* sines, const u32* slots,
                         typename T::Stored* out, u32 count, u32 heads, u32 d, u32 half, u32 capacity) {
    const size_t at = thread_index();
    if (at >= (size_t)count * heads * (d - half)) return;
    const HeadElement e = head_element(at, heads, d, half);
    rotate_into<T>(cache + ((size_t)e.head * capacity + slots[e.token]) * d, out + ((size_t)e.head * count + e.token) * d, e, cosines,
                   sines, half);
}

// Distances of rows rows[p] of `fresh` from row p of `cached`, a warp each: sums of squares or, with `absolute`, of absolute differences.
template <class T>
DEVICE void row_distances(const typename T::Stored* fresh, const u32* rows, const typename T::Stored* cached, float* distances, u32 width,
                          u32 absolute) {
    fresh += (size_t)rows[blockIdx.x] * width;
    cached += (size_t)blockIdx.x * width;
    float sum = 0;
    for (u32 i = threadIdx.x; i < width; i += 32) {
        const float x = T::widen(fresh[i]) - T::widen(cached[i]);
        sum += absolute ? fabsf(x) : x * x;
    }
    sum = warp_sum(sum);
    if (threadIdx.x == 0) distances[blockIdx.x] = sum;
}

#define CACHE_KERNELS(suffix, T)                                                                                                          \
    KERNEL(256, place_##suffix,                                                                                                           \
           (const T::Stored* rows, const float* cosines, const float* sines, const u32* slots, T::Stored* cache, u32 tokens, u32 heads,   \
            u32 d, u32 half, u32 capacity)) {                                                                                             \
        place<T>(rows, cosines, sines, slots, cache, tokens, heads, d, half, capacity);                                                   \
    }                                                                                                                                     \
    KERNEL(256, rotate_slots_##suffix,                                                                                                    \
           (const T::Stored* cache, const float* cosines, const float* sines, const u32* slots, T::Stored* out, u32 count, u32 heads,     \
            u32 d, u32 half, u32 capacity)) {                                                                                             \
        rotate_slots<T>(cache, cosines, sines, slots, out, count, heads, d, half, capacity);                                              \
    }                                                                                                                                     \
    KERNEL(32, row_distances_##suffix,                                                                                                    \
           (const T::Stored* fresh, const u32* rows, const T::Stored* cached, float* distances, u32 width, u32 absolute)) {               \
        row_distances<T>(fresh, rows, cached, distances, width, absolute);                                                                \
    }
CACHE_KERNELS(f32, F32)
CACHE_KERNELS(f16, F16)
CACHE_KERNELS(bf16, Bf16)

// Slots `kept` (heads × each) of a cache of `from` slots a head, copied to the first slots of one of `to` slots. Head h comes from
// head h / copies. Elements of 16 or 32 bits.
template <class T>
DEVICE void gather_slots(const T* cache, const u32* kept, T* out, u32 heads, u32 each, u32 d, u32 from, u32 copies, u32 to) {
    const size_t at = thread_index();
    if (at >= (size_t)heads * each * d) return;
    const u32 i = at % d;
    const size_t slot = at / d, head = slot / each;
    out[(head * to + slot % each) * d + i] = cache[(head / copies * from + kept[slot]) * d + i];
}
KERNEL(256, gather_slots_16,
       (const u16* cache, const u32* kept, u16* out, u32 heads, u32 each, u32 d, u32 from, u32 copies, u32 to)) {
    gather_slots(cache, kept, out, heads, each, d, from, copies, to);
}
KERNEL(256, gather_slots_32,
       (const u32* cache, const u32* kept, u32* out, u32 heads, u32 each, u32 d, u32 from, u32 copies, u32 to)) {
    gather_slots(cache, kept, out, heads, each, d, from, copies, to);
}
