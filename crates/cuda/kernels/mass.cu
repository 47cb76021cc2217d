// Statistics of attention, from the logarithms of the softmaxes' sums: weights of slots, of rows, and with all heads concatenated.
#pragma once
#include "plain_attention.cu"

// sums (Hkv × count) = Σ over rows and the heads of a KV head of exp(score − lse), of the slots first .. first + count. A block has a tile of
// slots of KV head blockIdx.y.
template <class T, class Noise>
DEVICE void attention_mass(const Attention<T>& a, Noise noise, const float* lse, float* sums, u32 first, u32 count) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, stride = tile_stride(a.d), g = blockIdx.y, group = a.group();
    const u32 base = first + blockIdx.x * TILE, end = first + count, slot = base + lane;
    float* tile = (float*)shared_memory;
    float* parts = tile + TILE * stride; // WARPS × 32
    load_tile<T>(tile, stride, a.k + (size_t)g * a.capacity * a.d, a.d, base, end);
    block_barrier();
    float sum = 0;
    for (u32 entry = warp; entry < a.entries(); entry += WARPS) {
        const u32 row = entry / group;
        const Pair seen = a.visible[row];
        if (slot < seen.x || slot >= seen.y || slot >= end) continue;
        const size_t index = a.index(g, entry);
        noise.start(g * group + entry % group, row);
        const float score = a.scale * dot(a.q + index * a.d, tile + lane * stride, a.d);
        sum += expf(noise.apply(score, (size_t)g * a.capacity + slot) - lse[index]);
    }
    parts[warp * 32 + lane] = sum;
    block_barrier();
    if (warp || slot >= end) return;
    for (u32 other = 1; other < WARPS; other++) sum += parts[other * 32 + lane];
    sums[(size_t)g * count + slot - first] = sum;
}

// weights (Hkv × rows × count) = Σ over the heads of a KV head of exp(score − lse). A block has a tile of slots and 16 rows.
template <class T> DEVICE void row_weights(const Attention<T>& a, const float* lse, float* weights, u32 first, u32 count) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, stride = tile_stride(a.d), g = blockIdx.z, group = a.group();
    const u32 base = first + blockIdx.x * TILE, end = first + count, slot = base + lane;
    float* tile = (float*)shared_memory;
    load_tile<T>(tile, stride, a.k + (size_t)g * a.capacity * a.d, a.d, base, end);
    block_barrier();
    if (slot >= end) return;
    for (u32 i = warp; i < ENTRIES; i += WARPS) {
        const u32 row = blockIdx.y * ENTRIES + i;
        if (row >= a.rows) return;
        const Pair seen = a.visible[row];
        float sum = 0;
        if (slot >= seen.x && slot < seen.y)
            for (u32 h = 0; h < group; h++) {
                const size_t index = (size_t)row * a.heads + g * group + h;
                sum += expf(a.scale * dot(a.q + index * a.d, tile + lane * stride, a.d) - lse[index]);
            }
        weights[((size_t)g * a.rows + row) * count + slot - first] = sum;
    }
}

// weights (count × rows) = Σ over all heads of exp(score − lse), of the slots slots[0..count], one of them a block in x.
template <class T> DEVICE void column_weights(const Attention<T>& a, const float* lse, const u32* slots, float* weights) {
    const u32 row = blockIdx.y * THREADS + threadIdx.x, slot = slots[blockIdx.x];
    if (row >= a.rows) return;
    const Pair seen = a.visible[row];
    float sum = 0;
    if (slot >= seen.x && slot < seen.y)
        for (u32 h = 0; h < a.heads; h++) {
            const size_t index = (size_t)row * a.heads + h;
            const typename T::Stored* key = a.k + ((size_t)(h / a.group()) * a.capacity + slot) * a.d;
            float score = 0;
            for (u32 i = 0; i < a.d; i++) score += a.q[index * a.d + i] * T::widen(key[i]);
            sum += expf(a.scale * score - lse[index]);
        }
    weights[(size_t)blockIdx.x * a.rows + row] = sum;
}

// z (rows × count) = scale · Σ over all heads of q · k, of the slots first .. first + count, whoever sees them. A block has a tile of slots and 16 rows.
template <class T> DEVICE void concat_logits(const Attention<T>& a, float* z, u32 first, u32 count) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, stride = tile_stride(a.d), group = a.group();
    const u32 base = first + blockIdx.x * TILE, end = first + count, slot = base + lane;
    float* tile = (float*)shared_memory;
    float sums[ENTRIES / WARPS] = {};
    for (u32 g = 0; g < a.kv_heads; g++) {
        load_tile<T>(tile, stride, a.k + (size_t)g * a.capacity * a.d, a.d, base, end);
        block_barrier();
        UNROLL for (u32 j = 0; j < ENTRIES / WARPS; j++) {
            const u32 row = blockIdx.y * ENTRIES + warp + j * WARPS;
            if (row < a.rows && slot < end)
                for (u32 h = 0; h < group; h++)
                    sums[j] += dot(a.q + ((size_t)row * a.heads + g * group + h) * a.d, tile + lane * stride, a.d);
        }
        block_barrier();
    }
    UNROLL for (u32 j = 0; j < ENTRIES / WARPS; j++) {
        const u32 row = blockIdx.y * ENTRIES + warp + j * WARPS;
        if (row < a.rows && slot < end) z[(size_t)row * count + slot - first] = a.scale * sums[j];
    }
}

#define MASS(suffix, T)                                                                                                    \
    KERNEL(128, attention_mass_##suffix, (ATTENTION_PARAMETERS(T), const float* lse, float* sums, u32 first, u32 count)) { \
        begin_kernel();                                                                                                    \
        attention_mass<T>(ATTENTION(T), NoNoise{}, lse, sums, first, count);                                               \
    }                                                                                                                      \
    KERNEL(128, noisy_attention_mass_##suffix,                                                                             \
           (ATTENTION_PARAMETERS(T), const float* lse, float* sums, u32 first, u32 count, NOISE_PARAMETERS)) {             \
        begin_kernel();                                                                                                    \
        attention_mass<T>(ATTENTION(T), NOISE, lse, sums, first, count);                                                   \
    }                                                                                                                      \
    KERNEL(128, row_weights_##suffix, (ATTENTION_PARAMETERS(T), const float* lse, float* weights, u32 first, u32 count)) { \
        begin_kernel();                                                                                                    \
        row_weights<T>(ATTENTION(T), lse, weights, first, count);                                                          \
    }                                                                                                                      \
    KERNEL(128, column_weights_##suffix, (ATTENTION_PARAMETERS(T), const float* lse, const u32* slots, float* weights)) {  \
        begin_kernel();                                                                                                    \
        column_weights<T>(ATTENTION(T), lse, slots, weights);                                                              \
    }                                                                                                                      \
    KERNEL(128, concat_logits_##suffix, (ATTENTION_PARAMETERS(T), float* z, u32 first, u32 count)) {                       \
        begin_kernel();                                                                                                    \
        concat_logits<T>(ATTENTION(T), z, first, count);                                                                   \
    }
MASS(f32, F32)
MASS(f16, F16)
MASS(bf16, Bf16)

// lse (rows) of z (rows × count) over the slots that each row sees; slot first is column 0. A block for each row.
KERNEL(512, row_log_sum_exp, (const float* z, const Pair* visible, float* lse, u32 first, u32 count)) {
    begin_kernel();
    float* maxima = (float*)shared_memory; // one for each warp
    float* sums = maxima + blockDim.x / 32;
    z += (size_t)blockIdx.x * count;
    const Pair seen = visible[blockIdx.x];
    float top = -1e30f, sum = 0;
    UNROLL_BY(4) for (u32 i = seen.x - first + threadIdx.x; i < seen.y - first; i += blockDim.x) {
        const float most = fmaxf(top, z[i]);
        sum = sum * expf(top - most) + expf(z[i] - most);
        top = most;
    }
    const float most = warp_max(top);
    sum = warp_sum(sum * expf(top - most));
    if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = most, sums[threadIdx.x / 32] = sum;
    block_barrier();
    if (threadIdx.x) return;
    float all = most, total = 0;
    for (u32 i = 0; i < blockDim.x / 32; i++) all = fmaxf(all, maxima[i]);
    for (u32 i = 0; i < blockDim.x / 32; i++) total += sums[i] * expf(maxima[i] - all);
    lse[blockIdx.x] = total > 0 ? all + logf(total) : minus_infinity();
}

// sums (count) += Σ over rows of exp(z − lse) of the slots that each row sees; slot first is column 0. A block has 32 columns, and each of its 8
// warps every eighth row.
KERNEL(256, add_column_mass, (const float* z, const Pair* visible, const float* lse, float* sums, u32 rows, u32 first, u32 count)) {
    begin_kernel();
    float* parts = (float*)shared_memory; // 8 × 32
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * 32 + lane, slot = first + column;
    float sum = 0;
    if (column < count)
        UNROLL_BY(4) for (u32 row = warp; row < rows; row += 8)
            if (slot >= visible[row].x && slot < visible[row].y) sum += expf(z[(size_t)row * count + column] - lse[row]);
    parts[warp * 32 + lane] = sum;
    block_barrier();
    if (warp || column >= count) return;
    for (u32 other = 1; other < 8; other++) sum += parts[other * 32 + lane];
    sums[column] += sum;
}

// scores (count) of weights (Hkv × rows × count): with `highest` the greatest of them, otherwise √Σ over rows of (Σ over KV heads)²; either
// divided by `heads`. A block has 32 columns, and each of its 8 warps every eighth row.
KERNEL(256, aggregate_weights, (const float* weights, float* scores, u32 kv_heads, u32 rows, u32 count, u32 heads, u32 highest)) {
    begin_kernel();
    float* parts = (float*)shared_memory; // 8 × 32
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * 32 + lane;
    float score = 0;
    if (column < count)
        UNROLL_BY(2) for (u32 row = warp; row < rows; row += 8) {
            float sum = 0;
            UNROLL_BY(4) for (u32 g = 0; g < kv_heads; g++) {
                const float weight = weights[((size_t)g * rows + row) * count + column];
                sum = highest ? fmaxf(sum, weight) : sum + weight;
            }
            score = highest ? fmaxf(score, sum) : score + sum * sum;
        }
    parts[warp * 32 + lane] = score;
    block_barrier();
    if (warp || column >= count) return;
    for (u32 other = 1; other < 8; other++) {
        const float part = parts[other * 32 + lane];
        score = highest ? fmaxf(score, part) : score + part;
    }
    scores[column] = (highest ? score : sqrtf(score)) / heads;
}
