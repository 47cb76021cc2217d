// Kernels on keys and values: what moves them, rotates them and compares them. Caches are Hkv × capacity × d, rows are tokens × Hkv × d.
//
// A rotation takes element i of a head with element i + half, for i < half, by tables of tokens × half; elements from 2·half on are left
// alone. A thread takes one such pair, or one element that is left alone: d − half threads a head. Where `rope_and_place` is wide, it takes
// 16 bytes of either instead.
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

// N neighbouring elements in `f32`: one, or 16 bytes and more at a multiple of 16.
template <class T, u32 N> DEVICE void load_run(const typename T::Stored* from, float (&x)[N]) {
    if constexpr (N == 1) {
        x[0] = T::widen(*from);
    } else {
        const u32 each = 16 / sizeof(*from);
        UNROLL for (u32 part = 0; part < N / each; part++) {
            const Quad quad = ((const Quad*)from)[part];
            const u32 words[4] = {quad.x, quad.y, quad.z, quad.w};
            UNROLL for (u32 i = 0; i < each; i++) {
                if constexpr (sizeof(*from) == 4) x[part * each + i] = float_of_bits(words[i]);
                else x[part * each + i] = T::widen((u16)(words[i / 2] >> 16 * (i % 2)));
            }
        }
    }
}
// Rounds N elements and stores them: one, or 16 bytes.
template <class T, u32 N> DEVICE void store_run(typename T::Stored* to, const float (&x)[N]) {
    if constexpr (N == 1) *to = T::narrow(x[0]);
    else if constexpr (sizeof(*to) == 4)
        *(Quad*)to = Quad{bits_of_float(x[0]), bits_of_float(x[1]), bits_of_float(x[2]), bits_of_float(x[3])};
    else *(Quad*)to = Quad{T::pack(x[0], x[1]), T::pack(x[2], x[3]), T::pack(x[4], x[5]), T::pack(x[6], x[7])};
}
template <class T, u32 N> DEVICE void copy_run(const typename T::Stored* from, typename T::Stored* to) {
    if constexpr (N == 1) *to = *from;
    else *(Quad*)to = *(const Quad*)from;
}
// Rotates N elements at `from` with those `half` further on, into `to`.
template <class T, u32 N>
DEVICE void rotate_run(const typename T::Stored* from, typename T::Stored* to, const float* cosines, const float* sines, u32 half) {
    float a[N], b[N], c[N], s[N], x[N], y[N];
    load_run<T, N>(from, a);
    load_run<T, N>(from + half, b);
    load_run<F32, N>(cosines, c);
    load_run<F32, N>(sines, s);
    UNROLL for (u32 i = 0; i < N; i++) {
        x[i] = a[i] * c[i] - b[i] * s[i];
        y[i] = b[i] * c[i] + a[i] * s[i];
    }
    store_run<T, N>(to, x);
    store_run<T, N>(to + half, y);
}

// Queries (tokens × q_heads × d) rotated in place, and keys, rotated, and values to slots of their caches. Each of the three may be missing:
// there are no query heads, no keys, or no values then. Slots follow `first_slot` where there is no array of them. N elements of keys and
// values and Q of queries lie in 16 bytes, or are one.
template <class T, u32 N, u32 Q>
DEVICE void rope_and_place(float* q, const typename T::Stored* k, const typename T::Stored* v, const float* cosines, const float* sines,
                           const u32* slots, typename T::Stored* k_cache, typename T::Stored* v_cache, u32 tokens, u32 q_heads, u32 heads,
                           u32 d, u32 half, u32 first_slot, u32 capacity) {
    u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 of_query = half / Q, queries = tokens * q_heads * of_query;
    if (at < queries) {
        const u32 i = at % of_query * Q, head = at / of_query;
        const size_t entry = (size_t)(head / q_heads) * half + i;
        float* x = q + (size_t)head * d + i;
        return rotate_run<F32, Q>(x, x, cosines + entry, sines + entry, half);
    }
    at -= queries;
    const u32 of_key = (d - half) / N, keys = k ? tokens * heads * of_key : 0;
    const bool is_key = at < keys;
    if (!is_key) at -= keys;
    const u32 each = is_key ? of_key : d / N;
    if (!is_key && (!v || at >= tokens * heads * each)) return;
    u32 i = at % each * N;
    const u32 head = at / each % heads, token = at / each / heads, slot = slots ? slots[token] : first_slot + token;
    const size_t from = ((size_t)token * heads + head) * d, to = ((size_t)head * capacity + slot) * d;
    if (!is_key) return copy_run<T, N>(v + from + i, v_cache + to + i);
    const size_t entry = (size_t)token * half + i;
    if (i < half) return rotate_run<T, N>(k + from + i, k_cache + to + i, cosines + entry, sines + entry, half);
    copy_run<T, N>(k + from + i + half, k_cache + to + i + half);
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

#define ROPE_AND_PLACE(name, T, N, Q)                                                                                                     \
    KERNEL(256, name,                                                                                                                     \
           (float* q, const T::Stored* k, const T::Stored* v, const float* cosines, const float* sines, const u32* slots,                 \
            T::Stored* k_cache, T::Stored* v_cache, u32 tokens, u32 q_heads, u32 heads, u32 d, u32 half, u32 first_slot, u32 capacity)) { \
        begin_kernel();                                                                                                                   \
        rope_and_place<T, N, Q>(q, k, v, cosines, sines, slots, k_cache, v_cache, tokens, q_heads, heads, d, half, first_slot, capacity); \
    }
ROPE_AND_PLACE(rope_and_place_f32, F32, 1, 1)
ROPE_AND_PLACE(rope_and_place_f16, F16, 1, 1)
ROPE_AND_PLACE(rope_and_place_bf16, Bf16, 1, 1)
ROPE_AND_PLACE(wide_rope_and_place_f32, F32, 4, 4)
ROPE_AND_PLACE(wide_rope_and_place_f16, F16, 8, 4)
ROPE_AND_PLACE(wide_rope_and_place_bf16, Bf16, 8, 4)

#define CACHE_KERNELS(suffix, T)                                                                                                      \
    KERNEL(256, rotate_slots_##suffix,                                                                                                \
           (const T::Stored* cache, const float* cosines, const float* sines, const u32* slots, T::Stored* out, u32 count, u32 heads, \
            u32 d, u32 half, u32 capacity)) {                                                                                         \
        begin_kernel();                                                                                                               \
        rotate_slots<T>(cache, cosines, sines, slots, out, count, heads, d, half, capacity);                                          \
    }                                                                                                                                 \
    KERNEL(32, row_distances_##suffix,                                                                                                \
           (const T::Stored* fresh, const u32* rows, const T::Stored* cached, float* distances, u32 width, u32 absolute)) {           \
        begin_kernel();                                                                                                               \
        row_distances<T>(fresh, rows, cached, distances, width, absolute);                                                            \
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
    begin_kernel();
    gather_slots(cache, kept, out, heads, each, d, from, copies, to);
}
KERNEL(256, gather_slots_32,
       (const u32* cache, const u32* kept, u32* out, u32 heads, u32 each, u32 d, u32 from, u32 copies, u32 to)) {
    begin_kernel();
    gather_slots(cache, kept, out, heads, each, d, from, copies, to);
}
