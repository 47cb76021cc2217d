// Rows of bf16 as products on tensor cores take them: panels of 32 rows, 64 columns a step.
//
// A step of a panel is one contiguous piece of 4096 bytes: row after row, 128 bytes each, in which 16-byte pieces of row r stand at their index
// xor r % 8, so that eight rows of one column fall in all banks of shared memory. Rows are filled up with zeros to a whole number of steps; what
// fills the last panel is left open.
#pragma once
#include "device.h"

// Where 16 bytes of a row of 64 columns lie.
DEVICE u32 swizzled(u32 row, u32 chunk) { return row * 8 + (chunk ^ (row & 7)); }

// Index of an element among rows of `stride` columns.
DEVICE size_t panel_index(u32 row, u32 column, u32 stride) {
    const size_t step = (size_t)(row / 32) * (stride / 64) + column / 64;
    return step * 2048 + swizzled(row % 32, column % 64 / 8) * 8 + column % 8;
}

// Elements of bf16 in panels.
struct Panels : Bf16 {};

// Index of an element among rows of `stride` columns, by the type of their elements.
template <class T> struct Place {
    static DEVICE size_t at(u32 row, u32 column, u32 stride) { return (size_t)row * stride + column; }
};
template <> struct Place<Panels> {
    static DEVICE size_t at(u32 row, u32 column, u32 stride) { return panel_index(row, column, stride); }
};

// Starts the copies of a step of rows first .. first + ROWS, whole panels of STEP 16-byte pieces each, by THREADS threads. Panels from row `rows` on
// become zeros.
template <u32 ROWS, u32 STEP, u32 THREADS> DEVICE void load_panels(Quad* tile, const Quad* from, u32 first, u32 rows, u32 steps, u32 step) {
    UNROLL for (u32 i = 0; i < (ROWS / 32 * STEP + THREADS - 1) / THREADS; i++) {
        const u32 at = i * THREADS + threadIdx.x, panel = first / 32 + at / STEP;
        const bool live = panel * 32 < rows;
        if (ROWS / 32 * STEP % THREADS == 0 || at < ROWS / 32 * STEP)
            copy_async(tile + at, from + ((size_t)(live ? panel : 0) * steps + step) * STEP + at % STEP, live);
    }
}
