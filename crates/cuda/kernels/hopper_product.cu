// Products with weights on Hopper GPUs: what product.cu computes, to the bit, by warpgroups and bulk copies.
#pragma once
#include "product.cu"

// Stages of tiles in shared memory: a barrier of each on which it fills, and one on which it empties.
template <u32 STAGES> struct Stages {
    Barrier* full;
    Barrier* empty;
    u32 stage, parity;
    // Makes the barriers, behind whose making the block has to wait at a barrier. A stage is empty when `readers` threads have arrived.
    DEVICE Stages(void* barriers, u32 readers) : full((Barrier*)barriers), empty(full + STAGES), stage(0), parity(0) {
        if (threadIdx.x) return;
        for (u32 i = 0; i < STAGES; i++) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, readers);
        }
        show_barriers();
    }
    DEVICE void next() {
        stage = stage + 1 < STAGES ? stage + 1 : 0;
        parity ^= stage == 0;
    }
    DEVICE void wait_until_full() { barrier_wait(full + stage, parity); }
    DEVICE void wait_until_empty() { barrier_wait(empty + stage, parity ^ 1); }
};

// More rows, of weights in bf16: tiles of 128 × N, 64 inputs at a time. Two warpgroups multiply 64 × N each, and a thread of a third one loads. The
// tiles are those into which tiles of 128 × WIDEST fall from tile `begin` on.
template <Epilogue E, class Out, u32 N>
DEVICE void product_of_groups(const Quad* x, const Quad* w, const float* bias, typename Out::Stored* out, u32 rows, u32 outputs, u32 inputs,
                              u32 stride, u32 begin) {
    constexpr u32 M = 128, WIDEST = 256, PARTS = WIDEST / N, STAGES = (192 << 10) / ((M + N) * 128), PANEL = 256, QUADS_X = M * 8, QUADS_W = N * 8;
    Quad* tiles_x = (Quad*)shared_memory;
    Quad* tiles_w = tiles_x + STAGES * QUADS_X;
    const u32 thread = threadIdx.x, lane = thread % 32, group = thread / 128, steps = inputs / 64;
    Tile tile = tile_of_index<M, WIDEST>(begin + blockIdx.x / PARTS, rows, outputs);
    tile.first_column += blockIdx.x % PARTS * N;
    if (tile.first_column >= outputs) return;
    // The second warpgroup of the last rows may have none of them.
    const u32 groups = rows - tile.first_row > M / 2 ? 2 : 1;
    Stages<STAGES> stages(tiles_w + STAGES * QUADS_W, groups);
    block_barrier();
    if (group == 2) {
        release_registers<40>();
        if (thread % 128) return;
        // Panels that a tile has of rows or of outputs.
        auto panels = [](u32 first, u32 most, u32 all) { return ((all - first < most ? all - first : most) + 31) / 32; };
        const u32 panels_x = panels(tile.first_row, M, rows), panels_w = panels(tile.first_column, N, outputs);
        for (u32 step = 0; step < steps; step++) {
            stages.wait_until_empty();
            Barrier* full = stages.full + stages.stage;
            barrier_expect(full, (panels_x + panels_w) * PANEL * 16);
            auto load = [&](Quad* tile, const Quad* from, u32 first, u32 count) {
                for (u32 i = 0; i < count; i++)
                    copy_bulk(tile + i * PANEL, from + ((size_t)(first / 32 + i) * steps + step) * PANEL, PANEL * 16, full);
            };
            load(tiles_x + stages.stage * QUADS_X, x, tile.first_row, panels_x);
            load(tiles_w + stages.stage * QUADS_W, w, tile.first_column, panels_w);
            stages.next();
        }
        return;
    }
    if (group >= groups) return;
    claim_registers<232>();
    float sums[N / 2] = {};
    u32 last = 0;
    for (u32 step = 0; step < steps; step++) {
        stages.wait_until_full();
        const SharedTile tile_x = shared_tile(tiles_x + stages.stage * QUADS_X + group * QUADS_X / 2);
        const SharedTile tile_w = shared_tile(tiles_w + stages.stage * QUADS_W);
        begin_products();
        UNROLL for (u32 k = 0; k < 4; k++) product_of_group(sums, tile_x.columns(k), tile_w.columns(k));
        commit_products();
        if (step) {
            wait_products<1>();
            if (thread % 128 == 0) barrier_arrive(stages.empty + last);
        }
        last = stages.stage;
        stages.next();
    }
    wait_products<0>();
    // Addends of some columns are read together, so that few waits are for memory.
    constexpr u32 TOGETHER = 4;
    UNROLL for (u32 first = 0; first < N / 8; first += TOGETHER) {
        auto elements = [&](u32 i) {
            return Elements{tile.first_row + thread / 32 * 16 + lane / 4 + i % 2 * 8, tile.first_column + (first + i / 2) * 8 + lane % 4 * 2};
        };
        Pair there[2 * TOGETHER];
        UNROLL for (u32 i = 0; i < 2 * TOGETHER; i++) {
            const Elements at = elements(i);
            there[i] = at.row < rows && at.column < outputs ? addends<E, Out>(out, stride, at, outputs) : Pair{0, 0};
        }
        UNROLL for (u32 i = 0; i < 2 * TOGETHER; i++) {
            const Elements at = elements(i);
            const u32 sum = first * 4 + i * 2;
            if (at.row < rows && at.column < outputs)
                finish<E, Out>(out, stride, at, outputs, bias, sums[sum], sums[sum + 1], there[i]);
        }
    }
}

// Products of at most 16 rows, in tiles of 16 × 32 as product_few has them: four warps multiply, and a fifth one loads.
template <Epilogue E, class Out, class W>
DEVICE void product_few_bulk(const Quad* x, const Quad* w, const float* bias, typename Out::Stored* out, u32 rows, u32 outputs, u32 inputs,
                             u32 stride) {
    constexpr u32 STAGES = W::FEW_BULK_STAGES, WARPS = 4, QUADS_X = 16 * 8, QUADS_W = W::quads(32);
    Quad* tiles_x = (Quad*)shared_memory;
    Quad* tiles_w = tiles_x + STAGES * QUADS_X;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, steps = inputs / 64;
    Stages<STAGES> stages(tiles_w + STAGES * QUADS_W, WARPS);
    block_barrier();
    if (warp == WARPS) {
        if (lane) return;
        const Quad* panel = w + (size_t)blockIdx.x * steps * W::STEP;
        for (u32 step = 0; step < steps; step++) {
            stages.wait_until_empty();
            Barrier* full = stages.full + stages.stage;
            barrier_expect(full, rows * 128 + QUADS_W * 16);
            copy_bulk(tiles_w + stages.stage * QUADS_W, panel + (size_t)step * W::STEP, QUADS_W * 16, full);
            copy_bulk(tiles_x + stages.stage * QUADS_X, x + (size_t)step * 256, rows * 128, full);
            stages.next();
        }
        return;
    }
    // While the products of a step follow one another, the next one is read and unpacked.
    float sums[4] = {};
    FewStep<W> own;
    u32 b[2][4];
    auto read = [&](FewStep<W>& to) {
        stages.wait_until_full();
        to.read(tiles_x + stages.stage * QUADS_X, tiles_w + stages.stage * QUADS_W, warp * 8);
    };
    read(own);
    own.unpack(b);
    FewStep<W> next = own;
    UNROLL_BY(2) for (u32 step = 0; step < steps; step++) {
        Barrier* empty = stages.empty + stages.stage;
        stages.next();
        if (step + 1 < steps) read(next);
        own.multiply(sums, b);
        if (lane == 0) barrier_arrive(empty); // the products of all lanes have taken the stage
        own = next;
        own.unpack(b);
    }
    finish_few<E, Out>(sums, blockIdx.x * 32 + warp * 8, bias, out, rows, outputs, stride);
}

#define HOPPER_PRODUCT_OF(N, suffix, E, OUT)                                                                                         \
    HOPPER_KERNEL(384, product_bf16_##N##_##suffix,                                                                                  \
                  (const Quad* x, const Quad* w, const float* bias, OUT::Stored* out, u32 rows, u32 outputs, u32 inputs, u32 stride, \
                   u32 begin)) {                                                                                                     \
        ON_HOPPER((product_of_groups<E, OUT, N>(x, w, bias, out, rows, outputs, inputs, stride, begin)));                            \
    }
#define HOPPER_PRODUCT(name, suffix, E, OUT, W) \
    HOPPER_PRODUCT_OF(32, suffix, E, OUT)       \
    HOPPER_PRODUCT_OF(64, suffix, E, OUT)       \
    HOPPER_PRODUCT_OF(128, suffix, E, OUT)      \
    HOPPER_PRODUCT_OF(256, suffix, E, OUT)
FOR_EPILOGUES(HOPPER_PRODUCT, bf16, Bf16Panels)

#define FEW_BULK(name, suffix, E, OUT, W)                                                                                            \
    HOPPER_KERNEL(160, product_##name##_few_bulk_##suffix, PRODUCT_PARAMETERS(OUT)) {                                                \
        ON_HOPPER((product_few_bulk<E, OUT, W>(x, w, bias, out, rows, outputs, inputs, stride)));                                    \
    }
FOR_WEIGHTS(FEW_BULK)
