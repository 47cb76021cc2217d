// Tensor cores by themselves: products of registers, with which other kernels are compared.
#pragma once
#include "entries.h"

// Each warp adds a product of 16 × 16 by 16 × 8 to each of eight sums, `rounds` times. Elements are 1 with the bits of `mask` drawn anew; a
// thread writes the sum of its elements.
KERNEL(256, peak_bf16, (float* out, u32 rounds, u32 mask)) {
    constexpr u32 SUMS = 8;
    u32 a[4], b[SUMS][2], draw = (u32)thread_index() * 32;
    auto element = [&] { return 0x3f803f80u ^ (mix32(++draw) & mask); };
    UNROLL for (u32 i = 0; i < 4; i++) a[i] = element();
    UNROLL for (u32 s = 0; s < SUMS; s++) b[s][0] = element(), b[s][1] = element();
    float sums[SUMS][4] = {};
    for (u32 round = 0; round < rounds; round++)
        UNROLL for (u32 s = 0; s < SUMS; s++) mma_bf16(sums[s], a, b[s][0], b[s][1]);
    float sum = 0;
    UNROLL for (u32 s = 0; s < SUMS; s++)
        UNROLL for (u32 i = 0; i < 4; i++) sum += sums[s][i];
    out[thread_index()] = sum;
}
