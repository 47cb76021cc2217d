// Statistics of attention on tensor cores, for keys of 16 bits: log-sum-exps, weights of slots and of rows, and logits with all heads
// concatenated.
//
// A product of queries and keys has its left operand in registers, a strip of rows for each of a block's 4 warps, and its right one in
// shared memory, 16 rows at a time. What is summed over the right operand's rows stays in a lane's registers to the end.
#pragma once
#include "tensor_attention.cu"

constexpr float LOG2_E = 1.44269504f;

// Rows of the left operand that a warp keeps.
template <u32 D> constexpr u32 STRIP = D > 128 ? 16 : 32;

// Loads a warp's strip from shared memory, from row `first` on.
template <u32 D> DEVICE void load_strip(u32 (&left)[STRIP<D> / 16][D / 16][4], const Quad* rows, u32 first) {
    const u32 lane = threadIdx.x % 32;
    UNROLL for (u32 m = 0; m < STRIP<D> / 16; m++)
        UNROLL for (u32 k = 0; k < D / 16; k++)
            load_matrices<false>(left[m][k], rows + Layout<D>::at(first + m * 16 + lane % 16, k * 2 + lane / 16));
}

// products (strip × 16·C) of a strip and 16·C rows in shared memory, from row `first` on. A lane has of the block of 16 × 8 products
// [m][n] those of rows lane / 4 and lane / 4 + 8, two columns each from lane % 4 * 2 on.
template <class T, u32 D, u32 C>
DEVICE void multiply(float (&products)[STRIP<D> / 16][2 * C][4], const u32 (&left)[STRIP<D> / 16][D / 16][4], const Quad* rows, u32 first) {
    const u32 lane = threadIdx.x % 32;
    UNROLL for (u32 k = 0; k < D / 16; k++)
        UNROLL for (u32 c = 0; c < C; c++) {
            u32 b[4];
            load_matrices<false>(b, rows + Layout<D>::at(first + c * 16 + lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2));
            UNROLL for (u32 m = 0; m < STRIP<D> / 16; m++) {
                T::mma(products[m][2 * c], left[m][k], b[0], b[1]);
                T::mma(products[m][2 * c + 1], left[m][k], b[2], b[3]);
            }
        }
}

// Slots that any of some rows sees from first_slot on, and slots that all of them see. Where none sees a slot, from is to. All lanes of the
// warp take part.
struct SeenSlots {
    u32 from, to, all_from, all_to;
};
DEVICE u32 warp_most(u32 x) {
    UNROLL for (int mask = 16; mask; mask /= 2) {
        const u32 other = bits_of_float(shuffle_xor(float_of_bits(x), mask));
        x = other > x ? other : x;
    }
    return x;
}
DEVICE SeenSlots seen_slots(const Pair* visible, u32 first_row, u32 last_row, u32 first_slot) {
    SeenSlots all = {~0u, 0, 0, ~0u};
    for (u32 row = first_row + threadIdx.x % 32; row <= last_row; row += 32) {
        Pair seen = visible[row];
        if (seen.x < first_slot) seen.x = first_slot;
        if (seen.x < seen.y) {
            all.from = seen.x < all.from ? seen.x : all.from;
            all.to = seen.y > all.to ? seen.y : all.to;
        }
        all.all_from = seen.x > all.all_from ? seen.x : all.all_from;
        all.all_to = seen.y < all.all_to ? seen.y : all.all_to;
    }
    all.to = warp_most(all.to);
    all.from = all.to ? ~warp_most(~all.from) : 0;
    all.all_from = warp_most(all.all_from);
    all.all_to = ~warp_most(~all.all_to);
    return all;
}

// out (rows of d, rounded) = the sums of each `together` neighbouring rows of q. A thread has 4 elements.
template <class T> DEVICE void sum_heads(const float* q, u16* out, u32 count, u32 together, u32 d) {
    const size_t at = thread_index();
    if (at >= count) return;
    const size_t row = at * 4 / d, i = at * 4 % d;
    float sum[4] = {};
    for (u32 h = 0; h < together; h++) {
        const Quad x = *(const Quad*)(q + (row * together + h) * d + i);
        sum[0] += float_of_bits(x.x), sum[1] += float_of_bits(x.y), sum[2] += float_of_bits(x.z), sum[3] += float_of_bits(x.w);
    }
    ((Pair*)out)[at] = Pair{T::pack(sum[0], sum[1]), T::pack(sum[2], sum[3])};
}
#define SUM_HEADS(name, T)                                                                     \
    KERNEL(256, name, (const float* q, u16* out, u32 count, u32 together, u32 d)) {            \
        begin_kernel();                                                                        \
        sum_heads<T>(q, out, count, together, d);                                              \
    }
SUM_HEADS(sum_heads_f16, F16)
SUM_HEADS(sum_heads_bf16, Bf16)

// lse (rows × heads) = ln Σ exp(score) over the slots that each row sees from first_slot on; −∞ over no slot. A block has 4 strips of entries
// of KV head blockIdx.y and piece blockIdx.z of their slots; piece p gives its share at the p-th part of lse.
template <class T, u32 D>
DEVICE void tensor_sums(const float* q, const u16* k, const Pair* visible, float* lse, u32 rows, u32 heads, u32 kv_heads, u32 capacity,
                        float scale, u32 first_slot) {
    constexpr u32 M = STRIP<D> / 16, HELD = 4 * STRIP<D>, N = D > 128 ? 32 : 64, BLOCK = 128, CHUNKS = D / 8, SIZE = N * Layout<D>::STRIDE;
    Quad* queries = (Quad*)shared_memory;
    Quad* keys = queries + HELD * Layout<D>::STRIDE; // two stages
    const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = blockIdx.y, group = heads / kv_heads;
    const u32 first = blockIdx.x * HELD, entries = rows * group, end = first + HELD < entries ? first + HELD : entries;
    const SeenSlots all = seen_slots(visible, first / group, (end - 1) / group, first_slot);
    const u32 whole_first = all.from / N, whole = (all.to + N - 1) / N - whole_first, each = (whole + gridDim.z - 1) / gridDim.z;
    const u32 first_tile = whole_first + blockIdx.z * each;
    const u32 tiles = first_tile + each < whole_first + whole ? first_tile + each : whole_first + whole;
    auto load = [&](u32 tile, u32 stage) {
        UNROLL for (u32 i = 0; i < N * CHUNKS / BLOCK; i++) {
            const u32 at = i * BLOCK + thread, row = at / CHUNKS, chunk = at % CHUNKS, slot = tile * N + row;
            const bool live = slot >= all.from && slot < all.to;
            copy_async(keys + stage * SIZE + Layout<D>::at(row, chunk), k + ((size_t)g * capacity + (live ? slot : 0)) * D + chunk * 8, live);
        }
        commit_copies();
    };
    if (first_tile < tiles) load(first_tile, 0);
    UNROLL_BY(4) for (u32 i = 0; i < HELD * CHUNKS / BLOCK; i++) {
        const u32 at = i * BLOCK + thread, e = first + at / CHUNKS, chunk = at % CHUNKS;
        Quad x = {0, 0, 0, 0};
        if (e < entries) x = load_packed<T>(q + ((size_t)(e / group) * heads + g * group + e % group) * D + chunk * 8);
        queries[Layout<D>::at(at / CHUNKS, chunk)] = x;
    }
    block_barrier();
    u32 left[M][D / 16][4];
    load_strip<D>(left, queries, warp * STRIP<D>);
    // A lane has two entries of each 16 of its strip.
    Pair sees[M][2];
    UNROLL for (u32 m = 0; m < M; m++)
        UNROLL for (u32 i = 0; i < 2; i++) {
            const u32 e = first + warp * STRIP<D> + m * 16 + lane / 4 + i * 8;
            sees[m][i] = e < entries ? visible[e / group] : Pair{0, 0};
            if (sees[m][i].x < first_slot) sees[m][i].x = first_slot;
        }
    // Sums of a lane's own columns, relative to the greatest score of these.
    float top[M][2], total[M][2] = {};
    UNROLL for (u32 m = 0; m < M; m++) top[m][0] = top[m][1] = -1e30f;
    const float scale2 = scale * LOG2_E; // scores in base 2
    for (u32 tile = first_tile; tile < tiles; tile++) {
        const u32 stage = (tile - first_tile) & 1;
        if (tile + 1 < tiles) {
            load(tile + 1, stage ^ 1);
            wait_copies<1>();
        } else {
            wait_copies<0>();
        }
        block_barrier();
        const bool partly = tile * N < all.all_from || (tile + 1) * N > all.all_to;
        for (u32 column = 0; column < N; column += 32) {
            float scores[M][4][4] = {};
            multiply<T, D, 2>(scores, left, keys + stage * SIZE, column);
            if (partly)
                UNROLL for (u32 m = 0; m < M; m++)
                    UNROLL for (u32 n = 0; n < 4; n++)
                        UNROLL for (u32 i = 0; i < 4; i++) {
                            const u32 slot = tile * N + column + n * 8 + lane % 4 * 2 + i % 2;
                            if (slot < sees[m][i / 2].x || slot >= sees[m][i / 2].y) scores[m][n][i] = minus_infinity();
                        }
            UNROLL for (u32 m = 0; m < M; m++)
                UNROLL for (u32 i = 0; i < 2; i++) {
                    float most = top[m][i];
                    UNROLL for (u32 n = 0; n < 4; n++) most = fmaxf(most, fmaxf(scores[m][n][2 * i], scores[m][n][2 * i + 1]) * scale2);
                    total[m][i] *= fast_exp2(top[m][i] - most);
                    top[m][i] = most;
                    UNROLL for (u32 n = 0; n < 4; n++)
                        UNROLL for (u32 j = 0; j < 2; j++) total[m][i] += fast_exp2(scores[m][n][2 * i + j] * scale2 - most);
                }
        }
        block_barrier(); // all have read the stage that is loaded next
    }
    UNROLL for (u32 m = 0; m < M; m++)
        UNROLL for (u32 i = 0; i < 2; i++) {
            const u32 e = first + warp * STRIP<D> + m * 16 + lane / 4 + i * 8;
            float most = top[m][i];
            most = fmaxf(most, shuffle_xor(most, 1));
            most = fmaxf(most, shuffle_xor(most, 2));
            float sum = total[m][i] * fast_exp2(top[m][i] - most);
            sum += shuffle_xor(sum, 1);
            sum += shuffle_xor(sum, 2);
            if (e < entries && lane % 4 == 0)
                lse[((size_t)blockIdx.z * rows + e / group) * heads + g * group + e % group] =
                    sum > 0 ? most * (1 / LOG2_E) + logf(sum) : minus_infinity();
        }
}

// lse (entries) = the log-sum-exps over all pieces of slots, from those over each: parts (pieces × entries). A thread for each entry.
KERNEL(256, merge_sums, (const float* parts, float* lse, u32 pieces, u32 entries)) {
    begin_kernel();
    const size_t entry = thread_index();
    if (entry >= entries) return;
    float most = minus_infinity(), total = 0;
    for (u32 piece = 0; piece < pieces; piece++) most = fmaxf(most, parts[(size_t)piece * entries + entry]);
    if (most > minus_infinity())
        for (u32 piece = 0; piece < pieces; piece++) total += expf(parts[(size_t)piece * entries + entry] - most);
    lse[entry] = most + logf(total); // −∞ where no row sees a slot
}

// Sums of exp(score − lse) over the heads of KV head blockIdx.y, of the slots first .. first + count, or slots[0 .. count] in ascending order:
// of share blockIdx.z of the rows together, out (shares × Hkv × count), or of each row, out (Hkv × rows × count). q is rounded. A block has
// 4 strips of slots; its warps go through units of 16 rows of one head, 4 at a time.
template <class T, u32 D, bool APART>
DEVICE void tensor_weigh(const u16* q, const u16* k, const Pair* visible, u32 rows, u32 heads, u32 kv_heads, u32 capacity, float scale,
                         const float* lse, float* out, u32 first, u32 count, const u32* slots) {
    constexpr u32 M = STRIP<D> / 16, HELD = 4 * STRIP<D>, UNITS = 4, BLOCK = 128, CHUNKS = D / 8, SIZE = 16 * UNITS * Layout<D>::STRIDE;
    Quad* keys = (Quad*)shared_memory;
    Quad* queries = keys + HELD * Layout<D>::STRIDE; // two stages
    Quad* columns = queries + 2 * SIZE;              // two stages: which slots a row sees, and its sum in base 2
    const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = blockIdx.y, group = heads / kv_heads;
    const u32 base = blockIdx.x * HELD, own = base + warp * STRIP<D>;
    const u32 tiles = (rows + 15) / 16, each = (tiles + gridDim.z - 1) / gridDim.z * group, first_unit = blockIdx.z * each;
    const u32 units = first_unit + each < tiles * group ? first_unit + each : tiles * group;
    auto slot_at = [&](u32 i) { return slots ? slots[i < count ? i : count - 1] : first + i; };
    auto load = [&](u32 unit, u32 stage) {
        UNROLL_BY(4) for (u32 i = 0; i < 16 * UNITS * CHUNKS / BLOCK; i++) {
            const u32 at = i * BLOCK + thread, column = at / CHUNKS, chunk = at % CHUNKS;
            const u32 row = (unit + column / 16) / group * 16 + column % 16, head = g * group + (unit + column / 16) % group;
            const bool live = row < rows;
            copy_async(queries + stage * SIZE + Layout<D>::at(column, chunk), q + ((size_t)(live ? row : 0) * heads + head) * D + chunk * 8, live);
        }
        commit_copies();
        if (thread < 16 * UNITS) {
            const u32 row = (unit + thread / 16) / group * 16 + thread % 16, head = g * group + (unit + thread / 16) % group;
            Quad column = {0, 0, 0, 0};
            if (row < rows) {
                const float sum = lse[(size_t)row * heads + head];
                column = Quad{visible[row].x, visible[row].y, sum > minus_infinity() ? bits_of_float(sum * LOG2_E) : 0, 0};
            }
            columns[stage * 16 * UNITS + thread] = column;
        }
    };
    UNROLL for (u32 i = 0; i < HELD * CHUNKS / BLOCK; i++) {
        const u32 at = i * BLOCK + thread, row = at / CHUNKS, chunk = at % CHUNKS;
        const bool live = base + row < count;
        copy_async(keys + Layout<D>::at(row, chunk), k + ((size_t)g * capacity + (live ? slot_at(base + row) : 0)) * D + chunk * 8, live);
    }
    commit_copies();
    load(first_unit, 0);
    wait_copies<1>();
    block_barrier();
    u32 left[M][D / 16][4];
    load_strip<D>(left, keys, warp * STRIP<D>);
    // A lane has two slots of each 16 of its strip, and the warp those from `low` to `high`.
    u32 slot[M][2];
    UNROLL for (u32 m = 0; m < M; m++)
        UNROLL for (u32 i = 0; i < 2; i++) slot[m][i] = slot_at(own + m * 16 + lane / 4 + i * 8);
    const u32 low = slot_at(own), high = slot_at(own + STRIP<D> - 1);
    const float scale2 = scale * LOG2_E;
    float sums[M][APART ? 2 : 1][4] = {};
    u32 head = 0;
    for (u32 step = first_unit; step < units; step += UNITS) {
        const u32 stage = (step - first_unit) / UNITS & 1;
        if (step + UNITS < units) {
            load(step + UNITS, stage ^ 1);
            wait_copies<1>();
        } else {
            wait_copies<0>();
        }
        block_barrier();
        UNROLL_BY(1) for (u32 unit = 0; unit < UNITS && step + unit < units && own < count; unit++) {
            Quad column[4];
            bool any = false, partly = false;
            UNROLL for (u32 i = 0; i < 4; i++) {
                column[i] = columns[(stage * UNITS + unit) * 16 + i / 2 * 8 + lane % 4 * 2 + i % 2];
                any |= column[i].x <= high && column[i].y > low;
                partly |= column[i].x > low || column[i].y <= high;
            }
            if (any_lane(any)) {
                float scores[M][2][4] = {};
                multiply<T, D, 1>(scores, left, queries + stage * SIZE, unit * 16);
                if (any_lane(partly))
                    UNROLL for (u32 m = 0; m < M; m++)
                        UNROLL for (u32 n = 0; n < 2; n++)
                            UNROLL for (u32 i = 0; i < 4; i++) {
                                const Quad& row = column[n * 2 + i % 2];
                                if (slot[m][i / 2] < row.x || slot[m][i / 2] >= row.y) scores[m][n][i] = minus_infinity();
                            }
                UNROLL for (u32 m = 0; m < M; m++)
                    UNROLL for (u32 n = 0; n < 2; n++)
                        UNROLL for (u32 i = 0; i < 4; i++)
                            sums[m][APART ? n : 0][APART ? i : i / 2] +=
                                fast_exp2(scores[m][n][i] * scale2 - float_of_bits(column[n * 2 + i % 2].z));
            }
            if (!APART || ++head < group) continue;
            // All heads of these rows are summed.
            head = 0;
            UNROLL for (u32 m = 0; m < M; m++)
                UNROLL for (u32 n = 0; n < 2; n++)
                    UNROLL for (u32 i = 0; i < 4; i++) {
                        const u32 row = (step + unit) / group * 16 + n * 8 + lane % 4 * 2 + i % 2;
                        const u32 at = own + m * 16 + lane / 4 + i / 2 * 8;
                        float& sum = sums[m][APART ? n : 0][i];
                        if (row < rows && at < count) out[((size_t)g * rows + row) * count + at] = sum;
                        sum = 0;
                    }
        }
        block_barrier(); // all have read the stage that is loaded next
    }
    if constexpr (!APART)
        UNROLL for (u32 m = 0; m < M; m++)
            UNROLL for (u32 i = 0; i < 2; i++) {
                const u32 at = own + m * 16 + lane / 4 + i * 8;
                float sum = sums[m][0][i];
                sum += shuffle_xor(sum, 1);
                sum += shuffle_xor(sum, 2);
                if (lane % 4 == 0 && at < count) out[((size_t)blockIdx.z * kv_heads + g) * count + at] = sum;
            }
}

// out (count × rows) = the sum of parts of rows × count.
KERNEL(256, sum_columns, (const float* parts, float* out, u32 count_of_parts, u32 rows, u32 count)) {
    begin_kernel();
    const size_t at = thread_index(), each = (size_t)rows * count;
    if (at >= each) return;
    float sum = 0;
    UNROLL_BY(4) for (u32 part = 0; part < count_of_parts; part++) sum += parts[part * each + at];
    out[at % count * rows + at / count] = sum;
}

// z (rows × count) = scale · Σ over KV heads of q · k, of the slots first .. first + count, whoever sees them. q (rows × Hkv × d) has the sums
// of each group's queries. A block has 64 rows, a warp 16 of them, and 32 slots; a stage has those of one KV head.
template <class T, u32 D>
DEVICE void tensor_concat(const u16* q, const u16* k, float* z, u32 rows, u32 kv_heads, u32 capacity, float scale, u32 first, u32 count) {
    constexpr u32 ROWS = 64, SLOTS = 32, STAGES = D > 128 ? 2 : 3, BLOCK = 128, CHUNKS = D / 8, SIZE = (ROWS + SLOTS) * Layout<D>::STRIDE;
    Quad* stages = (Quad*)shared_memory;
    const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const u32 base = blockIdx.x * SLOTS, first_row = blockIdx.y * ROWS;
    auto load = [&](u32 g) {
        UNROLL for (u32 at = thread; at < (ROWS + SLOTS) * CHUNKS; at += BLOCK) {
            const u32 i = at / CHUNKS, chunk = at % CHUNKS, row = first_row + i, slot = base + i - ROWS;
            const bool live = g < kv_heads && (i < ROWS ? row < rows : slot < count);
            const u16* from = i < ROWS ? q + ((size_t)row * kv_heads + g) * D : k + ((size_t)g * capacity + first + slot) * D;
            if (g < kv_heads) copy_async(stages + g % STAGES * SIZE + Layout<D>::at(i, chunk), (live ? from : k) + chunk * 8, live);
        }
        commit_copies();
    };
    UNROLL for (u32 g = 0; g < STAGES - 1; g++) load(g);
    float sums[SLOTS / 8][4] = {};
    for (u32 g = 0; g < kv_heads; g++) {
        wait_copies<STAGES - 2>();
        block_barrier(); // the stage has come, and all have read the one that is loaded next
        load(g + STAGES - 1);
        const Quad* stage = stages + g % STAGES * SIZE;
        UNROLL for (u32 step = 0; step < D / 16; step++) {
            u32 a[4];
            load_matrices<false>(a, stage + Layout<D>::at(warp * 16 + lane % 16, step * 2 + lane / 16));
            UNROLL for (u32 n = 0; n < SLOTS / 16; n++) {
                u32 b[4];
                load_matrices<false>(b, stage + Layout<D>::at(ROWS + n * 16 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
                T::mma(sums[2 * n], a, b[0], b[1]);
                T::mma(sums[2 * n + 1], a, b[2], b[3]);
            }
        }
    }
    UNROLL for (u32 n = 0; n < SLOTS / 8; n++)
        UNROLL for (u32 i = 0; i < 4; i++) {
            const u32 row = first_row + warp * 16 + lane / 4 + i / 2 * 8, column = base + n * 8 + lane % 4 * 2 + i % 2;
            if (row < rows && column < count) z[(size_t)row * count + column] = scale * sums[n][i];
        }
}

#define TENSOR_STATISTICS(suffix, T, D)                                                                                       \
    KERNEL(128, tensor_sums_##suffix##_##D,                                                                                   \
           (const float* q, const u16* k, const Pair* visible, float* lse, u32 rows, u32 heads, u32 kv_heads, u32 capacity,   \
            float scale, u32 first_slot)) {                                                                                   \
        begin_kernel();                                                                                                       \
        tensor_sums<T, D>(q, k, visible, lse, rows, heads, kv_heads, capacity, scale, first_slot);                            \
    }                                                                                                                         \
    KERNEL(128, tensor_mass_##suffix##_##D,                                                                                   \
           (const u16* q, const u16* k, const Pair* visible, u32 rows, u32 heads, u32 kv_heads, u32 capacity, float scale,    \
            const float* lse, float* sums, u32 first, u32 count)) {                                                           \
        begin_kernel();                                                                                                       \
        tensor_weigh<T, D, false>(q, k, visible, rows, heads, kv_heads, capacity, scale, lse, sums, first, count, 0);         \
    }                                                                                                                         \
    KERNEL(128, tensor_weights_##suffix##_##D,                                                                                \
           (const u16* q, const u16* k, const Pair* visible, u32 rows, u32 heads, u32 kv_heads, u32 capacity, float scale,    \
            const float* lse, float* weights, u32 first, u32 count, const u32* slots)) {                                      \
        begin_kernel();                                                                                                       \
        tensor_weigh<T, D, true>(q, k, visible, rows, heads, kv_heads, capacity, scale, lse, weights, first, count, slots);   \
    }                                                                                                                         \
    KERNEL(128, tensor_concat_##suffix##_##D,                                                                                 \
           (const u16* q, const u16* k, float* z, u32 rows, u32 kv_heads, u32 capacity, float scale, u32 first, u32 count)) { \
        begin_kernel();                                                                                                       \
        tensor_concat<T, D>(q, k, z, rows, kv_heads, capacity, scale, first, count);                                          \
    }
TENSOR_STATISTICS(f16, F16, 64)
TENSOR_STATISTICS(f16, F16, 80)
TENSOR_STATISTICS(f16, F16, 96)
TENSOR_STATISTICS(f16, F16, 128)
TENSOR_STATISTICS(f16, F16, 256)
TENSOR_STATISTICS(bf16, Bf16, 64)
TENSOR_STATISTICS(bf16, Bf16, 80)
TENSOR_STATISTICS(bf16, Bf16, 96)
TENSOR_STATISTICS(bf16, Bf16, 128)
TENSOR_STATISTICS(bf16, Bf16, 256)
