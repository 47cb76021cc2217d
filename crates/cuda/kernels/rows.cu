// Kernels on rows of activations: norms, rounding, gathering, sums.
#pragma once
#include "device.h"

// The sum of a number over the block, the same in each thread. `parts` is one float for each warp.
DEVICE float block_sum(float x, float* parts) {
    x = warp_sum(x);
    const u32 warps = blockDim.x / 32;
    if (warps == 1) return x;
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    block_barrier();
    x = 0;
    for (u32 i = 0; i < warps; i++) x += parts[i];
    return x;
}

// Root-mean-square norm of segments of rows: a block each. Segment s of row r begins at x[r·x_stride + s·width], its result at
// out[r·out_stride + s·width]. With ADD the result is added. Columns from `width` to `padded` of the result become zeros.
template <class Out, bool ADD>
DEVICE void rms_norm(const float* x, u32 x_stride, const float* weight, typename Out::Stored* out, u32 out_stride, u32 segments, u32 width,
                     u32 padded, float eps) {
    const u32 row = blockIdx.x / segments, segment = blockIdx.x % segments;
    x += (size_t)row * x_stride + segment * width;
    out += (size_t)row * out_stride + segment * width;
    float squares = 0;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) squares += x[i] * x[i];
    squares = block_sum(squares, (float*)shared_memory);
    const float scale = 1.0f / sqrtf(squares / width + eps);
    for (u32 i = threadIdx.x; i < padded; i += blockDim.x) {
        const float y = i < width ? x[i] * scale * weight[i] : 0;
        out[i] = ADD ? Out::narrow(Out::widen(out[i]) + y) : Out::narrow(y);
    }
}
#define RMS_NORM(name, OUT, ADD)                                                                                                       \
    KERNEL(256, name,                                                                                                                  \
           (const float* x, u32 x_stride, const float* weight, OUT::Stored* out, u32 out_stride, u32 segments, u32 width, u32 padded, \
            float eps)) {                                                                                                              \
        rms_norm<OUT, ADD>(x, x_stride, weight, out, out_stride, segments, width, padded, eps);                                        \
    }
RMS_NORM(rms_norm_f32, F32, false)
RMS_NORM(rms_norm_f16, F16, false)
RMS_NORM(rms_norm_bf16, Bf16, false)
RMS_NORM(rms_norm_add, F32, true)

// Rows rounded to another type: out[r·out_stride + i] = x[r·x_stride + i] for i < width, zeros up to out_stride.
template <class Out>
DEVICE void round_rows(const float* x, u32 x_stride, typename Out::Stored* out, u32 out_stride, u32 rows, u32 width) {
    const size_t at = thread_index();
    if (at >= (size_t)rows * out_stride) return;
    const u32 row = at / out_stride, i = at % out_stride;
    out[at] = Out::narrow(i < width ? x[(size_t)row * x_stride + i] : 0);
}
#define ROUND_ROWS(name, OUT)                                                                                         \
    KERNEL(256, name, (const float* x, u32 x_stride, OUT::Stored* out, u32 out_stride, u32 rows, u32 width)) {        \
        round_rows<OUT>(x, x_stride, out, out_stride, rows, width);                                                   \
    }
ROUND_ROWS(round_rows_f32, F32)
ROUND_ROWS(round_rows_f16, F16)
ROUND_ROWS(round_rows_bf16, Bf16)

// out (count × width) = x[rows], of elements of 16 or 32 bits.
template <class T> DEVICE void gather_rows(const T* x, const u32* rows, T* out, u32 count, u32 width) {
    const size_t at = thread_index();
    if (at < (size_t)count * width) out[at] = x[(size_t)rows[at / width] * width + at % width];
}
KERNEL(256, gather_rows_16, (const u16* x, const u32* rows, u16* out, u32 count, u32 width)) { gather_rows(x, rows, out, count, width); }
KERNEL(256, gather_rows_32, (const u32* x, const u32* rows, u32* out, u32 count, u32 width)) { gather_rows(x, rows, out, count, width); }

// x += y
KERNEL(256, add, (float* x, const float* y, u64 count)) {
    const size_t at = thread_index();
    if (at < count) x[at] += y[at];
}

// out (rows × width) = Σ over the `each` routes of a row, in order, of weights[route] · parts[places[route]].
KERNEL(256, mix_routes, (const float* parts, const u32* places, const float* weights, float* out, u32 rows, u32 each, u32 width)) {
    const size_t at = thread_index();
    if (at >= (size_t)rows * width) return;
    const size_t first = at / width * each;
    float sum = 0;
    for (size_t route = first; route < first + each; route++) sum += weights[route] * parts[(size_t)places[route] * width + at % width];
    out[at] = sum;
}

// The mean of rows of `width`, a thread for each column, summed in f64.
KERNEL(256, mean_row, (const float* x, float* out, u32 rows, u32 width)) {
    const size_t column = thread_index();
    if (column >= width) return;
    double sum = 0;
    for (u32 row = 0; row < rows; row++) sum += x[(size_t)row * width + column];
    out[column] = (float)(sum / (rows ? rows : 1));
}
