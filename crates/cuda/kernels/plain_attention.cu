// Attention in f32 for any head dimension and any type of keys, in two passes: the logarithm of each softmax's sum, then the weighted
// values. A row's result does not depend on the rows beside it: tiles begin at multiples of 32 slots, whatever the rows see.
#pragma once
#include "entries.h"

// lse (rows × heads) = ln Σ exp(score) over the slots that each row sees from `first_slot` on; −∞ over no slot.
template <class T, class Noise> DEVICE void log_sum_exp(const Attention<T>& a, Noise noise, float* lse, u32 first_slot) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, stride = tile_stride(a.d);
    float* tile = (float*)shared_memory;
    float* queries = tile + TILE * stride;
    float* maxima = queries + ENTRIES * a.d; // ENTRIES × 32
    float* sums = maxima + ENTRIES * 32;
    const EntryBlock block = entry_block(a, first_slot);
    const typename T::Stored* head = a.k + (size_t)block.g * a.capacity * a.d;
    load_queries(queries, a, block);
    float top[ENTRIES / WARPS], sum[ENTRIES / WARPS];
    UNROLL for (u32 j = 0; j < ENTRIES / WARPS; j++) top[j] = minus_infinity(), sum[j] = 0;
    for (u32 base = block.from / TILE * TILE; base < block.to; base += TILE) {
        load_tile<T>(tile, stride, head, a.d, base, block.to);
        block_barrier();
        const u32 slot = base + lane;
        UNROLL for (u32 j = 0; j < ENTRIES / WARPS; j++) {
            const u32 e = warp + j * WARPS, entry = block.first + e;
            if (e >= block.count) continue;
            const u32 row = entry / a.group();
            const Pair seen = a.visible[row];
            if (slot < seen.x || slot < first_slot || slot >= seen.y) continue;
            noise.start(block.g * a.group() + entry % a.group(), row);
            const float score = noise.apply(a.scale * dot(queries + e * a.d, tile + lane * stride, a.d), (size_t)block.g * a.capacity + slot);
            if (score > top[j]) {
                sum[j] = sum[j] * expf(top[j] - score) + 1;
                top[j] = score;
            } else {
                sum[j] += expf(score - top[j]);
            }
        }
        block_barrier();
    }
    UNROLL for (u32 j = 0; j < ENTRIES / WARPS; j++) {
        const u32 e = warp + j * WARPS;
        maxima[e * 32 + lane] = top[j];
        sums[e * 32 + lane] = sum[j];
    }
    block_barrier();
    if (threadIdx.x >= block.count) return;
    const float* own = maxima + threadIdx.x * 32;
    float most = minus_infinity(), total = 0;
    for (u32 i = 0; i < 32; i++) most = fmaxf(most, own[i]);
    for (u32 i = 0; i < 32; i++)
        if (own[i] > minus_infinity()) total += sums[threadIdx.x * 32 + i] * expf(own[i] - most);
    lse[a.index(block.g, block.first + threadIdx.x)] = total > 0 ? most + logf(total) : minus_infinity();
}

// out (rows × heads × d) = Σ exp(score − lse) · v / Σ exp(score − lse) over the slots that each row sees.
template <class T> DEVICE void weigh_values(const Attention<T>& a, const typename T::Stored* v, const float* lse, float* out) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, stride = tile_stride(a.d), d = a.d;
    float* keys = (float*)shared_memory;
    float* values = keys + TILE * stride;
    float* queries = values + TILE * stride;
    float* results = queries + ENTRIES * d;
    float* weights = results + ENTRIES * d;      // ENTRIES × TILE
    float* totals = weights + ENTRIES * TILE;    // ENTRIES
    u32* from = (u32*)(totals + ENTRIES);        // ENTRIES, of the slots that entries see
    u32* to = from + ENTRIES;
    const EntryBlock block = entry_block(a, 0);
    const size_t head = (size_t)block.g * a.capacity * d;
    if (block.from >= block.to) return; // no row sees a slot, and their results are open
    load_queries(queries, a, block);
    for (u32 at = threadIdx.x; at < ENTRIES * d; at += THREADS) results[at] = 0;
    if (threadIdx.x < ENTRIES) {
        const u32 e = threadIdx.x;
        const Pair seen = e < block.count ? a.visible[(block.first + e) / a.group()] : Pair{0, 0};
        totals[e] = 0;
        from[e] = seen.x;
        to[e] = seen.y;
    }
    for (u32 base = block.from / TILE * TILE; base < block.to; base += TILE) {
        load_tile<T>(keys, stride, a.k + head, d, base, block.to);
        load_tile<T>(values, stride, v + head, d, base, block.to);
        block_barrier();
        const u32 slot = base + lane;
        for (u32 e = warp; e < block.count; e += WARPS) {
            const bool sees = slot >= from[e] && slot < to[e];
            const float top = lse[a.index(block.g, block.first + e)];
            weights[e * TILE + lane] = sees ? expf(a.scale * dot(queries + e * d, keys + lane * stride, d) - top) : 0;
        }
        block_barrier();
        // Slots that an entry does not see are left out, not weighed by zero: what stands there may be no number.
        for (u32 at = threadIdx.x; at < block.count * d; at += THREADS) {
            const u32 e = at / d, i = at % d, end = to[e] < base + TILE ? to[e] : base + TILE;
            float sum = results[at];
            for (u32 t = from[e] > base ? from[e] : base; t < end; t++) sum += weights[e * TILE + t - base] * values[(t - base) * stride + i];
            results[at] = sum;
        }
        if (threadIdx.x < block.count)
            for (u32 t = 0; t < TILE; t++) totals[threadIdx.x] += weights[threadIdx.x * TILE + t];
        block_barrier();
    }
    for (u32 at = threadIdx.x; at < block.count * d; at += THREADS)
        out[a.index(block.g, block.first + at / d) * d + at % d] = results[at] / totals[at / d];
}

#define ATTENTION_PARAMETERS(T) \
    const float *q, const T::Stored *k, const Pair *visible, u32 rows, u32 heads, u32 kv_heads, u32 capacity, u32 d, float scale
#define NOISE_PARAMETERS const float *logarithms, const u32 *query_positions, const u32 *key_positions, u64 seed, u32 has_seed, float temperature
#define ATTENTION(T) \
    Attention<T> { q, k, visible, rows, heads, kv_heads, capacity, d, scale }
#define NOISE \
    Gumbel { logarithms, query_positions, key_positions, capacity, seed, has_seed, temperature, 0 }

#define PLAIN_ATTENTION(suffix, T)                                                                                     \
    KERNEL(128, log_sum_exp_##suffix, (ATTENTION_PARAMETERS(T), float* lse, u32 first_slot)) {                         \
        begin_kernel();                                                                                                \
        log_sum_exp<T>(ATTENTION(T), NoNoise{}, lse, first_slot);                                                      \
    }                                                                                                                  \
    KERNEL(128, noisy_log_sum_exp_##suffix, (ATTENTION_PARAMETERS(T), float* lse, u32 first_slot, NOISE_PARAMETERS)) { \
        begin_kernel();                                                                                                \
        log_sum_exp<T>(ATTENTION(T), NOISE, lse, first_slot);                                                          \
    }                                                                                                                  \
    KERNEL(128, weigh_values_##suffix, (ATTENTION_PARAMETERS(T), const T::Stored* v, const float* lse, float* out)) {  \
        begin_kernel();                                                                                                \
        weigh_values<T>(ATTENTION(T), v, lse, out);                                                                    \
    }
PLAIN_ATTENTION(f32, F32)
PLAIN_ATTENTION(f16, F16)
PLAIN_ATTENTION(bf16, Bf16)

// Attention over two sets of keys, merged into the first, a warp for each entry: out (entries × d) and lse (entries). −∞ is the sum over no key.
KERNEL(32, merge_attention, (float* out, float* lse, const float* other, const float* other_lse, u32 d)) {
    begin_kernel();
    const u32 entry = blockIdx.x;
    const float a = lse[entry], b = other_lse[entry], most = fmaxf(a, b);
    block_barrier(); // all have read the sum that the first thread replaces
    if (most == minus_infinity()) return;
    const float own = expf(a - most), share = expf(b - most), total = own + share;
    // The side over no key counts for nothing, whatever stands there.
    for (u32 i = threadIdx.x; i < d; i += 32) {
        const size_t at = (size_t)entry * d + i;
        out[at] = (own > 0 ? own / total * out[at] : 0) + (share > 0 ? share / total * other[at] : 0);
    }
    if (threadIdx.x == 0) lse[entry] = most + logf(total);
}

// Attention over `pieces` sets of keys, merged: parts (pieces × entries × d) and their sums (pieces × entries). A block for each entry; groups of as
// many threads as elements, in whole warps, share the pieces, of which the first is number `first`: a piece falls to a group by its number, so that a
// row's result does not depend on where the pieces begin. What an entry has of a piece over no key counts for nothing, whatever stands there.
// Shared memory is a float for each piece and two for each thread.
KERNEL(1024, merge_pieces, (const float* parts, const float* sums, float* out, float* lse, u32 first, u32 pieces, u32 entries, u32 d)) {
    begin_kernel();
    constexpr u32 BATCH = 16; // reads of a thread under way
    float* weights = (float*)shared_memory;
    float* shares = weights + pieces;
    const u32 width = (d + 31) / 32 * 32, groups = blockDim.x / width, group = threadIdx.x / width, i = threadIdx.x % width, entry = blockIdx.x;
    const u32 own = (group + groups - first % groups) % groups; // the group's first piece
    float batch[BATCH];
    auto load = [&](u32 from) {
        UNROLL for (u32 j = 0; j < BATCH; j++) {
            const u32 piece = from + j * groups;
            batch[j] = piece < pieces && i < d ? parts[((size_t)piece * entries + entry) * d + i] : 0;
        }
    };
    load(own);
    float most = minus_infinity(), total = 0, sum = 0;
    for (u32 piece = threadIdx.x % 32; piece < pieces; piece += 32) most = fmaxf(most, sums[(size_t)piece * entries + entry]);
    most = warp_max(most);
    for (u32 piece = threadIdx.x; piece < pieces; piece += blockDim.x) {
        const float part = sums[(size_t)piece * entries + entry];
        weights[piece] = part == minus_infinity() ? 0 : expf(part - most);
    }
    block_barrier();
    for (u32 from = own; from < pieces; from += BATCH * groups) {
        if (from != own) load(from);
        UNROLL for (u32 j = 0; j < BATCH; j++) {
            const float weight = from + j * groups < pieces ? weights[from + j * groups] : 0;
            total += weight;
            if (weight != 0) sum += weight * batch[j];
        }
    }
    shares[threadIdx.x] = sum;
    shares[blockDim.x + threadIdx.x] = total;
    block_barrier();
    if (threadIdx.x >= d) return;
    for (u32 other = 1; other < groups; other++) {
        sum += shares[other * width + i];
        total += shares[blockDim.x + other * width + i];
    }
    out[(size_t)entry * d + i] = total > 0 ? sum / total : 0;
    if (lse && i == 0) lse[entry] = total > 0 ? most + logf(total) : minus_infinity();
}
