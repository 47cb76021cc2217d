// Products with weights: out = x · Wᵀ + b, x rows × inputs, W outputs × inputs.
//
// Every element of a result is summed over the inputs in one ascending chain, whatever the tile that it lies in: the bits of a row do not
// depend on the rows beside it, and a product of few rows gives those of a product of many.
#pragma once
#include "device.h"

// The last step of a product: it is stored, added to what is there, or, of gate and up projection in alternating columns, activated and multiplied.
enum Epilogue { STORE, ADD, GATE_SILU, GATE_GELU };

DEVICE float activate(float x, bool gelu) {
    if (!gelu) return x / (1.0f + expf(-x));
    const float inner = 0.79788456f * (x + 0.044715f * x * x * x);
    return x * 0.5f * (1.0f + tanhf(inner));
}

// Takes two neighbouring columns of a row, the first of them even. `stride` is of rows of the result, gated ones of one column for two.
template <Epilogue E, class Out>
DEVICE void finish(typename Out::Stored* out, u32 stride, u32 row, u32 column, u32 outputs, const float* bias, float first, float second) {
    const bool both = column + 1 < outputs;
    if (bias) {
        first += bias[column];
        if (both) second += bias[column + 1];
    }
    if (E == GATE_SILU || E == GATE_GELU) {
        out[(size_t)row * stride + column / 2] = Out::narrow(activate(first, E == GATE_GELU) * second);
        return;
    }
    typename Out::Stored* at = out + (size_t)row * stride + column;
    at[0] = Out::narrow(E == ADD ? Out::widen(at[0]) + first : first);
    if (both) at[1] = Out::narrow(E == ADD ? Out::widen(at[1]) + second : second);
}

// In f32: tiles of ROWS × 64, 16 inputs at a time; a thread has 4 × 4 elements.
template <Epilogue E, u32 ROWS>
DEVICE void product_f32(const float* x, const float* w, const float* bias, float* out, u32 rows, u32 outputs, u32 inputs, u32 stride) {
    constexpr u32 COLUMNS = 64, DEPTH = 16, BLOCK = ROWS / 4 * 16;
    float(*tile_w)[COLUMNS + 4] = (float(*)[COLUMNS + 4])shared_memory;
    float(*tile_x)[ROWS + 4] = (float(*)[ROWS + 4])(tile_w + DEPTH);
    const u32 first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLUMNS;
    const u32 own_row = threadIdx.x / 16 * 4, own_column = threadIdx.x % 16 * 4;
    const bool live = first_row + own_row < rows && first_column + own_column < outputs;
    float sums[4][4] = {};
    for (u32 input = 0; input < inputs; input += DEPTH) {
        for (u32 at = threadIdx.x; at < ROWS * DEPTH; at += BLOCK) {
            const u32 i = at % DEPTH, row = first_row + at / DEPTH;
            tile_x[i][at / DEPTH] = input + i < inputs && row < rows ? x[(size_t)row * inputs + input + i] : 0;
        }
        for (u32 at = threadIdx.x; at < COLUMNS * DEPTH; at += BLOCK) {
            const u32 i = at % DEPTH, column = first_column + at / DEPTH;
            tile_w[i][at / DEPTH] = input + i < inputs && column < outputs ? w[(size_t)column * inputs + input + i] : 0;
        }
        block_barrier();
        if (live)
            UNROLL for (u32 i = 0; i < DEPTH; i++)
                UNROLL for (u32 r = 0; r < 4; r++)
                    UNROLL for (u32 c = 0; c < 4; c++) sums[r][c] += tile_x[i][own_row + r] * tile_w[i][own_column + c];
        block_barrier();
    }
    UNROLL for (u32 r = 0; r < 4; r++)
        UNROLL for (u32 c = 0; c < 4; c += 2) {
            const u32 row = first_row + own_row + r, column = first_column + own_column + c;
            if (row < rows && column < outputs) finish<E, F32>(out, stride, row, column, outputs, bias, sums[r][c], sums[r][c + 1]);
        }
}
#define PRODUCT_F32(suffix, E)                                                                                                        \
    KERNEL(256, product_f32_##suffix,                                                                                                 \
           (const float* x, const float* w, const float* bias, float* out, u32 rows, u32 outputs, u32 inputs, u32 stride)) {          \
        product_f32<E, 64>(x, w, bias, out, rows, outputs, inputs, stride);                                                           \
    }                                                                                                                                 \
    KERNEL(32, product_f32_few_##suffix,                                                                                              \
           (const float* x, const float* w, const float* bias, float* out, u32 rows, u32 outputs, u32 inputs, u32 stride)) {          \
        product_f32<E, 8>(x, w, bias, out, rows, outputs, inputs, stride);                                                            \
    }
PRODUCT_F32(store, STORE)
PRODUCT_F32(add, ADD)
PRODUCT_F32(silu, GATE_SILU)
PRODUCT_F32(gelu, GATE_GELU)

// Where 16 bytes of a row of a tile of 64 inputs lie: shifted by the row, so that eight rows of one column fall in all banks.
DEVICE u32 swizzled(u32 row, u32 chunk) { return row * 8 + (chunk ^ (row & 7)); }

// In bf16, many rows: tiles of 128 × 128, 64 inputs at a time, three stages; 8 warps of 64 × 32. `inputs` is a multiple of 64.
template <Epilogue E, class Out>
DEVICE void product_bf16(const u16* x, const u16* w, const float* bias, typename Out::Stored* out, u32 rows, u32 outputs, u32 inputs,
                         u32 stride) {
    constexpr u32 M = 128, N = 128, STAGES = 3, CHUNKS = 8;
    Quad* tiles_x = (Quad*)shared_memory;
    Quad* tiles_w = tiles_x + STAGES * M * CHUNKS;
    const u32 thread = threadIdx.x, lane = thread % 32, warp_row = thread / 128 * 64, warp_column = thread / 32 % 4 * 32;
    // Blocks that run together take eight rows of tiles at a time, so that they share tiles of x and w in the cache.
    const u32 high = (rows + M - 1) / M, wide = (outputs + N - 1) / N, band = blockIdx.x / (8 * wide);
    const u32 band_high = high - band * 8 < 8 ? high - band * 8 : 8, within = blockIdx.x % (8 * wide);
    const u32 first_row = (band * 8 + within % band_high) * M, first_column = within / band_high * N, steps = inputs / 64;
    auto load = [&](u32 step) {
        if (step < steps)
            UNROLL for (u32 i = 0; i < M * CHUNKS / 256; i++) {
                const u32 at = i * 256 + thread, line = at / CHUNKS, chunk = at % CHUNKS;
                const u32 to = step % STAGES * M * CHUNKS + swizzled(line, chunk);
                const bool has_row = first_row + line < rows, has_column = first_column + line < outputs;
                copy_async(tiles_x + to, x + (size_t)(has_row ? first_row + line : 0) * inputs + step * 64 + chunk * 8, has_row);
                copy_async(tiles_w + to, w + (size_t)(has_column ? first_column + line : 0) * inputs + step * 64 + chunk * 8, has_column);
            }
        commit_copies(); // without a copy too, so that the count of groups stays that of the steps
    };
    float sums[4][4][4] = {};
    load(0);
    load(1);
    for (u32 step = 0; step < steps; step++) {
        wait_copies<1>();
        block_barrier(); // the stage has come for all, and the one that is loaded next has been read by all
        load(step + 2);
        const Quad* tile_x = tiles_x + step % STAGES * M * CHUNKS;
        const Quad* tile_w = tiles_w + step % STAGES * N * CHUNKS;
        UNROLL for (u32 k = 0; k < 4; k++) {
            u32 a[4][4], b[2][4];
            UNROLL for (u32 i = 0; i < 4; i++)
                load_matrices<false>(a[i], tile_x + swizzled(warp_row + i * 16 + lane % 16, k * 2 + lane / 16));
            UNROLL for (u32 j = 0; j < 2; j++)
                load_matrices<false>(b[j], tile_w + swizzled(warp_column + j * 16 + lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2));
            UNROLL for (u32 i = 0; i < 4; i++)
                UNROLL for (u32 j = 0; j < 4; j++) mma_bf16(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
    }
    UNROLL for (u32 i = 0; i < 4; i++)
        UNROLL for (u32 j = 0; j < 4; j++)
            UNROLL for (u32 h = 0; h < 2; h++) {
                const u32 row = first_row + warp_row + i * 16 + lane / 4 + h * 8, column = first_column + warp_column + j * 8 + lane % 4 * 2;
                if (row < rows && column < outputs)
                    finish<E, Out>(out, stride, row, column, outputs, bias, sums[i][j][2 * h], sums[i][j][2 * h + 1]);
            }
}

// In bf16, at most 16 rows, which weights flow past: tiles of 16 × 32, 64 inputs at a time, six stages; 4 warps of 16 × 8.
template <Epilogue E, class Out>
DEVICE void product_bf16_few(const u16* x, const u16* w, const float* bias, typename Out::Stored* out, u32 rows, u32 outputs, u32 inputs,
                             u32 stride) {
    constexpr u32 M = 16, N = 32, STAGES = 6, CHUNKS = 8;
    Quad* tiles_x = (Quad*)shared_memory;
    Quad* tiles_w = tiles_x + STAGES * M * CHUNKS;
    const u32 thread = threadIdx.x, lane = thread % 32, warp_column = thread / 32 * 8;
    const u32 first_column = blockIdx.x * N, steps = inputs / 64;
    auto load = [&](u32 step) {
        if (step < steps) {
            const u32 chunk = thread % CHUNKS, line = thread / CHUNKS, stage = step % STAGES;
            const size_t at = step * 64 + chunk * 8;
            copy_async(tiles_x + stage * M * CHUNKS + swizzled(line, chunk), x + (line < rows ? line : 0) * (size_t)inputs + at, line < rows);
            UNROLL for (u32 i = 0; i < 2; i++) {
                const u32 column = first_column + i * 16 + line;
                copy_async(tiles_w + stage * N * CHUNKS + swizzled(i * 16 + line, chunk),
                           w + (size_t)(column < outputs ? column : 0) * inputs + at, column < outputs);
            }
        }
        commit_copies();
    };
    float sums[4] = {};
    UNROLL for (u32 step = 0; step < STAGES - 1; step++) load(step);
    for (u32 step = 0; step < steps; step++) {
        wait_copies<STAGES - 2>();
        block_barrier();
        load(step + STAGES - 1);
        const Quad* tile_x = tiles_x + step % STAGES * M * CHUNKS;
        const Quad* tile_w = tiles_w + step % STAGES * N * CHUNKS;
        UNROLL for (u32 k = 0; k < 2; k++) {
            u32 a[2][4], b[4];
            UNROLL for (u32 i = 0; i < 2; i++) load_matrices<false>(a[i], tile_x + swizzled(lane % 16, k * 4 + i * 2 + lane / 16));
            load_matrices<false>(b, tile_w + swizzled(warp_column + lane % 8, k * 4 + lane / 8));
            mma_bf16(sums, a[0], b[0], b[1]);
            mma_bf16(sums, a[1], b[2], b[3]);
        }
    }
    UNROLL for (u32 h = 0; h < 2; h++) {
        const u32 row = lane / 4 + h * 8, column = first_column + warp_column + lane % 4 * 2;
        if (row < rows && column < outputs) finish<E, Out>(out, stride, row, column, outputs, bias, sums[2 * h], sums[2 * h + 1]);
    }
}
#define PRODUCT_BF16(suffix, E, OUT)                                                                                              \
    KERNEL(256, product_bf16_##suffix,                                                                                            \
           (const u16* x, const u16* w, const float* bias, OUT::Stored* out, u32 rows, u32 outputs, u32 inputs, u32 stride)) {    \
        product_bf16<E, OUT>(x, w, bias, out, rows, outputs, inputs, stride);                                                     \
    }                                                                                                                             \
    KERNEL(128, product_bf16_few_##suffix,                                                                                        \
           (const u16* x, const u16* w, const float* bias, OUT::Stored* out, u32 rows, u32 outputs, u32 inputs, u32 stride)) {    \
        product_bf16_few<E, OUT>(x, w, bias, out, rows, outputs, inputs, stride);                                                 \
    }
PRODUCT_BF16(store, STORE, F32)
PRODUCT_BF16(add, ADD, F32)
PRODUCT_BF16(silu, GATE_SILU, Bf16)
PRODUCT_BF16(gelu, GATE_GELU, Bf16)
