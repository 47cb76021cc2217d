// Attention on the tensor cores of Hopper, by products of warpgroups, for keys and values of 16 bits: tensor_attention.cu's sums in its order.
//
// FlashAttention-3, Shah et al., https://arxiv.org/abs/2407.08608. One warpgroup of a block loads tiles of keys and values; each of the others
// has 64 entries, and multiplies the keys of a tile while the products with the values of the tile before it go on.
#pragma once
#include "device.h"

// A block has GROUPS · 64 entries of a KV head and piece blockIdx.z of their slots; tiles of N slots. Parameters are those of
// tensor_attention.
template <class T, u32 D, u32 GROUPS, int PRODUCER, int CONSUMER> struct HopperAttention {
    // A tile is told to have come when AHEAD more are under way. The stage of the last of these has to be empty long before, or all would wait for the
    // loading warpgroup.
    static constexpr u32 M = 64 * GROUPS, N = 64, STAGES = 6, AHEAD = 2, HALVES = D / 64;
    static constexpr u32 THREADS = 128 * (GROUPS + 1), CHUNKS = D / 8;
    // Words of 16 bytes of 64 keys or values: a tile of 64 × 64 for each 64 columns.
    static constexpr u32 TILE_QUADS = 64 * 8, QUADS = HALVES * TILE_QUADS;

    const float* q;
    const u16 *k, *v;
    const Pair* visible;
    float *out, *lse;
    u32 rows, heads, kv_heads, capacity;
    float scale;

    // Where chunk `chunk` of a row of D elements stands.
    static DEVICE u32 at(u32 row, u32 chunk) { return chunk / 8 * TILE_QUADS + row * 8 + (chunk % 8 ^ row % 8); }

    DEVICE void run() const {
        Quad* tiles = (Quad*)shared_memory; // of each stage keys, then values
        Barrier* full = (Barrier*)(tiles + STAGES * 2 * QUADS);
        Barrier* empty = full + STAGES;
        const u32 thread = threadIdx.x, lane = thread % 32, own = thread / 128, group = heads / kv_heads, entries = rows * group;
        const HeadBlock block = head_block(kv_heads, M);
        const u32 g = block.kv_head, first = block.first;
        const u32 first_row = first / group, last_row = ((first + M < entries ? first + M : entries) - 1) / group;
        // Slots that any row sees, and whether there may be slots between that none sees: not if what a row sees meets what the next one does.
        u32 from = ~0u, to = 0;
        bool gap = false;
        for (u32 row = first_row + lane; row <= last_row; row += 32) {
            const Pair seen = visible[row], next = visible[row < last_row ? row + 1 : row];
            if (seen.x < seen.y) {
                from = seen.x < from ? seen.x : from;
                to = seen.y > to ? seen.y : to;
            }
            gap |= seen.x >= seen.y || next.x > seen.y || next.y < seen.x;
        }
        from = warp_least(from);
        to = warp_greatest(to);
        const bool gaps = any_lane(gap);
        from = to ? from : 0; // a block of rows that see nothing
        const u32 whole_first = from / N, whole = (to + N - 1) / N - whole_first, each = (whole + gridDim.z - 1) / gridDim.z;
        const u32 first_tile = whole_first + blockIdx.z * each, last = whole_first + whole;
        const u32 end_tile = first_tile + each < last ? first_tile + each : last, tiles_count = first_tile < end_tile ? end_tile - first_tile : 0;
        if (thread == 0) {
            for (u32 i = 0; i < STAGES; i++) {
                barrier_init(full + i, 4);
                barrier_init(empty + i, 4 * GROUPS);
            }
            show_barriers();
        }
        block_barrier();
        if (own == GROUPS) load(g, tiles, full, empty, first_row, last_row, from, to, gaps, first_tile, tiles_count);
        else attend(g, tiles, full, empty, first + own * 64, first_tile, tiles_count);
    }

    // Loads tiles into stages, as they become empty.
    DEVICE void load(u32 g, Quad* tiles, Barrier* full, Barrier* empty, u32 first_row, u32 last_row, u32 from, u32 to, bool gaps,
                     u32 first_tile, u32 count) const {
        release_registers<PRODUCER>();
        const u32 lane = threadIdx.x % 32, own_row = threadIdx.x % 128 / CHUNKS, chunk = threadIdx.x % CHUNKS;
        // A thread copies a chunk of each ROWS-th slot of a tile.
        constexpr u32 ROWS = 128 / CHUNKS;
        const size_t begin = ((size_t)g * capacity + first_tile * N + own_row) * D + chunk * 8;
        const u16* from_k = k + begin;
        const u16* from_v = v + begin;
        tiles += HopperAttention::at(own_row, chunk);
        // What no row sees may be no number, and no number times a weight of zero is none: it is not loaded.
        auto is_seen = [&](u32 slot) {
            if (slot < from || slot >= to) return false;
            if (!gaps) return true;
            for (u32 row = first_row; row <= last_row; row++)
                if (slot >= visible[row].x && slot < visible[row].y) return true;
            return false;
        };
        for (u32 i = 0; i < count + AHEAD; i++) {
            if (i < count) {
                const u32 stage = i % STAGES;
                if (i >= STAGES) barrier_wait(empty + stage, (i / STAGES - 1) & 1);
                Quad* keys = tiles + stage * 2 * QUADS;
                const u32 slot = (first_tile + i) * N;
                const bool all = !gaps && slot >= from && slot + N <= to;
                UNROLL for (u32 j = 0; j < N / ROWS; j++) {
                    const bool live = all || is_seen(slot + j * ROWS + own_row);
                    copy_async(keys + j * ROWS * 8, from_k + j * ROWS * D, live);
                    copy_async(keys + QUADS + j * ROWS * 8, from_v + j * ROWS * D, live);
                }
                from_k += N * D;
                from_v += N * D;
            }
            commit_copies();
            if (i >= AHEAD) {
                wait_copies<AHEAD>();
                async_fence();
                warp_barrier();
                if (lane == 0) barrier_arrive(full + (i - AHEAD) % STAGES);
            }
        }
    }

    // Attends for 64 entries from e0 on.
    DEVICE void attend(u32 g, const Quad* tiles, Barrier* full, Barrier* empty, u32 e0, u32 first_tile, u32 count) const {
        claim_registers<CONSUMER>();
        const u32 warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, group = heads / kv_heads, entries = rows * group;
        // A lane has two rows of its warp's 16 entries. What all entries of the warp see needs no mask.
        Pair sees[2];
        u32 all_from = 0, all_to = ~0u, queries[D / 16][4];
        UNROLL for (u32 i = 0; i < 2; i++) {
            const u32 e = e0 + warp * 16 + lane / 4 + i * 8;
            const float* query = q + ((size_t)(e / group) * heads + g * group + e % group) * D + lane % 4 * 2;
            UNROLL for (u32 k = 0; k < D / 8; k++) {
                const Pair x = e < entries ? *(const Pair*)(query + k * 8) : Pair{0, 0};
                queries[k / 2][k % 2 * 2 + i] = T::pack(float_of_bits(x.x), float_of_bits(x.y));
            }
            sees[i] = e < entries ? visible[e / group] : Pair{0, ~0u};
            all_from = sees[i].x > all_from ? sees[i].x : all_from;
            all_to = sees[i].y < all_to ? sees[i].y : all_to;
        }
        all_from = warp_greatest(all_from);
        all_to = warp_least(all_to);
        float scores[N / 2], sums[D / 2] = {}, top[2] = {-1e30f, -1e30f}, total[2] = {0, 0}, shrink[2];
        u32 weights[N / 16][4];
        const float scale2 = scale * 1.44269504f; // scores in base 2
        auto multiply_keys = [&](u32 stage) {
            UNROLL for (u32 k = 0; k < D / 16; k++) {
                const SharedTile b = shared_tile(tiles + stage * 2 * QUADS + k / 4 * TILE_QUADS).columns(k % 4);
                if (k == 0) T::template group_scores<false>(scores, queries[k], b);
                else T::template group_scores<true>(scores, queries[k], b);
            }
            commit_products();
        };
        auto multiply_values = [&](u32 stage) {
            const TransposedTile b = transposed_tile(tiles + (stage * 2 + 1) * QUADS, TILE_QUADS * 16);
            UNROLL for (u32 j = 0; j < N / 16; j++) T::group_values(sums, weights[j], b.rows(j));
            commit_products();
        };
        // Makes weights of scores.
        auto weigh = [&](u32 tile) {
            if (tile * N < all_from || (tile + 1) * N > all_to)
                UNROLL for (u32 n = 0; n < N / 2; n++) {
                    const u32 slot = tile * N + n / 4 * 8 + lane % 4 * 2 + n % 2, i = n / 2 % 2;
                    if (slot < sees[i].x || slot >= sees[i].y) scores[n] = minus_infinity();
                }
            UNROLL for (u32 i = 0; i < 2; i++) {
                float most = minus_infinity();
                UNROLL for (u32 n = 0; n < N / 8; n++) most = fmaxf(most, fmaxf(scores[4 * n + 2 * i], scores[4 * n + 2 * i + 1]));
                most = fmaxf(top[i], most * scale2);
                most = fmaxf(most, shuffle_xor(most, 1));
                most = fmaxf(most, shuffle_xor(most, 2));
                shrink[i] = fast_exp2(top[i] - most);
                float sum = 0;
                top[i] = most;
                UNROLL for (u32 n = 0; n < N / 8; n++)
                    UNROLL for (u32 j = 0; j < 2; j++) {
                        float& score = scores[4 * n + 2 * i + j];
                        score = fast_exp2(score * scale2 - most);
                        sum += score;
                    }
                total[i] = total[i] * shrink[i] + sum;
            }
        };
        auto pack_weights = [&] {
            UNROLL for (u32 j = 0; j < N / 16; j++)
                UNROLL for (u32 i = 0; i < 4; i++) weights[j][i] = T::pack(scores[8 * j + 2 * i], scores[8 * j + 2 * i + 1]);
        };
        auto release = [&](u32 stage) {
            if (lane == 0) barrier_arrive(empty + stage);
        };
        if (count) {
            barrier_wait(full, 0);
            begin_products();
            multiply_keys(0);
            wait_products<0>();
            hold_sums(scores);
            weigh(first_tile);
            pack_weights();
            for (u32 i = 1; i < count; i++) {
                const u32 stage = i % STAGES, before = (i - 1) % STAGES;
                barrier_wait(full + stage, i / STAGES & 1);
                hold_sums(sums);
                hold_sums(scores);
                begin_products();
                multiply_keys(stage);
                multiply_values(before);
                wait_products<1>();
                hold_sums(scores);
                weigh(first_tile + i);
                // Maxima grow seldom once some tiles are done. The compiler moves a wait up as far as it may, but not past a branch: with the sum in its
                // condition, which has never all bits set, exponentials are computed before it, while values are multiplied.
                if (any_lane(shrink[0] != 1 || shrink[1] != 1 || bits_of_float(total[0] + total[1]) == ~0u)) {
                    wait_products<0, 1>();
                    hold_sums(sums);
                    UNROLL for (u32 n = 0; n < D / 2; n++) sums[n] *= shrink[n / 2 % 2];
                } else {
                    wait_products<0, 2>();
                    hold_sums(sums);
                }
                release(before);
                pack_weights();
            }
            hold_sums(sums);
            begin_products();
            multiply_values((count - 1) % STAGES);
            wait_products<0>();
            hold_sums(sums);
        }
        UNROLL for (u32 i = 0; i < 2; i++) {
            const u32 e = e0 + warp * 16 + lane / 4 + i * 8;
            float sum = total[i];
            sum += shuffle_xor(sum, 1);
            sum += shuffle_xor(sum, 2);
            if (e >= entries) continue;
            const size_t index = ((size_t)blockIdx.z * rows + e / group) * heads + g * group + e % group;
            if (lse && lane % 4 == 0) lse[index] = sum > 0 ? top[i] * 0.69314718f + logf(sum) : minus_infinity();
            const float factor = sum > 0 ? 1 / sum : 0;
            UNROLL for (u32 n = 0; n < D / 8; n++) {
                const float x = sums[4 * n + 2 * i] * factor, y = sums[4 * n + 2 * i + 1] * factor;
                *(Pair*)(out + index * D + n * 8 + lane % 4 * 2) = Pair{bits_of_float(x), bits_of_float(y)};
            }
        }
    }
};
#define HOPPER_ATTENTION(suffix, T, D, GROUPS, PRODUCER, CONSUMER)                                                                       \
    HOPPER_KERNEL(128 * (GROUPS + 1), hopper_attention_##suffix##_##D,                                                                   \
                  (const float* q, const u16* k, const u16* v, const Pair* visible, float* out, float* lse, u32 rows, u32 heads,         \
                   u32 kv_heads, u32 capacity, float scale)) {                                                                           \
        begin_kernel();                                                                                                                  \
        ON_HOPPER((HopperAttention<T, D, GROUPS, PRODUCER, CONSUMER>{q, k, v, visible, out, lse, rows, heads, kv_heads, capacity, scale} \
                       .run()));                                                                                                         \
    }
HOPPER_ATTENTION(f16, F16, 64, 3, 32, 160)
HOPPER_ATTENTION(f16, F16, 128, 2, 40, 232)
HOPPER_ATTENTION(bf16, Bf16, 64, 3, 32, 160)
HOPPER_ATTENTION(bf16, Bf16, 128, 2, 40, 232)
