// Attention on tensor cores, for keys and values of 16 bits: flash attention over ranges of slots of each row's own.
//
// FlashAttention-2, Dao, https://arxiv.org/abs/2307.08691. Rows may stand anywhere: each sees the half-open range of slots visible[row]. The
// heads of a KV head's group stand beside one another in a block, so that they share its tiles of keys and values.
#pragma once
#include "device.h"

// Where chunks of 8 elements of rows of D elements lie in shared memory, so that 8 rows of one column fall in all banks: shifted by the row
// where a row is a multiple of all banks, at an odd distance where it is not.
template <u32 D> struct Layout {
    static constexpr u32 CHUNKS = D / 8, STRIDE = CHUNKS % 8 ? CHUNKS | 1 : CHUNKS;
    static DEVICE u32 at(u32 row, u32 chunk) { return row * STRIDE + (CHUNKS % 8 ? chunk : chunk ^ (row & 7)); }
};

// A block has 64 entries of KV head blockIdx.y, 4 warps of 16, and piece blockIdx.z of their slots; tiles of N slots, two stages. Piece p gives
// its share of out and lse at the p-th part of them. lse may be null.
template <class T, u32 D>
DEVICE void tensor_attention(const float* q, const u16* k, const u16* v, const Pair* visible, float* out, float* lse, u32 rows, u32 heads,
                             u32 kv_heads, u32 capacity, float scale) {
    constexpr u32 M = 64, N = D > 128 ? 32 : 64, BLOCK = 128, CHUNKS = D / 8, SIZE = N * Layout<D>::STRIDE;
    // Wide heads leave no registers for queries: they are read again for each tile.
    constexpr bool KEEP_QUERIES = D <= 128;
    Quad* queries = (Quad*)shared_memory;
    Quad* keys = queries + M * Layout<D>::STRIDE;
    Quad* values = keys + 2 * SIZE;
    const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = blockIdx.y, group = heads / kv_heads;
    // The last rows have most to do: they go first.
    const u32 first = (gridDim.x - 1 - blockIdx.x) * M, entries = rows * group;
    const u32 first_row = first / group, last_row = ((first + M < entries ? first + M : entries) - 1) / group;
    // Slots that any row sees, slots that all see, and whether there may be slots between that none sees.
    u32 from = ~0u, to = 0, all_from = 0, all_to = ~0u;
    bool gaps = false;
    for (u32 row = first_row; row <= last_row; row++) {
        const Pair seen = visible[row];
        if (seen.x < seen.y) {
            gaps |= to && (seen.x > to || seen.y < from);
            from = seen.x < from ? seen.x : from;
            to = seen.y > to ? seen.y : to;
        }
        all_from = seen.x > all_from ? seen.x : all_from;
        all_to = seen.y < all_to ? seen.y : all_to;
    }
    from = to ? from : 0; // a block of rows that see nothing
    const u32 whole_first = from / N, whole = (to + N - 1) / N - whole_first, each = (whole + gridDim.z - 1) / gridDim.z;
    const u32 first_tile = whole_first + blockIdx.z * each;
    const u32 tiles = first_tile + each < whole_first + whole ? first_tile + each : whole_first + whole;
    const u16* head_k = k + (size_t)g * capacity * D;
    const u16* head_v = v + (size_t)g * capacity * D;
    // What no row sees may be no number, and no number times a weight of zero is none: it is not loaded.
    auto is_seen = [&](u32 slot) {
        if (!gaps) return slot >= from && slot < to;
        for (u32 row = first_row; row <= last_row; row++)
            if (slot >= visible[row].x && slot < visible[row].y) return true;
        return false;
    };
    auto load = [&](u32 tile, u32 stage) {
        UNROLL for (u32 i = 0; i < N * CHUNKS / BLOCK; i++) {
            const u32 at = i * BLOCK + thread, row = at / CHUNKS, chunk = at % CHUNKS, slot = tile * N + row;
            const bool live = is_seen(slot);
            const size_t offset = (size_t)(live ? slot : 0) * D + chunk * 8;
            copy_async(keys + stage * SIZE + Layout<D>::at(row, chunk), head_k + offset, live);
            copy_async(values + stage * SIZE + Layout<D>::at(row, chunk), head_v + offset, live);
        }
        commit_copies();
    };
    if (first_tile < tiles) load(first_tile, 0);
    for (u32 at = thread; at < M * CHUNKS; at += BLOCK) {
        const u32 e = first + at / CHUNKS, chunk = at % CHUNKS;
        Quad x = {0, 0, 0, 0};
        if (e < entries) {
            const float* p = q + ((size_t)(e / group) * heads + g * group + e % group) * D + chunk * 8;
            x = Quad{T::pack(p[0], p[1]), T::pack(p[2], p[3]), T::pack(p[4], p[5]), T::pack(p[6], p[7])};
        }
        queries[Layout<D>::at(at / CHUNKS, chunk)] = x;
    }
    block_barrier();
    auto load_query = [&](u32 (&a)[4], u32 k) {
        load_matrices<false>(a, queries + Layout<D>::at(warp * 16 + lane % 16, k * 2 + lane / 16));
    };
    u32 kept[KEEP_QUERIES ? D / 16 : 1][4];
    if (KEEP_QUERIES) UNROLL for (u32 k = 0; k < D / 16; k++) load_query(kept[KEEP_QUERIES ? k : 0], k);
    // A lane has two rows of its warp's 16 entries.
    Pair sees[2];
    UNROLL for (u32 i = 0; i < 2; i++) {
        const u32 e = first + warp * 16 + lane / 4 + i * 8;
        sees[i] = e < entries ? visible[e / group] : Pair{0, 0};
    }
    float sums[D / 8][4] = {}, top[2] = {-1e30f, -1e30f}, total[2] = {0, 0};
    const float scale2 = scale * 1.44269504f; // scores in base 2
    for (u32 tile = first_tile; tile < tiles; tile++) {
        const u32 stage = (tile - first_tile) & 1;
        if (tile + 1 < tiles) {
            load(tile + 1, stage ^ 1);
            wait_copies<1>();
        } else {
            wait_copies<0>();
        }
        block_barrier();
        const Quad* tile_k = keys + stage * SIZE;
        const Quad* tile_v = values + stage * SIZE;
        float scores[N / 8][4] = {};
        UNROLL for (u32 k = 0; k < D / 16; k++) {
            u32 again[4];
            if (!KEEP_QUERIES) load_query(again, k);
            const u32(&a)[4] = KEEP_QUERIES ? kept[KEEP_QUERIES ? k : 0] : again;
            UNROLL for (u32 n = 0; n < N / 16; n++) {
                u32 b[4];
                load_matrices<false>(b, tile_k + Layout<D>::at(n * 16 + lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2));
                T::mma(scores[2 * n], a, b[0], b[1]);
                T::mma(scores[2 * n + 1], a, b[2], b[3]);
            }
        }
        if (tile * N < all_from || (tile + 1) * N > all_to)
            UNROLL for (u32 n = 0; n < N / 8; n++)
                UNROLL for (u32 i = 0; i < 4; i++) {
                    const u32 slot = tile * N + n * 8 + lane % 4 * 2 + i % 2;
                    if (slot < sees[i / 2].x || slot >= sees[i / 2].y) scores[n][i] = minus_infinity();
                }
        UNROLL for (u32 i = 0; i < 2; i++) {
            float most = top[i];
            UNROLL for (u32 n = 0; n < N / 8; n++) most = fmaxf(most, fmaxf(scores[n][2 * i], scores[n][2 * i + 1]) * scale2);
            most = fmaxf(most, shuffle_xor(most, 1));
            most = fmaxf(most, shuffle_xor(most, 2));
            const float shrink = fast_exp2(top[i] - most);
            float sum = 0;
            top[i] = most;
            UNROLL for (u32 n = 0; n < N / 8; n++)
                UNROLL for (u32 j = 0; j < 2; j++) {
                    scores[n][2 * i + j] = fast_exp2(scores[n][2 * i + j] * scale2 - most);
                    sum += scores[n][2 * i + j];
                }
            total[i] = total[i] * shrink + sum;
            UNROLL for (u32 n = 0; n < D / 8; n++) {
                sums[n][2 * i] *= shrink;
                sums[n][2 * i + 1] *= shrink;
            }
        }
        UNROLL for (u32 j = 0; j < N / 16; j++) {
            const u32 a[4] = {T::pack(scores[2 * j][0], scores[2 * j][1]), T::pack(scores[2 * j][2], scores[2 * j][3]),
                              T::pack(scores[2 * j + 1][0], scores[2 * j + 1][1]), T::pack(scores[2 * j + 1][2], scores[2 * j + 1][3])};
            UNROLL for (u32 n = 0; n < D / 16; n++) {
                u32 b[4];
                load_matrices<true>(b, tile_v + Layout<D>::at(j * 16 + lane % 16, n * 2 + lane / 16));
                T::mma(sums[2 * n], a, b[0], b[1]);
                T::mma(sums[2 * n + 1], a, b[2], b[3]);
            }
        }
        block_barrier(); // all have read the stage that is loaded next
    }
    UNROLL for (u32 i = 0; i < 2; i++) {
        const u32 e = first + warp * 16 + lane / 4 + i * 8;
        float sum = total[i];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        if (e >= entries) continue;
        const size_t index = ((size_t)blockIdx.z * rows + e / group) * heads + g * group + e % group;
        if (lse && lane % 4 == 0) lse[index] = sum > 0 ? top[i] * 0.69314718f + logf(sum) : minus_infinity();
        const float factor = sum > 0 ? 1 / sum : 0;
        UNROLL for (u32 n = 0; n < D / 8; n++) {
            float* to = out + index * D + n * 8 + lane % 4 * 2;
            to[0] = sums[n][2 * i] * factor;
            to[1] = sums[n][2 * i + 1] * factor;
        }
    }
}
#define TENSOR_ATTENTION(suffix, T, D)                                                                                                    \
    KERNEL(128, tensor_attention_##suffix##_##D,                                                                                          \
           (const float* q, const u16* k, const u16* v, const Pair* visible, float* out, float* lse, u32 rows, u32 heads, u32 kv_heads,   \
            u32 capacity, float scale)) {                                                                                                 \
        tensor_attention<T, D>(q, k, v, visible, out, lse, rows, heads, kv_heads, capacity, scale);                                       \
    }
TENSOR_ATTENTION(f16, F16, 64)
TENSOR_ATTENTION(f16, F16, 80)
TENSOR_ATTENTION(f16, F16, 96)
TENSOR_ATTENTION(f16, F16, 128)
TENSOR_ATTENTION(f16, F16, 256)
TENSOR_ATTENTION(bf16, Bf16, 64)
TENSOR_ATTENTION(bf16, Bf16, 80)
TENSOR_ATTENTION(bf16, Bf16, 96)
TENSOR_ATTENTION(bf16, Bf16, 128)
TENSOR_ATTENTION(bf16, Bf16, 256)
