// Tensor cores by themselves: products of registers, with which other kernels are compared.
#pragma once
#include "entries.h"

DEVICE u32 drawn_pair(u32 draw, u32 mask) { return 0x3f803f80u ^ (mix32(draw) & mask); }

// Each warp adds a product of 16 × 16 by 16 × 8 to each of eight sums, `rounds` times. Elements are 1 with the bits of `mask` drawn anew; a
// thread writes the sum of its elements.
KERNEL(256, peak_bf16, (float* out, u32 rounds, u32 mask)) {
    begin_kernel();
    constexpr u32 SUMS = 8;
    u32 a[4], b[SUMS][2], draw = (u32)thread_index() * 32;
    auto element = [&] { return drawn_pair(++draw, mask); };
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

// Each warpgroup adds four products of 64 × 16 by 16 × 256 of tiles in shared memory, `rounds` times. Elements and results are those of peak_bf16.
DEVICE void peak_of_groups(float* out, u32 rounds, u32 mask) {
    constexpr u32 WORDS = (64 + 256) * 32;
    u32* words = (u32*)shared_memory;
    for (u32 at = threadIdx.x; at < WORDS; at += blockDim.x) words[at] = drawn_pair(blockIdx.x * WORDS + at, mask);
    async_fence();
    block_barrier();
    const SharedTile a = shared_tile(words), b = shared_tile(words + 64 * 32);
    float sums[128] = {};
    for (u32 round = 0; round < rounds; round++) {
        begin_products();
        UNROLL for (u32 k = 0; k < 4; k++) product_of_group(sums, a.columns(k), b.columns(k));
        commit_products();
        wait_products<1>();
    }
    wait_products<0>();
    float sum = 0;
    UNROLL for (u32 i = 0; i < 128; i++) sum += sums[i];
    out[thread_index()] = sum;
}
HOPPER_KERNEL(256, peak_bf16_groups, (float* out, u32 rounds, u32 mask)) { begin_kernel(); ON_HOPPER(peak_of_groups(out, rounds, mask)); }
