// Products with weights on Hopper GPUs: what product.cu computes, to the bit, by warpgroups and bulk copies.
#pragma once
#include "product.cu"

// Stages of tiles in shared memory: a barrier of each on which it fills, and one on which it empties.
struct Stages {
    Barrier* full;
    Barrier* empty;
    u32 count, stage, parity;
    // Makes the barriers, behind whose making the block has to wait at a barrier. A stage is full when `writers` threads have arrived and what they expect
    // has come, and empty when `readers` threads have arrived.
    DEVICE Stages(void* barriers, u32 count, u32 writers, u32 readers)
        : full((Barrier*)barriers), empty(full + count), count(count), stage(0), parity(0) {
        if (threadIdx.x) return;
        for (u32 i = 0; i < count; i++) {
            barrier_init(full + i, writers);
            barrier_init(empty + i, readers);
        }
        show_barriers();
    }
    DEVICE void next() {
        stage = stage + 1 < count ? stage + 1 : 0;
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
    Stages stages(tiles_w + STAGES * QUADS_W, STAGES, 1, groups);
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

// Steps of weights and rows in a stage of a product of few rows.
constexpr u32 FEW_TOGETHER = 8;

// Products of at most 16 rows, in tiles of 16 × 32 as product_few has them: a block has every gridDim.x-th panel of weights. Four warps multiply, and two
// load, FEW_TOGETHER steps a stage: one weights, which no kernel changes, so that they fill the stages while the kernels before are still busy and
// while a panel is finished; one rows. Bounded by reading the weights where they are of bf16; those of blocks by unpacking, and where panels are few by
// the chain of products, each of which waits for the one before.
template <Epilogue E, class Out, class W>
DEVICE void product_few_bulk(const Quad* x, const Quad* w, const float* bias, typename Out::Stored* out, u32 rows, u32 outputs, u32 inputs,
                             u32 stride, u32 stages_count) {
    constexpr u32 WARPS = 4, STEP_X = 16 * 8, QUADS_X = FEW_TOGETHER * STEP_X, QUADS_W = FEW_TOGETHER * W::STEP;
    Quad* tiles_x = (Quad*)shared_memory;
    Quad* tiles_w = tiles_x + stages_count * QUADS_X;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, steps = inputs / 64, panels = (outputs + 31) / 32;
    release_next_kernel();
    Stages stages(tiles_w + stages_count * QUADS_W, stages_count, 2, WARPS);
    block_barrier();
    // Steps of the stage that begins with a step of a panel.
    auto count = [&](u32 first) { return steps - first < FEW_TOGETHER ? steps - first : FEW_TOGETHER; };
    // Calls load(panel, first step, full) for each stage once it is empty.
    auto load_stages = [&](auto load) {
        for (u32 panel = blockIdx.x; panel < panels; panel += gridDim.x)
            for (u32 first = 0; first < steps; first += FEW_TOGETHER, stages.next()) {
                stages.wait_until_empty();
                load(panel, first, stages.full + stages.stage);
            }
    };
    if (warp == WARPS) {
        if (lane) return;
        load_stages([&](u32 panel, u32 first, Barrier* full) {
            const u32 bytes = count(first) * W::STEP * 16;
            barrier_expect(full, bytes);
            copy_bulk(tiles_w + stages.stage * QUADS_W, w + ((size_t)panel * steps + first) * W::STEP, bytes, full);
        });
        return;
    }
    if (warp > WARPS) {
        wait_for_kernels();
        load_stages([&](u32, u32 first, Barrier* full) {
            warp_barrier(); // a lane that still waited for the stage would miss the end of its phase
            if (lane == 0) barrier_expect(full, count(first) * rows * 128);
            if (lane < count(first))
                copy_bulk(tiles_x + stages.stage * QUADS_X + lane * STEP_X, x + (size_t)(first + lane) * 256, rows * 128, full);
        });
        return;
    }
    for (u32 panel = blockIdx.x; panel < panels; panel += gridDim.x) {
        float sums[4] = {};
        for (u32 first = 0; first < steps; first += FEW_TOGETHER, stages.next()) {
            stages.wait_until_full();
            const Quad* tile_x = tiles_x + stages.stage * QUADS_X;
            const Quad* tile_w = tiles_w + stages.stage * QUADS_W;
            // Without a branch between steps the weights of one are unpacked while the products of the one before follow one another.
            FewWeights<W> weights[FEW_TOGETHER];
            if (count(first) == FEW_TOGETHER) {
                UNROLL for (u32 i = 0; i < FEW_TOGETHER; i++) weights[i].read(tile_w + i * W::STEP, warp * 8);
                UNROLL for (u32 i = 0; i < FEW_TOGETHER; i++) weights[i].multiply(sums, tile_x + i * STEP_X);
            } else {
                for (u32 i = 0; i < count(first); i++) {
                    weights[0].read(tile_w + i * W::STEP, warp * 8);
                    weights[0].multiply(sums, tile_x + i * STEP_X);
                }
            }
            if (lane == 0) barrier_arrive(stages.empty + stages.stage); // the products of all lanes have taken the stage
        }
        finish_few<E, Out>(sums, panel * 32 + warp * 8, bias, out, rows, outputs, stride);
    }
}

#define HOPPER_PRODUCT_OF(N, suffix, E, OUT)                                                                                         \
    HOPPER_KERNEL(384, product_bf16_##N##_##suffix,                                                                                  \
                  (const Quad* x, const Quad* w, const float* bias, OUT::Stored* out, u32 rows, u32 outputs, u32 inputs, u32 stride, \
                   u32 begin)) {                                                                                                     \
        begin_kernel();                                                                                                              \
        ON_HOPPER((product_of_groups<E, OUT, N>(x, w, bias, out, rows, outputs, inputs, stride, begin)));                            \
    }
#define HOPPER_PRODUCT(name, suffix, E, OUT, W) \
    HOPPER_PRODUCT_OF(32, suffix, E, OUT)       \
    HOPPER_PRODUCT_OF(64, suffix, E, OUT)       \
    HOPPER_PRODUCT_OF(128, suffix, E, OUT)      \
    HOPPER_PRODUCT_OF(256, suffix, E, OUT)
FOR_EPILOGUES(HOPPER_PRODUCT, bf16, Bf16Panels)

#define FEW_BULK(name, suffix, E, OUT, W)                                                                                            \
    HOPPER_KERNEL(192, product_##name##_few_bulk_##suffix,                                                                           \
                  (const Quad* x, const Quad* w, const float* bias, OUT::Stored* out, u32 rows, u32 outputs, u32 inputs, u32 stride, \
                   u32 stages)) {                                                                                                    \
        ON_HOPPER((product_few_bulk<E, OUT, W>(x, w, bias, out, rows, outputs, inputs, stride, stages)));                            \
    }
FOR_WEIGHTS(FEW_BULK)
