// Products with weights: out = x · Wᵀ + b, x rows × inputs, W outputs × inputs.
//
// Every element of a result is summed over the inputs in one ascending chain, whatever the tile that it lies in: the bits of a row do not
// depend on the rows beside it, and a product of few rows gives those of a product of many.
#pragma once
#include "weights.h"

// The last step of a product: it is stored, added to what is there, or, of gate and up projection in alternating columns, activated and multiplied.
enum Epilogue { STORE, ADD, GATE_SILU, GATE_GELU };

DEVICE float activate(float x, bool gelu) {
    if (!gelu) return x / (1.0f + expf(-x));
    const float inner = 0.79788456f * (x + 0.044715f * x * x * x);
    return x * 0.5f * (1.0f + tanhf(inner));
}

// Two neighbouring columns of a row, the first of them even. `stride` is of rows of the result, gated ones of one column for two.
struct Elements {
    u32 row, column;
};

// Two elements of the result before something is added to them; zeros with epilogues that do not add. Rows of an even stride begin at multiples of
// 8 bytes.
template <Epilogue E, class Out> DEVICE Pair addends(const typename Out::Stored* out, u32 stride, Elements at, u32 outputs) {
    if constexpr (E == ADD) {
        const float* from = out + (size_t)at.row * stride + at.column;
        if (stride % 2 == 0) return *(const Pair*)from;
        return {bits_of_float(from[0]), at.column + 1 < outputs ? bits_of_float(from[1]) : 0};
    }
    return {0, 0};
}

template <Epilogue E, class Out>
DEVICE void finish(typename Out::Stored* out, u32 stride, Elements at, u32 outputs, const float* bias, float first, float second, Pair addends) {
    const bool both = at.column + 1 < outputs;
    if (bias) {
        first += bias[at.column];
        if (both) second += bias[at.column + 1];
    }
    if constexpr (E == GATE_SILU || E == GATE_GELU) {
        out[Place<Out>::at(at.row, at.column / 2, stride)] = Out::narrow(activate(first, E == GATE_GELU) * second);
    } else {
        if (E == ADD) {
            first += float_of_bits(addends.x);
            second += float_of_bits(addends.y);
        }
        float* to = out + (size_t)at.row * stride + at.column;
        if (stride % 2 == 0) {
            *(Pair*)to = {bits_of_float(first), bits_of_float(second)};
        } else {
            to[0] = first;
            if (both) to[1] = second;
        }
    }
}
template <Epilogue E, class Out>
DEVICE void finish(typename Out::Stored* out, u32 stride, Elements at, u32 outputs, const float* bias, float first, float second) {
    finish<E, Out>(out, stride, at, outputs, bias, first, second, addends<E, Out>(out, stride, at, outputs));
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
            if (row < rows && column < outputs) finish<E, F32>(out, stride, {row, column}, outputs, bias, sums[r][c], sums[r][c + 1]);
        }
}
#define PRODUCT_F32(suffix, E)                                                                                               \
    KERNEL(256, product_f32_##suffix,                                                                                        \
           (const float* x, const float* w, const float* bias, float* out, u32 rows, u32 outputs, u32 inputs, u32 stride)) { \
        begin_kernel();                                                                                                      \
        product_f32<E, 64>(x, w, bias, out, rows, outputs, inputs, stride);                                                  \
    }                                                                                                                        \
    KERNEL(32, product_f32_few_##suffix,                                                                                     \
           (const float* x, const float* w, const float* bias, float* out, u32 rows, u32 outputs, u32 inputs, u32 stride)) { \
        begin_kernel();                                                                                                      \
        product_f32<E, 8>(x, w, bias, out, rows, outputs, inputs, stride);                                                   \
    }
PRODUCT_F32(store, STORE)
PRODUCT_F32(add, ADD)
PRODUCT_F32(silu, GATE_SILU)
PRODUCT_F32(gelu, GATE_GELU)

// Tiles of rows and columns, eight rows of tiles at a time, so that blocks that run together share tiles of x and w in the cache.
struct Tile {
    u32 first_row, first_column;
};
template <u32 M, u32 N> DEVICE Tile tile_of_index(u32 index, u32 rows, u32 outputs) {
    const u32 high = (rows + M - 1) / M, wide = (outputs + N - 1) / N, band = index / (8 * wide);
    const u32 band_high = high - band * 8 < 8 ? high - band * 8 : 8, within = index % (8 * wide);
    return {(band * 8 + within % band_high) * M, within / band_high * N};
}

// On tensor cores, many rows: tiles of 128 × 128, 64 inputs at a time, three stages; 8 warps of 64 × 32. `inputs` is a multiple of 64. Bounded by the
// tensor cores; each weight of a tile is unpacked by the two warps that multiply it.
template <Epilogue E, class Out, class W>
DEVICE void product(const Quad* x, const Quad* w, const float* bias, typename Out::Stored* out, u32 rows, u32 outputs, u32 inputs,
                    u32 stride) {
    constexpr u32 M = 128, N = 128, STAGES = 3, THREADS = 256, QUADS_X = M * 8, QUADS_W = W::quads(N);
    Quad* tiles_x = (Quad*)shared_memory;
    Quad* tiles_w = tiles_x + STAGES * QUADS_X;
    const u32 thread = threadIdx.x, lane = thread % 32, warp_row = thread / 128 * 64, warp_column = thread / 32 % 4 * 32, steps = inputs / 64;
    const Tile tile = tile_of_index<M, N>(blockIdx.x, rows, outputs);
    auto load = [&](u32 step) {
        if (step < steps) {
            load_panels<M, 256, THREADS>(tiles_x + step % STAGES * QUADS_X, x, tile.first_row, rows, steps, step);
            load_panels<N, W::STEP, THREADS>(tiles_w + step % STAGES * QUADS_W, w, tile.first_column, outputs, steps, step);
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
        const Quad* tile_x = tiles_x + step % STAGES * QUADS_X;
        const Quad* tile_w = tiles_w + step % STAGES * QUADS_W;
        UNROLL for (u32 half = 0; half < 2; half++) {
            u32 b[4][4];
            UNROLL for (u32 j = 0; j < 4; j++) read_fragments<W>(b[j], tile_w, warp_column + j * 8, half);
            UNROLL for (u32 k = 0; k < 2; k++)
                UNROLL for (u32 i = 0; i < 4; i++) {
                    u32 a[4];
                    load_matrices<false>(a, tile_x + swizzled(warp_row + i * 16 + lane % 16, half * 4 + k * 2 + lane / 16));
                    UNROLL for (u32 j = 0; j < 4; j++) mma_bf16(sums[i][j], a, b[j][k * 2], b[j][k * 2 + 1]);
                }
        }
    }
    UNROLL for (u32 i = 0; i < 4; i++)
        UNROLL for (u32 j = 0; j < 4; j++)
            UNROLL for (u32 h = 0; h < 2; h++) {
                const u32 row = tile.first_row + warp_row + i * 16 + lane / 4 + h * 8;
                const u32 column = tile.first_column + warp_column + j * 8 + lane % 4 * 2;
                if (row < rows && column < outputs)
                    finish<E, Out>(out, stride, {row, column}, outputs, bias, sums[i][j][2 * h], sums[i][j][2 * h + 1]);
            }
}

// A step of a product of few rows: a warp multiplies 16 rows of x by 8 outputs, 64 inputs. First the weights, which come from `first_column` of a tile on,
// as fragments; then their products.
template <class W> struct FewWeights {
    u32 b[2][4];
    DEVICE void read(const Quad* tile_w, u32 first_column) {
        UNROLL for (u32 half = 0; half < 2; half++) read_fragments<W>(b[half], tile_w, first_column, half);
    }
    DEVICE void multiply(float (&sums)[4], const Quad* tile_x) const {
        const u32 lane = threadIdx.x % 32;
        u32 a[4][4];
        UNROLL for (u32 i = 0; i < 4; i++) load_matrices<false>(a[i], tile_x + swizzled(lane % 16, i * 2 + lane / 16));
        UNROLL for (u32 i = 0; i < 4; i++) mma_bf16(sums, a[i], b[i / 2][i % 2 * 2], b[i / 2][i % 2 * 2 + 1]);
    }
};
template <Epilogue E, class Out>
DEVICE void finish_few(const float (&sums)[4], u32 first_column, const float* bias, typename Out::Stored* out, u32 rows, u32 outputs, u32 stride) {
    const u32 lane = threadIdx.x % 32;
    UNROLL for (u32 h = 0; h < 2; h++) {
        const u32 row = lane / 4 + h * 8, column = first_column + lane % 4 * 2;
        if (row < rows && column < outputs) finish<E, Out>(out, stride, {row, column}, outputs, bias, sums[2 * h], sums[2 * h + 1]);
    }
}

// On tensor cores, at most 16 rows, which weights flow past: tiles of 16 × 32, 64 inputs at a time, in W::FEW_STAGES stages; 4 warps of 16 × 8.
template <Epilogue E, class Out, class W>
DEVICE void product_few(const Quad* x, const Quad* w, const float* bias, typename Out::Stored* out, u32 rows, u32 outputs, u32 inputs,
                        u32 stride) {
    constexpr u32 M = 16, N = 32, STAGES = W::FEW_STAGES, THREADS = 128, QUADS_X = M * 8, QUADS_W = W::quads(N);
    static_assert(QUADS_X == THREADS, "each thread copies one piece of x");
    Quad* tiles_x = (Quad*)shared_memory;
    Quad* tiles_w = tiles_x + STAGES * QUADS_X;
    const u32 thread = threadIdx.x, warp_column = thread / 32 * 8, first_column = blockIdx.x * N, steps = inputs / 64;
    auto load = [&](u32 step) {
        if (step < steps) {
            const bool live = thread / 8 < rows;
            copy_async(tiles_x + step % STAGES * QUADS_X + thread, x + (size_t)step * 256 + (live ? thread : 0), live);
            load_panels<N, W::STEP, THREADS>(tiles_w + step % STAGES * QUADS_W, w, first_column, outputs, steps, step);
        }
        commit_copies();
    };
    float sums[4] = {};
    UNROLL for (u32 step = 0; step < STAGES - 1; step++) load(step);
    for (u32 step = 0; step < steps; step++) {
        wait_copies<STAGES - 2>();
        block_barrier();
        load(step + STAGES - 1);
        FewWeights<W> weights;
        weights.read(tiles_w + step % STAGES * QUADS_W, warp_column);
        weights.multiply(sums, tiles_x + step % STAGES * QUADS_X);
    }
    finish_few<E, Out>(sums, first_column + warp_column, bias, out, rows, outputs, stride);
}
#define PRODUCT_PARAMETERS(OUT) \
    (const Quad* x, const Quad* w, const float* bias, OUT::Stored* out, u32 rows, u32 outputs, u32 inputs, u32 stride)
#define PRODUCT(name, suffix, E, OUT, W)                                        \
    KERNEL(256, product_##name##_##suffix, PRODUCT_PARAMETERS(OUT)) {           \
        begin_kernel();                                                         \
        product<E, OUT, W>(x, w, bias, out, rows, outputs, inputs, stride);     \
    }                                                                           \
    KERNEL(128, product_##name##_few_##suffix, PRODUCT_PARAMETERS(OUT)) {       \
        begin_kernel();                                                         \
        product_few<E, OUT, W>(x, w, bias, out, rows, outputs, inputs, stride); \
    }
// KERNELS for each last step of a product, with weights of a layout; and for each layout.
#define FOR_EPILOGUES(KERNELS, name, W)       \
    KERNELS(name, store, STORE, F32, W)       \
    KERNELS(name, add, ADD, F32, W)           \
    KERNELS(name, silu, GATE_SILU, Panels, W) \
    KERNELS(name, gelu, GATE_GELU, Panels, W)
#define FOR_WEIGHTS(KERNELS)                 \
    FOR_EPILOGUES(KERNELS, bf16, Bf16Panels) \
    FOR_EPILOGUES(KERNELS, q8, Blocks<8>)    \
    FOR_EPILOGUES(KERNELS, q4, Blocks<4>)
FOR_WEIGHTS(PRODUCT)

// Blocks as panels of bf16 that have their values, to the bit: a step of a panel for each block of 128 threads.
template <u32 BITS> DEVICE void unpack_blocks(const Quad* w, Quad* out) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32* words = (u32*)shared_memory;
    UNROLL for (u32 half = 0; half < 2; half++) {
        u32 b[4];
        read_fragments<Blocks<BITS>>(b, w + (size_t)blockIdx.x * Blocks<BITS>::STEP, warp * 8, half);
        UNROLL for (u32 i = 0; i < 4; i++) words[swizzled(warp * 8 + lane / 4, half * 4 + i) * 4 + lane % 4] = b[i];
    }
    block_barrier();
    UNROLL for (u32 i = 0; i < 2; i++) out[(size_t)blockIdx.x * 256 + i * 128 + threadIdx.x] = ((const Quad*)words)[i * 128 + threadIdx.x];
}
KERNEL(128, unpack_q8, (const Quad* w, Quad* out)) { begin_kernel(); unpack_blocks<8>(w, out); }
KERNEL(128, unpack_q4, (const Quad* w, Quad* out)) { begin_kernel(); unpack_blocks<4>(w, out); }
