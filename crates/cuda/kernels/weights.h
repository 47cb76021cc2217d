// Weights of products on tensor cores (product.cu), W outputs × inputs: their layouts in memory, and their way to mma.sync, 64 inputs a step.
//
// A layout is a type with quads(n), the 16-byte pieces of a tile of n outputs and 64 inputs in shared memory; load, which starts the copies of a
// tile; fragments, which gives a warp 8 outputs × 32 inputs of a tile in bf16, as two fragments of mma.sync; and FEW_STAGES, the stages of a
// product of few rows. Such a product is bounded by reading the weights: 64 bytes of 32 weights in bf16, 34 in blocks of 8 bits, 20 in blocks of 4.
#pragma once
#include "device.h"

// Where 16 bytes of a row of a tile of 64 inputs lie: shifted by the row, so that eight rows of one column fall in all banks.
DEVICE u32 swizzled(u32 row, u32 chunk) { return row * 8 + (chunk ^ (row & 7)); }

// Starts the copies of a tile of ROWS rows and 64 inputs in bf16, by THREADS threads. `stride` is of rows in memory; rows from `rows` on are zeros.
template <u32 ROWS, u32 THREADS> DEVICE void load_rows(Quad* tile, const u16* from, u32 first, u32 rows, u32 stride, u32 step) {
    UNROLL for (u32 i = 0; i < ROWS * 8 / THREADS; i++) {
        const u32 at = i * THREADS + threadIdx.x, line = at / 8, chunk = at % 8;
        const bool live = first + line < rows;
        copy_async(tile + swizzled(line, chunk), from + (size_t)(live ? first + line : 0) * stride + step * 64 + chunk * 8, live);
    }
}

// Rows of bf16, each a whole number of steps long.
struct Bf16Rows {
    typedef u16 Stored;
    static constexpr u32 FEW_STAGES = 6;
    static constexpr DEVICE u32 quads(u32 outputs) { return outputs * 8; }
    template <u32 OUTPUTS, u32 THREADS> static DEVICE void load(Quad* tile, const u16* w, u32 first, u32 outputs, u32 inputs, u32 step) {
        load_rows<OUTPUTS, THREADS>(tile, w, first, outputs, inputs, step);
    }
    static DEVICE void fragments(u32 (&b)[4], const Quad* tile, u32 output, u32 half) {
        const u32 lane = threadIdx.x % 32;
        load_matrices<false>(b, tile + swizzled(output + lane % 8, half * 4 + lane / 8));
    }
};

// Blocks of 32 inputs of an output, each weight of BITS bits: scale · (q − 128) of 8 bits, scale · q + min of 4. The product of scale and q is exact,
// and the value is rounded to bf16: a weight has the same bits in every tile, whatever a compiler contracts.
//
// A panel has the blocks of 32 outputs, block after block: 32 scales (f16), for 4 bits 32 minima (f16), then words. Word i of lane l for the 8
// outputs of group g is at [g][i][l]. A lane's words have the weights that it multiplies in the two fragments, from the lowest bits on: of output
// l / 4, inputs 2 (l % 4) + {0, 1} + {0, 8, 16, 24}. So a lane unpacks weights in its registers, and reads of a warp are contiguous. Panels are filled
// up to 32 outputs and to a whole number of steps, so that a step of a panel is one contiguous piece of memory.
template <u32 BITS> struct Blocks {
    typedef Quad Stored;
    static constexpr u32 OUTPUTS = 32, HEAD = BITS == 8 ? 4 : 8, BLOCK = HEAD + 32 * BITS / 4, STEP = 2 * BLOCK;
    static constexpr u32 WORDS = BITS / 4, FEW_STAGES = BITS == 8 ? 10 : 12;
    static constexpr DEVICE u32 quads(u32 outputs) { return outputs / OUTPUTS * STEP; }

    template <u32 TILE, u32 THREADS> static DEVICE void load(Quad* tile, const Quad* w, u32 first, u32 outputs, u32 inputs, u32 step) {
        for (u32 at = threadIdx.x; at < quads(TILE); at += THREADS) {
            const u32 panel = first / OUTPUTS + at / STEP;
            const bool live = panel * OUTPUTS < outputs;
            copy_async(tile + at, w + ((size_t)(live ? panel : 0) * (inputs / 64) + step) * STEP + at % STEP, live);
        }
    }
    static DEVICE void fragments(u32 (&b)[4], const Quad* tile, u32 output, u32 half) {
        const u32 lane = threadIdx.x % 32;
        const Quad* block = tile + (output / OUTPUTS * 2 + half) * BLOCK;
        const u16* head = (const u16*)block + output % OUTPUTS + lane / 4;
        const float scale = f16_to_f32(head[0]), min = BITS == 4 ? f16_to_f32(head[OUTPUTS]) : 0;
        const u32* words = (const u32*)(block + HEAD) + output % OUTPUTS / 8 * WORDS * 32 + lane;
        float weights[8];
        UNROLL for (u32 i = 0; i < 8; i++) {
            // Under the exponent of 2^(23 − at) the bits of q are those of the float 2^(23 − at) + q.
            const u32 at = i * BITS % 16, part = words[i * BITS / 32 * 32] >> (i * BITS / 16 % 2 * 16);
            const u32 bits = (part & ((1u << BITS) - 1) << at) | (150 - at) << 23;
            const float q = float_of_bits(bits) - (float)((1u << (23 - at)) + (BITS == 8 ? 128 : 0));
            weights[i] = BITS == 4 ? q * scale + min : q * scale;
        }
        UNROLL for (u32 i = 0; i < 4; i++) b[i] = pack_bf16(weights[2 * i], weights[2 * i + 1]);
    }
};
