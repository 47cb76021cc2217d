// Weights of products on tensor cores (product.cu), W outputs × inputs: their layouts in memory, and their way to mma.sync, 64 inputs a step.
//
// A layout is in panels of 32 outputs, each a whole number of steps; a step of a panel is one contiguous piece of memory. It is a type with
// STEP, the 16-byte pieces of a step of a panel; quads(n), those of a tile of n outputs; read, which gives a warp 8 outputs × 32 inputs of a tile, and
// unpack, which makes two fragments of mma.sync in bf16 of them; and FEW_STAGES, the stages of a product of few rows. Such a product is bounded by
// reading the weights: 64 bytes of 32 weights in bf16, 34 in blocks of 8 bits, 20 in blocks of 4.
#pragma once
#include "panels.h"

// Panels of 32 outputs, as activations lie (panels.h).
struct Bf16Panels {
    static constexpr u32 STEP = 256, FEW_STAGES = 6;
    static constexpr DEVICE u32 quads(u32 outputs) { return outputs * 8; }
    struct Packed {
        u32 words[4];
    };
    static DEVICE Packed read(const Quad* tile, u32 output, u32 half) {
        const u32 lane = threadIdx.x % 32;
        Packed packed;
        load_matrices<false>(packed.words, tile + swizzled(output + lane % 8, half * 4 + lane / 8));
        return packed;
    }
    static DEVICE void unpack(u32 (&b)[4], const Packed& packed) { UNROLL for (u32 i = 0; i < 4; i++) b[i] = packed.words[i]; }
};

// Blocks of 32 inputs of an output, each weight of BITS bits: scale · (q − 128) of 8 bits, scale · q + min of 4. The product of scale and q is exact,
// and the value is rounded to bf16: a weight has the same bits in every tile, whatever a compiler contracts.
//
// A panel has the blocks of 32 outputs, block after block: 32 scales (f16), for 4 bits 32 minima (f16), then words. Word i of lane l for the 8
// outputs of group g is at [g][i][l]. A lane's words have the weights that it multiplies in the two fragments, from the lowest bits on: of output
// l / 4, inputs 2 (l % 4) + {0, 1} + {0, 8, 16, 24}. So a lane unpacks weights in its registers, and reads of a warp are contiguous. Panels are filled
// up to 32 outputs and to a whole number of steps, so that a step of a panel is one contiguous piece of memory.
template <u32 BITS> struct Blocks {
    static constexpr u32 OUTPUTS = 32, HEAD = BITS == 8 ? 4 : 8, BLOCK = HEAD + 32 * BITS / 4, STEP = 2 * BLOCK;
    static constexpr u32 WORDS = BITS / 4, FEW_STAGES = BITS == 8 ? 10 : 12;
    static constexpr DEVICE u32 quads(u32 outputs) { return outputs / OUTPUTS * STEP; }

    struct Packed {
        u32 words[WORDS];
        u16 scale, min;
    };
    static DEVICE Packed read(const Quad* tile, u32 output, u32 half) {
        const u32 lane = threadIdx.x % 32;
        const Quad* block = tile + (output / OUTPUTS * 2 + half) * BLOCK;
        const u16* head = (const u16*)block + output % OUTPUTS + lane / 4;
        const u32* words = (const u32*)(block + HEAD) + output % OUTPUTS / 8 * WORDS * 32 + lane;
        Packed packed;
        packed.scale = head[0];
        packed.min = BITS == 4 ? head[OUTPUTS] : 0;
        UNROLL for (u32 i = 0; i < WORDS; i++) packed.words[i] = words[i * 32];
        return packed;
    }
    static DEVICE void unpack(u32 (&b)[4], const Packed& packed) {
        const float scale = f16_to_f32(packed.scale);
        float weights[8];
        if constexpr (BITS == 8) {
            // Under the exponent of 2^15 the second byte of a float counts ones. Both products are exact, and so is their difference.
            const float offset = scale * -(float)((1u << 15) + 128);
            UNROLL for (u32 i = 0; i < 8; i++) {
                const u32 bits = select_bytes(packed.words[i / 4], 0x47000000, 0x7604 | i % 4 << 4);
                weights[i] = fmaf(float_of_bits(bits), scale, offset);
            }
        } else {
            const float min = f16_to_f32(packed.min);
            UNROLL for (u32 i = 0; i < 8; i++) {
                // Under the exponent of 2^(23 − at) the bits of q are those of the float 2^(23 − at) + q.
                const u32 at = i * 4 % 16, part = packed.words[0] >> (i / 4 * 16);
                const u32 bits = (part & 15u << at) | (150 - at) << 23;
                weights[i] = (float_of_bits(bits) - (float)(1u << (23 - at))) * scale + min;
            }
        }
        UNROLL for (u32 i = 0; i < 4; i++) b[i] = pack_bf16(weights[2 * i], weights[2 * i + 1]);
    }
};

// 8 outputs × 32 inputs of a tile in bf16.
template <class W> DEVICE void read_fragments(u32 (&b)[4], const Quad* tile, u32 output, u32 half) { W::unpack(b, W::read(tile, output, half)); }
