// Attention mass on tensor cores, from the logarithms of the softmaxes' sums, for keys of 16 bits.
#pragma once
#include "tensor_attention.cu"

// sums (Hkv × count) = Σ over rows and the heads of a KV head of exp(score − lse), of the slots first .. first + count. A block has a tile of N
// slots of KV head blockIdx.y; its 4 warps go through all entries, 16 at a time, each by itself.
template <class T, u32 D>
DEVICE void tensor_mass(const float* q, const u16* k, const Pair* visible, const float* lse, float* sums, u32 rows, u32 heads, u32 kv_heads,
                        u32 capacity, float scale, u32 first, u32 count) {
    constexpr u32 N = D > 128 ? 32 : 64, BLOCK = 128, CHUNKS = D / 8;
    constexpr float LOG2_E = 1.44269504f;
    Quad* keys = (Quad*)shared_memory;
    float* parts = (float*)(keys + N * Layout<D>::STRIDE); // a row of N for each warp
    const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = blockIdx.y, group = heads / kv_heads;
    const u32 base = first + blockIdx.x * N, end = first + count;
    UNROLL for (u32 i = 0; i < N * CHUNKS / BLOCK; i++) {
        const u32 at = i * BLOCK + thread, row = at / CHUNKS, chunk = at % CHUNKS;
        const bool live = base + row < end;
        copy_async(keys + Layout<D>::at(row, chunk), k + ((size_t)g * capacity + (live ? base + row : 0)) * D + chunk * 8, live);
    }
    commit_copies();
    wait_copies<0>();
    block_barrier();
    float mass[N / 8][2] = {};
    for (u32 e0 = warp * 16; e0 < rows * group; e0 += 64) {
        // A lane has two entries: where their queries are, what they see, their sums in base 2.
        const float* query[2];
        Pair sees[2];
        float top[2];
        bool any = false;
        UNROLL for (u32 i = 0; i < 2; i++) {
            const u32 e = e0 + lane / 4 + i * 8, entry = e < rows * group ? e : 0;
            const size_t index = (size_t)(entry / group) * heads + g * group + entry % group;
            query[i] = q + index * D + lane % 4 * 2;
            sees[i] = e == entry ? visible[entry / group] : Pair{0, 0};
            top[i] = lse[index] * LOG2_E;
            any |= sees[i].x < base + N && sees[i].y > base;
        }
        if (!any_lane(any)) continue;
        float scores[N / 8][4] = {};
        UNROLL_BY(4) for (u32 step = 0; step < D / 16; step++) {
            u32 a[4];
            UNROLL for (u32 i = 0; i < 4; i++) {
                const Pair x = *(const Pair*)(query[i % 2] + step * 16 + i / 2 * 8);
                a[i] = T::pack(float_of_bits(x.x), float_of_bits(x.y));
            }
            UNROLL for (u32 n = 0; n < N / 16; n++) {
                u32 b[4];
                load_matrices<false>(b, keys + Layout<D>::at(n * 16 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
                T::mma(scores[2 * n], a, b[0], b[1]);
                T::mma(scores[2 * n + 1], a, b[2], b[3]);
            }
        }
        UNROLL for (u32 n = 0; n < N / 8; n++)
            UNROLL for (u32 i = 0; i < 4; i++) {
                const u32 slot = base + n * 8 + lane % 4 * 2 + i % 2;
                const bool seen = slot >= sees[i / 2].x && slot < sees[i / 2].y;
                mass[n][i % 2] += seen ? fast_exp2(scores[n][i] * (scale * LOG2_E) - top[i / 2]) : 0;
            }
    }
    UNROLL for (u32 n = 0; n < N / 8; n++)
        UNROLL for (u32 j = 0; j < 2; j++) {
            float sum = mass[n][j];
            UNROLL for (int mask = 4; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
            if (lane < 4) parts[warp * N + n * 8 + lane * 2 + j] = sum;
        }
    block_barrier();
    if (thread >= N || base + thread >= end) return;
    float sum = 0;
    for (u32 other = 0; other < 4; other++) sum += parts[other * N + thread];
    sums[(size_t)g * count + base + thread - first] = sum;
}
#define TENSOR_MASS(suffix, T, D)                                                                                                       \
    KERNEL(128, tensor_mass_##suffix##_##D,                                                                                             \
           (const float* q, const u16* k, const Pair* visible, u32 rows, u32 heads, u32 kv_heads, u32 capacity, u32 d, float scale,     \
            const float* lse, float* sums, u32 first, u32 count)) {                                                                     \
        if (d == D) tensor_mass<T, D>(q, k, visible, lse, sums, rows, heads, kv_heads, capacity, scale, first, count);                  \
    }
TENSOR_MASS(f16, F16, 64)
TENSOR_MASS(f16, F16, 80)
TENSOR_MASS(f16, F16, 96)
TENSOR_MASS(f16, F16, 128)
TENSOR_MASS(f16, F16, 256)
TENSOR_MASS(bf16, Bf16, 64)
TENSOR_MASS(bf16, Bf16, 80)
TENSOR_MASS(bf16, Bf16, 96)
TENSOR_MASS(bf16, Bf16, 128)
TENSOR_MASS(bf16, Bf16, 256)
