// Kernels on rows of activations: norms, rounding, gathering, sums.
#pragma once
#include "panels.h"

// The sum of a number over the block, the same in each thread. `parts` is 32 floats.
DEVICE float block_sum(float x, float* parts) {
    x = warp_sum(x);
    const u32 warps = blockDim.x / 32, lane = threadIdx.x % 32;
    if (warps == 1) return x;
    if (lane == 0) parts[threadIdx.x / 32] = x;
    block_barrier();
    return warp_sum(lane < warps ? parts[lane] : 0);
}

// Four neighbouring elements of a row, from column `at` on. Those outside of the row's `width` are zeros and are never touched in memory. Four that
// stand at an odd place, or of which the row has some only, are read and written one by one.
struct Four {
    float x[4];
};
DEVICE bool is_whole(const void* four, u32 bytes, u32 at, u32 width) { return at + 4 <= width && (size_t)four % bytes == 0; }
DEVICE Four load_four(const float* from, u32 at, u32 width) {
    if (is_whole(from, 16, at, width)) {
        const Quad y = *(const Quad*)from;
        return {float_of_bits(y.x), float_of_bits(y.y), float_of_bits(y.z), float_of_bits(y.w)};
    }
    Four y = {};
    UNROLL for (u32 i = 0; i < 4; i++)
        if (at + i < width) y.x[i] = from[i];
    return y;
}
template <class Out> DEVICE void store_four(typename Out::Stored* to, u32 at, u32 width, const Four& y) {
    if (is_whole(to, 4 * sizeof(*to), at, width)) {
        if constexpr (sizeof(*to) == 4) *(Quad*)to = {bits_of_float(y.x[0]), bits_of_float(y.x[1]), bits_of_float(y.x[2]), bits_of_float(y.x[3])};
        else *(Pair*)to = {Out::pack(y.x[0], y.x[1]), Out::pack(y.x[2], y.x[3])};
        return;
    }
    UNROLL for (u32 i = 0; i < 4; i++)
        if (at + i < width) to[i] = Out::narrow(y.x[i]);
}

// Fours of a row that a thread of a norm keeps in registers between the two passes. It reads the others again.
constexpr u32 HELD = 2;

// Root-mean-square norm of `width` elements by `threads` threads, of which this one is `thread`; `sum` gives each of them the sum of a number over
// all, and place(i) is where element i of the result stands. Without a weight elements are rounded only; with ADD the result is added. Columns from
// `width` to `padded` of the result become zeros. Which elements a thread sums depends on the width and the threads alone, so that a row has the same
// bits wherever it stands.
template <class Out, bool ADD, class Place, class Sum>
DEVICE void norm_segment(const float* x, const float* weight, Place place, u32 width, u32 padded, float eps, u32 thread, u32 threads, Sum sum) {
    auto load = [&](const float* row, u32 at) { return load_four(row + at, at, width); };
    Four held[HELD], weights[HELD] = {};
    UNROLL for (u32 j = 0; j < HELD; j++) held[j] = load(x, 4 * (thread + j * threads));
    if (weight) UNROLL for (u32 j = 0; j < HELD; j++) weights[j] = load(weight, 4 * (thread + j * threads));
    const u32 rest = 4 * (thread + HELD * threads);
    float scale = 1;
    if (weight) {
        float squares = 0;
        auto square = [&](const Four& y) { UNROLL for (u32 i = 0; i < 4; i++) squares += y.x[i] * y.x[i]; };
        UNROLL for (u32 j = 0; j < HELD; j++) square(held[j]);
        for (u32 at = rest; at < width; at += 4 * threads) square(load(x, at));
        scale = 1.0f / sqrtf(sum(squares) / width + eps);
    }
    auto finish = [&](u32 at, Four y, const Four& w) {
        if (at >= padded) return;
        if (weight) UNROLL for (u32 i = 0; i < 4; i++) y.x[i] = at + i < width ? y.x[i] * scale * w.x[i] : 0;
        if constexpr (ADD) {
            const Four before = load_four(place(at), at, padded);
            UNROLL for (u32 i = 0; i < 4; i++) y.x[i] = before.x[i] + y.x[i];
        }
        store_four<Out>(place(at), at, padded, y);
    };
    UNROLL for (u32 j = 0; j < HELD; j++) finish(4 * (thread + j * threads), held[j], weights[j]);
    for (u32 at = rest; at < padded; at += 4 * threads) finish(at, load(x, at), weight ? load(weight, at) : Four{});
}

// Norms of rows of `width` elements, a block each. Columns from `width` to `stride` of the results become zeros.
#define RMS_NORM(name, OUT, ADD)                                                                                           \
    KERNEL(1024, name, (const float* x, const float* weight, OUT::Stored* out, u32 width, u32 stride, float eps)) {        \
        begin_kernel();                                                                                                    \
        auto place = [&](u32 i) { return out + Place<OUT>::at(blockIdx.x, i, stride); };                                   \
        norm_segment<OUT, ADD>(x + (size_t)blockIdx.x * width, weight, place, width, stride, eps, threadIdx.x, blockDim.x, \
                               [](float y) { return block_sum(y, (float*)shared_memory); });                               \
    }
RMS_NORM(rms_norm_f32, F32, false)
RMS_NORM(rms_norm_panels, Panels, false)
RMS_NORM(rms_norm_add, F32, true)

// Rows of queries, keys and values beside one another, split: q in f32, k and v rounded, each densely. Queries and keys are normed in segments where
// they have a weight; a warp has one segment of q_segment or kv_segment elements, of which the last of a part may be cut short.
template <class Out>
DEVICE void split_rows(const float* x, float* q, typename Out::Stored* k, typename Out::Stored* v, u32 rows, u32 q_width, u32 kv_width,
                       const float* q_weight, u32 q_segment, float q_eps, const float* k_weight, u32 kv_segment, float k_eps) {
    const u32 of_q = (q_width + q_segment - 1) / q_segment, of_kv = (kv_width + kv_segment - 1) / kv_segment, each = of_q + 2 * of_kv;
    const u32 warp = thread_index() / 32, lane = threadIdx.x % 32, row = warp / each, segment = warp % each;
    if (row >= rows) return;
    x += (size_t)row * (q_width + 2 * kv_width);
    auto sum = [](float y) { return warp_sum(y); };
    if (segment < of_q) {
        const u32 first = segment * q_segment, width = first + q_segment < q_width ? q_segment : q_width - first;
        q += (size_t)row * q_width + first;
        norm_segment<F32, false>(x + first, q_weight, [&](u32 i) { return q + i; }, width, width, q_eps, lane, 32, sum);
        return;
    }
    const bool is_v = segment >= of_q + of_kv;
    const u32 first = (segment - of_q - (is_v ? of_kv : 0)) * kv_segment, width = first + kv_segment < kv_width ? kv_segment : kv_width - first;
    typename Out::Stored* kv = (is_v ? v : k) + (size_t)row * kv_width + first;
    x += q_width + (is_v ? kv_width : 0) + first;
    norm_segment<Out, false>(x, is_v ? nullptr : k_weight, [&](u32 i) { return kv + i; }, width, width, k_eps, lane, 32, sum);
}
#define SPLIT_ROWS(name, OUT)                                                                                                     \
    KERNEL(256, name,                                                                                                             \
           (const float* x, float* q, OUT::Stored* k, OUT::Stored* v, u32 rows, u32 q_width, u32 kv_width, const float* q_weight, \
            u32 q_segment, float q_eps, const float* k_weight, u32 kv_segment, float k_eps)) {                                    \
        begin_kernel();                                                                                                           \
        split_rows<OUT>(x, q, k, v, rows, q_width, kv_width, q_weight, q_segment, q_eps, k_weight, kv_segment, k_eps);            \
    }
SPLIT_ROWS(split_rows_f32, F32)
SPLIT_ROWS(split_rows_f16, F16)
SPLIT_ROWS(split_rows_bf16, Bf16)

// Rows rounded: column i of row r of `out` is x[r·width + i] for i < width, zero up to `stride`. A thread has four columns.
template <class Out> DEVICE void round_rows(const float* x, typename Out::Stored* out, u32 rows, u32 width, u32 stride) {
    const u32 fours = (stride + 3) / 4;
    const size_t index = thread_index(), row = index / fours;
    const u32 at = index % fours * 4;
    if (row < rows) store_four<Out>(out + Place<Out>::at(row, at, stride), at, stride, load_four(x + row * width + at, at, width));
}
#define ROUND_ROWS(name, OUT)                                                                \
    KERNEL(256, name, (const float* x, OUT::Stored* out, u32 rows, u32 width, u32 stride)) { \
        begin_kernel();                                                                      \
        round_rows<OUT>(x, out, rows, width, stride);                                        \
    }
ROUND_ROWS(round_rows_f32, F32)
ROUND_ROWS(round_rows_panels, Panels)

// out (count × width) = x[rows], of pieces of 16, 32 or 128 bits.
template <class T> DEVICE void gather_rows(const T* x, const u32* rows, T* out, u32 count, u32 width) {
    const size_t at = thread_index();
    if (at < (size_t)count * width) out[at] = x[(size_t)rows[at / width] * width + at % width];
}
#define GATHER_ROWS(name, T)                                                              \
    KERNEL(256, name, (const T* x, const u32* rows, T* out, u32 count, u32 width)) {      \
        begin_kernel();                                                                   \
        gather_rows(x, rows, out, count, width);                                          \
    }
GATHER_ROWS(gather_rows_16, u16)
GATHER_ROWS(gather_rows_32, u32)
GATHER_ROWS(gather_rows_128, Quad)

// out (count × width) = scale · row ids[i] of a table of bf16 in panels, whose rows have `stride` columns. A thread has eight columns.
KERNEL(256, embed_rows, (const u16* table, const u32* ids, float* out, u32 count, u32 width, u32 stride, float scale)) {
    begin_kernel();
    const u32 eights = (width + 7) / 8;
    const size_t index = thread_index(), row = index / eights;
    if (row >= count) return;
    const u32 at = index % eights * 8;
    const Quad packed = *(const Quad*)(table + Place<Panels>::at(ids[row], at, stride));
    const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
    Four halves[2];
    UNROLL for (u32 i = 0; i < 8; i++) halves[i / 4].x[i % 4] = Bf16::widen((u16)(words[i / 2] >> 16 * (i % 2))) * scale;
    UNROLL for (u32 half = 0; half < 2; half++)
        if (at + 4 * half < width) store_four<F32>(out + row * width + at + 4 * half, at + 4 * half, width, halves[half]);
}

// Bytes of the host's memory, which is pinned, in 16-byte pieces, a thread each.
KERNEL(256, copy_from_host, (const unsigned char* from, unsigned char* to, u64 bytes)) {
    begin_kernel();
    const size_t at = thread_index() * 16;
    if (at + 16 <= bytes) *(Quad*)(to + at) = *(const Quad*)(from + at);
    else
        for (size_t byte = at; byte < bytes; byte++) to[byte] = from[byte];
}

// x += y
KERNEL(256, add, (float* x, const float* y, u64 count)) {
    begin_kernel();
    const size_t at = thread_index();
    if (at < count) x[at] += y[at];
}

// out (rows × width) = Σ over the `each` routes of a row, in order, of weights[route] · parts[places[route]].
KERNEL(256, mix_routes, (const float* parts, const u32* places, const float* weights, float* out, u32 rows, u32 each, u32 width)) {
    begin_kernel();
    const size_t at = thread_index();
    if (at >= (size_t)rows * width) return;
    const size_t first = at / width * each;
    float sum = 0;
    for (size_t route = first; route < first + each; route++) sum += weights[route] * parts[(size_t)places[route] * width + at % width];
    out[at] = sum;
}

// The mean of rows of `width`, a thread for each column, summed in f64.
KERNEL(256, mean_row, (const float* x, float* out, u32 rows, u32 width)) {
    begin_kernel();
    const size_t column = thread_index();
    if (column >= width) return;
    double sum = 0;
    for (u32 row = 0; row < rows; row++) sum += x[(size_t)row * width + column];
    out[column] = (float)(sum / (rows ? rows : 1));
}
