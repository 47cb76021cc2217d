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

// A block has M entries of a KV head and piece blockIdx.z of their slots; tiles of N slots, two stages, and 4 warps of 16 entries. Piece p
// gives its share of out and lse at the p-th part of them. lse may be null.
//
// Of many rows M is 64, a warp has all slots of a tile, and pieces are equal parts of what the block's rows see. Of FEW rows the warps with the same
// entries have 16 slots of each tile, and a piece is `piece` slots, a multiple of N: pieces begin at multiples of it, whatever rows see, so that a
// row's result does not depend on the rows beside it. The first piece has the first slot that any row sees.
template <class T, u32 D, bool FEW>
DEVICE void tensor_attention(const float* q, const u16* k, const u16* v, const Pair* visible, float* out, float* lse, u32 rows, u32 heads,
                             u32 kv_heads, u32 capacity, float scale, u32 piece) {
    constexpr u32 N = D > 128 ? 32 : 64, BLOCK = 128, CHUNKS = D / 8, SIZE = N * Layout<D>::STRIDE;
    constexpr u32 SHARERS = FEW ? N / 16 : 1, M = 64 / SHARERS, OWN = N / SHARERS; // warps of an entry, entries, slots of a tile of a warp
    // Wide heads leave no registers for queries: they are read again for each tile.
    constexpr bool KEEP_QUERIES = D <= 128;
    Quad* queries = (Quad*)shared_memory;
    Quad* keys = queries + M * Layout<D>::STRIDE;
    Quad* values = keys + 2 * SIZE;
    const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32, group = heads / kv_heads, entries = rows * group;
    const HeadBlock block = head_block(kv_heads, M);
    const u32 g = block.kv_head, first = block.first;
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
    const u32 seen_first = from / N, seen_end = (to + N - 1) / N;
    const u32 each = FEW ? piece / N : (seen_end - seen_first + gridDim.z - 1) / gridDim.z;
    const u32 start = (FEW ? from / piece * each : seen_first) + blockIdx.z * each;
    const u32 first_tile = start > seen_first ? start : seen_first, tiles = start + each < seen_end ? start + each : seen_end;
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
        if (e < entries) x = load_packed<T>(q + ((size_t)(e / group) * heads + g * group + e % group) * D + chunk * 8);
        queries[Layout<D>::at(at / CHUNKS, chunk)] = x;
    }
    block_barrier();
    const u32 strip = warp / SHARERS * 16, own = warp % SHARERS * OWN; // the warp's first entry of the block's, and its first slot of a tile's
    auto load_query = [&](u32 (&a)[4], u32 k) {
        load_matrices<false>(a, queries + Layout<D>::at(strip + lane % 16, k * 2 + lane / 16));
    };
    u32 kept[KEEP_QUERIES ? D / 16 : 1][4];
    if (KEEP_QUERIES) UNROLL for (u32 k = 0; k < D / 16; k++) load_query(kept[KEEP_QUERIES ? k : 0], k);
    // A lane has two rows of its warp's 16 entries.
    Pair sees[2];
    UNROLL for (u32 i = 0; i < 2; i++) {
        const u32 e = first + strip + lane / 4 + i * 8;
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
        float scores[OWN / 8][4] = {};
        UNROLL for (u32 k = 0; k < D / 16; k++) {
            u32 again[4];
            if (!KEEP_QUERIES) load_query(again, k);
            const u32(&a)[4] = KEEP_QUERIES ? kept[KEEP_QUERIES ? k : 0] : again;
            UNROLL for (u32 n = 0; n < OWN / 16; n++) {
                u32 b[4];
                load_matrices<false>(b, tile_k + Layout<D>::at(own + n * 16 + lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2));
                T::mma(scores[2 * n], a, b[0], b[1]);
                T::mma(scores[2 * n + 1], a, b[2], b[3]);
            }
        }
        if (tile * N < all_from || (tile + 1) * N > all_to)
            UNROLL for (u32 n = 0; n < OWN / 8; n++)
                UNROLL for (u32 i = 0; i < 4; i++) {
                    const u32 slot = tile * N + own + n * 8 + lane % 4 * 2 + i % 2;
                    if (slot < sees[i / 2].x || slot >= sees[i / 2].y) scores[n][i] = minus_infinity();
                }
        UNROLL for (u32 i = 0; i < 2; i++) {
            float most = top[i];
            UNROLL for (u32 n = 0; n < OWN / 8; n++) most = fmaxf(most, fmaxf(scores[n][2 * i], scores[n][2 * i + 1]) * scale2);
            most = fmaxf(most, shuffle_xor(most, 1));
            most = fmaxf(most, shuffle_xor(most, 2));
            const float shrink = fast_exp2(top[i] - most);
            float sum = 0;
            top[i] = most;
            UNROLL for (u32 n = 0; n < OWN / 8; n++)
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
        UNROLL for (u32 j = 0; j < OWN / 16; j++) {
            const u32 a[4] = {T::pack(scores[2 * j][0], scores[2 * j][1]), T::pack(scores[2 * j][2], scores[2 * j][3]),
                              T::pack(scores[2 * j + 1][0], scores[2 * j + 1][1]), T::pack(scores[2 * j + 1][2], scores[2 * j + 1][3])};
            UNROLL for (u32 n = 0; n < D / 16; n++) {
                u32 b[4];
                load_matrices<true>(b, tile_v + Layout<D>::at(own + j * 16 + lane % 16, n * 2 + lane / 16));
                T::mma(sums[2 * n], a, b[0], b[1]);
                T::mma(sums[2 * n + 1], a, b[2], b[3]);
            }
        }
        block_barrier(); // all have read the stage that is loaded next
    }
    UNROLL for (u32 i = 0; i < 2; i++) {
        total[i] += shuffle_xor(total[i], 1);
        total[i] += shuffle_xor(total[i], 2);
    }
    auto index_of = [&](u32 e) { return ((size_t)blockIdx.z * rows + e / group) * heads + g * group + e % group; };
    auto log_sum_exp = [](float top, float sum) { return sum > 0 ? top * 0.69314718f + logf(sum) : minus_infinity(); };
    // Writes the lane's share of row i of its two.
    auto put_row = [&](float* row, u32 i, float factor) {
        Pair* to = (Pair*)row + lane % 4;
        UNROLL for (u32 n = 0; n < D / 8; n++) to[n * 4] = {bits_of_float(sums[n][2 * i] * factor), bits_of_float(sums[n][2 * i + 1] * factor)};
    };
    if constexpr (FEW) {
        // The sharers of an entry have a maximum and a sum each, in its base, and a row of results, at a distance that falls in all banks.
        constexpr u32 STRIDE = D + 8;
        float* results = (float*)shared_memory;
        Pair* softmaxes = (Pair*)(results + 64 * STRIDE);
        UNROLL for (u32 i = 0; i < 2; i++)
            if (lane % 4 == 0) softmaxes[warp * 16 + lane / 4 + i * 8] = Pair{bits_of_float(top[i]), bits_of_float(total[i])};
        block_barrier();
        UNROLL for (u32 i = 0; i < 2; i++) {
            const u32 entry = lane / 4 + i * 8;
            const Pair* all = softmaxes + strip * SHARERS + entry;
            float most = top[i], sum = 0;
            UNROLL for (u32 j = 0; j < SHARERS; j++) most = fmaxf(most, float_of_bits(all[j * 16].x));
            UNROLL for (u32 j = 0; j < SHARERS; j++) sum += fast_exp2(float_of_bits(all[j * 16].x) - most) * float_of_bits(all[j * 16].y);
            const u32 e = first + strip + entry;
            if (lse && lane % 4 == 0 && own == 0 && e < entries) lse[index_of(e)] = log_sum_exp(most, sum);
            const float factor = sum > 0 ? fast_exp2(top[i] - most) / sum : 0;
            put_row(results + (warp * 16 + entry) * STRIDE, i, factor);
        }
        block_barrier();
        for (u32 at = thread; at < M * D / 2; at += BLOCK) {
            const u32 entry = at / (D / 2), e = first + entry;
            if (e >= entries) break;
            const float* parts = results + (entry / 16 * SHARERS * 16 + entry % 16) * STRIDE + at % (D / 2) * 2;
            float low = 0, high = 0;
            UNROLL for (u32 j = 0; j < SHARERS; j++) {
                const Pair part = *(const Pair*)(parts + j * 16 * STRIDE);
                low += float_of_bits(part.x);
                high += float_of_bits(part.y);
            }
            *(Pair*)(out + index_of(e) * D + at % (D / 2) * 2) = Pair{bits_of_float(low), bits_of_float(high)};
        }
    } else {
        UNROLL for (u32 i = 0; i < 2; i++) {
            const u32 e = first + strip + lane / 4 + i * 8;
            if (e >= entries) continue;
            if (lse && lane % 4 == 0) lse[index_of(e)] = log_sum_exp(top[i], total[i]);
            put_row(out + index_of(e) * D, i, total[i] > 0 ? 1 / total[i] : 0);
        }
    }
}
#define TENSOR_ATTENTION(suffix, T, D)                                                                                                  \
    KERNEL(128, tensor_attention_##suffix##_##D,                                                                                        \
           (const float* q, const u16* k, const u16* v, const Pair* visible, float* out, float* lse, u32 rows, u32 heads, u32 kv_heads, \
            u32 capacity, float scale)) {                                                                                               \
        begin_kernel();                                                                                                                 \
        tensor_attention<T, D, false>(q, k, v, visible, out, lse, rows, heads, kv_heads, capacity, scale, 0);                           \
    }                                                                                                                                   \
    KERNEL(128, few_rows_attention_##suffix##_##D,                                                                                      \
           (const float* q, const u16* k, const u16* v, const Pair* visible, float* out, float* lse, u32 rows, u32 heads, u32 kv_heads, \
            u32 capacity, float scale, u32 piece)) {                                                                                    \
        begin_kernel();                                                                                                                 \
        tensor_attention<T, D, true>(q, k, v, visible, out, lse, rows, heads, kv_heads, capacity, scale, piece);                        \
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
