//! Gated rows, activation(gate) · up, beside products of tiles.
//!
//! Shape of a step: 32 columns of a gate and of an up, of one row, become a row of a tile, 32 `bf16`. Bound: two divisions, 16 cycles each of a unit
//! that products leave idle; a step has some 40 operations of the vector units, and a block of four products takes 64 to 100 cycles. Measured on a Xeon, 576 × 1,536,
//! one thread: gate and up take 2.4 to 2.6 µs a row with their activations, as long as they took without them.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::transmute;
use std::ptr::{null, null_mut};

use super::pack_amx::STRIP;
use super::weights::Activation;
use crate::simd::PANEL;
use crate::simd::amx::{Tiles, initial, load_32, store_32};
use crate::simd::pair_tiles::{SIDE, Square};

/// 2^f for 0 ≤ f < 1 less 1, by powers of f from the fourth down to the first; relative error of 2^f below 3e-6.
const EXP2: [f32; 4] = [0.013_426_685, 0.052_242_473, 0.241_280_2, 0.693_044_84];
/// −log₂e
const SILU: f32 = -std::f32::consts::LOG2_E;
/// −2·√(2/π)·log₂e
const LINEAR: f32 = -2.302_208_2;
/// `LINEAR` · 0.044715
const CUBIC: f32 = -0.102_943_24;

/// Rows of a gate and an up projection on their way to tiles, step after step. An activation is x / (1 + 2^t) with t = x · (a + b·x²).
pub(super) struct GatedRows {
    activation: Activation,
    /// The gate's first row; the up's comes [`STRIP`] rows after it.
    gate: *const f32,
    /// Tiles of the first 16 rows and of the others.
    tiles: [*mut u32; 2],
    rows: usize,
    done: usize,
}

impl GatedRows {
    /// No rows yet.
    pub(super) fn new(activation: Activation) -> GatedRows {
        GatedRows { activation, gate: null(), tiles: [null_mut(); 2], rows: 0, done: 0 }
    }

    /// Takes the rows that are left, then begins with up to 32 rows of two cells, the gate's before the up's.
    ///
    /// # Safety
    /// Until the last step, cells and tiles must be valid, and only these steps may use the tiles.
    pub(super) unsafe fn begin(&mut self, on: &Tiles, cells: *const f32, tiles: [*mut u32; 2], rows: usize) {
        self.finish(on);
        *self = GatedRows { activation: self.activation, gate: cells, tiles, rows, done: 0 };
    }

    /// Takes up to `most` rows of one tile off those that are left: where they and their results lie, and their number.
    fn take(&mut self, most: usize) -> (*const f32, *mut u32, usize) {
        let row = self.done % SIDE;
        let count = most.min(SIDE - row).min(self.rows - self.done);
        let tile = self.tiles[(self.done / SIDE).min(1)];
        let taken = (self.gate.wrapping_add(self.done * PANEL), tile.wrapping_add(row * SIDE), count);
        self.done += count;
        taken
    }

    /// Takes the rows that are left.
    pub(super) fn finish(&mut self, _: &Tiles) {
        while self.done < self.rows {
            let rows = self.take(SIDE);
            // SAFETY: `begin`; the instructions come with the tiles.
            unsafe { pack_rows(self.activation, rows) };
        }
    }

    /// C (32 × 32) = initial values + A · B, as [`PairUnit::product_32`](crate::simd::pair_tiles::PairUnit::product_32), with a row beside each of the first blocks.
    ///
    /// # Safety
    /// The pointers must be valid for that; only this thread may use C, and rows may not lie in it.
    #[inline(always)]
    pub(super) unsafe fn product_32(
        &mut self,
        _: &Tiles,
        a: [*const u32; 2],
        b: *const u32,
        blocks: usize,
        to: Square,
    ) {
        let rows = self.take(blocks);
        // SAFETY: the caller's and `begin`; the instructions come with the tiles.
        unsafe {
            match self.activation {
                Activation::Silu => silu_32(rows, a, b, blocks, to),
                Activation::GeluTanh => gelu_32(rows, a, b, blocks, to),
            }
        }
    }
}

/// activation(gate) · up of a row, in `f32`.
pub(super) fn activate(
    _: &Tiles,
    activation: Activation,
    gate: &[f32; PANEL],
    up: &[f32; PANEL],
) -> [f32; PANEL] {
    let mut row = [0.0; PANEL];
    // SAFETY: a row has two halves; the instructions come with the tiles.
    unsafe { write_row(activation, gate.as_ptr(), up.as_ptr(), row.as_mut_ptr()) };
    row
}

#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn write_row(activation: Activation, gate: *const f32, up: *const f32, row: *mut f32) {
    for at in [0, SIDE] {
        // SAFETY: the caller's.
        unsafe { _mm512_storeu_ps(row.add(at), active(activation, gate.add(at), up.add(at))) };
    }
}

/// Packs some rows of one tile.
#[target_feature(enable = "avx512f,avx512dq,avx512bf16")]
unsafe fn pack_rows(activation: Activation, (gate, to, count): (*const f32, *mut u32, usize)) {
    for row in 0..count {
        // SAFETY: the caller's; a row of a tile is 64 bytes.
        unsafe {
            let gate = gate.add(row * PANEL);
            let up = gate.add(STRIP * PANEL);
            let low = active(activation, gate, up);
            let high = active(activation, gate.add(SIDE), up.add(SIDE));
            let words = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
            _mm512_storeu_si512(to.add(row * SIDE).cast(), words);
        }
    }
}

/// activation(gate) · up of 16 columns, with the operations of [`row`].
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn active(activation: Activation, gate: *const f32, up: *const f32) -> __m512 {
    // SAFETY: the caller's.
    unsafe {
        let x = _mm512_loadu_ps(gate);
        let t = match activation {
            Activation::Silu => _mm512_mul_ps(x, _mm512_set1_ps(SILU)),
            Activation::GeluTanh => {
                let square = _mm512_mul_ps(x, x);
                let factor = _mm512_fmadd_ps(square, _mm512_set1_ps(CUBIC), _mm512_set1_ps(LINEAR));
                _mm512_mul_ps(x, factor)
            }
        };
        let f = _mm512_reduce_ps::<9>(t);
        let mut p = _mm512_set1_ps(EXP2[0]);
        for c in [EXP2[1], EXP2[2], EXP2[3], 1.0] {
            p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
        }
        let one = _mm512_set1_ps(1.0);
        let y = _mm512_div_ps(x, _mm512_add_ps(_mm512_scalef_ps(p, t), one));
        _mm512_mul_ps(y, _mm512_loadu_ps(up))
    }
}

/// Assembly of the exponents t of a row's two halves.
macro_rules! exponents {
    (silu) => {
        "vmulps {t0}, {x0}, {linear}\nvmulps {t1}, {x1}, {linear}\n"
    };
    (gelu) => {
        concat!(
            "vmulps {t0}, {x0}, {x0}\nvmulps {t1}, {x1}, {x1}\n",
            "vfmadd213ps {t0}, {cubic}, {linear}\nvfmadd213ps {t1}, {cubic}, {linear}\n",
            "vmulps {t0}, {x0}, {t0}\nvmulps {t1}, {x1}, {t1}\n",
        )
    };
}

/// Assembly of a row, in four parts between which something else may stand, with the operations of [`active`].
macro_rules! row {
    (0, $activation:ident) => {
        concat!(
            "vmovups {x0}, [{g}]\nvmovups {x1}, [{g} + 64]\n",
            exponents!($activation),
            // The fraction above the next lower integer.
            "vreduceps {f0}, {t0}, 9\nvreduceps {f1}, {t1}, 9\n",
            "vmovaps {p0}, {c4}\nvmovaps {p1}, {c4}\n",
            "vfmadd213ps {p0}, {f0}, {c3}\nvfmadd213ps {p1}, {f1}, {c3}\n",
        )
    };
    (1, $activation:ident) => {
        concat!(
            "vfmadd213ps {p0}, {f0}, {c2}\nvfmadd213ps {p1}, {f1}, {c2}\n",
            "vfmadd213ps {p0}, {f0}, {c1}\nvfmadd213ps {p1}, {f1}, {c1}\n",
            "vfmadd213ps {p0}, {f0}, {one}\nvfmadd213ps {p1}, {f1}, {one}\n",
        )
    };
    (2, $activation:ident) => {
        concat!(
            "vscalefps {p0}, {p0}, {t0}\nvscalefps {p1}, {p1}, {t1}\n",
            "vaddps {p0}, {p0}, {one}\nvaddps {p1}, {p1}, {one}\n",
            "vdivps {x0}, {x0}, {p0}\nvdivps {x1}, {x1}, {p1}\n",
        )
    };
    (3, $activation:ident) => {
        concat!(
            "vmulps {x0}, {x0}, [{g} + {up}]\nvmulps {x1}, {x1}, [{g} + {up} + 64]\n",
            "vcvtne2ps2bf16 {x0}, {x1}, {x0}\n",
            "vmovups [{to}], {x0}\n",
            "add {g}, 128\nadd {to}, 64\n",
        )
    };
}

/// Assembly of the products of 32 rows with a block of weights; something comes after each.
macro_rules! four_products {
    ($a0:expr, $a1:expr, $a2:expr, $a3:expr) => {
        concat!(
            "tileloadd tmm4, [{a0} + {s64}*1]\n",
            "tileloaddt1 tmm6, [{b} + {s128}*1]\n",
            "tdpbf16ps tmm0, tmm4, tmm6\n",
            $a0,
            "tileloaddt1 tmm7, [{b} + {s128}*1 + 64]\n",
            "tdpbf16ps tmm1, tmm4, tmm7\n",
            $a1,
            "tileloadd tmm5, [{a1} + {s64}*1]\n",
            "tdpbf16ps tmm2, tmm5, tmm6\n",
            $a2,
            "tdpbf16ps tmm3, tmm5, tmm7\n",
            $a3,
            "add {a0}, 1024\n",
            "add {a1}, 1024\n",
            "add {b}, 2048\n",
        )
    };
}

/// A product with rows beside its first blocks.
macro_rules! product {
    ($activation:ident, ($gate:ident, $to:ident, $rows:ident), ($a:ident, $b:ident, $blocks:ident), $square:ident, $($operands:tt)*) => {
        asm!(
            initial!(load_32!()),
            "test {m}, {m}",
            "jz 5f",
            "4:",
            four_products!(
                row!(0, $activation),
                row!(1, $activation),
                row!(2, $activation),
                row!(3, $activation)
            ),
            "dec {m}",
            "jnz 4b",
            "5:",
            "test {n}, {n}",
            "jz 7f",
            "6:",
            four_products!("", "", "", ""),
            "dec {n}",
            "jnz 6b",
            "7:",
            store_32!(),
            $($operands)*
            g = inout(reg) $gate => _,
            to = inout(reg) $to => _,
            up = const STRIP * PANEL * size_of::<f32>(),
            m = inout(reg) $rows => _,
            n = inout(reg) $blocks - $rows => _,
            a0 = inout(reg) $a[0] => _,
            a1 = inout(reg) $a[1] => _,
            b = inout(reg) $b => _,
            c = inout(reg) $square.c => _,
            cs = inout(reg) $square.stride => _,
            f = inout(reg) $square.from => _,
            fs = inout(reg) $square.from_stride => _,
            s64 = in(reg) 64usize,
            s128 = in(reg) 128usize,
            c4 = in(zmm_reg) _mm512_set1_ps(EXP2[0]),
            c3 = in(zmm_reg) _mm512_set1_ps(EXP2[1]),
            c2 = in(zmm_reg) _mm512_set1_ps(EXP2[2]),
            c1 = in(zmm_reg) _mm512_set1_ps(EXP2[3]),
            one = in(zmm_reg) _mm512_set1_ps(1.0),
            x0 = out(zmm_reg) _,
            x1 = out(zmm_reg) _,
            t0 = out(zmm_reg) _,
            t1 = out(zmm_reg) _,
            f0 = out(zmm_reg) _,
            f1 = out(zmm_reg) _,
            p0 = out(zmm_reg) _,
            p1 = out(zmm_reg) _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

#[target_feature(enable = "avx512f,avx512dq,avx512bf16")]
unsafe fn silu_32(
    (gate, to, rows): (*const f32, *mut u32, usize),
    a: [*const u32; 2],
    b: *const u32,
    blocks: usize,
    square: Square,
) {
    // SAFETY: the caller's.
    unsafe {
        product!(silu, (gate, to, rows), (a, b, blocks), square, linear = in(zmm_reg) _mm512_set1_ps(SILU),);
    }
}

#[target_feature(enable = "avx512f,avx512dq,avx512bf16")]
unsafe fn gelu_32(
    (gate, to, rows): (*const f32, *mut u32, usize),
    a: [*const u32; 2],
    b: *const u32,
    blocks: usize,
    square: Square,
) {
    // SAFETY: the caller's.
    unsafe {
        product!(
            gelu,
            (gate, to, rows),
            (a, b, blocks),
            square,
            linear = in(zmm_reg) _mm512_set1_ps(LINEAR),
            cubic = in(zmm_reg) _mm512_set1_ps(CUBIC),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::features::{Amx, Features};
    use crate::simd::pair_tiles::{PairUnit as _, TILE};
    use half::bf16;

    const CELL: usize = STRIP * PANEL;

    fn amx() -> Option<Amx> {
        let amx = Features::detect().and_then(Features::with_amx).and_then(Features::amx);
        if amx.is_none() {
            println!("skipped: the CPU has no AMX");
        }
        amx
    }

    /// A gate's cell and an up's, with gates from −30 to 30.
    fn cells() -> Vec<f32> {
        let gate = (0..CELL).map(|i| (i * 37 % CELL) as f32 / CELL as f32 * 60.0 - 30.0);
        gate.chain((0..CELL).map(|i| (i * 11 % 97) as f32 / 48.0 - 1.0)).collect()
    }

    fn exactly(activation: Activation, x: f64) -> f64 {
        match activation {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::GeluTanh => {
                x / 2.0 * (1.0 + (std::f64::consts::FRAC_2_PI.sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
            }
        }
    }

    #[test]
    fn rows_are_activated_within_the_rounding_of_bf16() {
        let Some(amx) = amx() else { return };
        let tiles = Tiles::configure(amx);
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let mut cells = cells();
            // Numbers at whose exponentials f32 ends.
            cells[..6].copy_from_slice(&[-1e4, 1e4, -88.0, -104.0, 0.0, f32::NAN]);
            let mut out = vec![0; 2 * TILE];
            let (first, second) = out.split_at_mut(TILE);
            let mut rows = GatedRows::new(activation);
            // SAFETY: the vectors are that long.
            unsafe {
                rows.begin(&tiles, cells.as_ptr(), [first.as_mut_ptr(), second.as_mut_ptr()], STRIP);
            }
            rows.finish(&tiles);
            let out: &[bf16] = bytemuck::cast_slice(&out);
            for (i, y) in out.iter().enumerate() {
                let (x, y) = (f64::from(cells[i]), f64::from(y.to_f32()));
                let expected = exactly(activation, x) * f64::from(cells[CELL + i]);
                // Half a unit of bf16, and what the exponential is off; GELU's tanh loses digits far below zero.
                let close = (y - expected).abs() <= expected.abs() * 0.003_95 + 1e-12;
                assert!(close || x.is_nan() && y.is_nan(), "{activation:?} of {x}: {y} is not {expected}");
            }
        }
    }

    /// Rows beside products have the bits of rows after them, and products beside rows those of products alone.
    #[test]
    fn rows_stand_beside_products() {
        let Some(amx) = amx() else { return };
        let tiles = Tiles::configure(amx);
        let of = cells();
        let words = |count: usize, seed: usize| -> Vec<u32> {
            let number = |i: usize| bf16::from_f32((i * seed % 101) as f32 / 50.0 - 1.0).to_bits();
            (0..count).map(|i| u32::from(number(2 * i)) | u32::from(number(2 * i + 1)) << 16).collect()
        };
        for (blocks, rows) in [(1, 32), (5, 21), (18, 32), (18, 16), (40, 17), (3, 0)] {
            let (x, w) = (words(2 * blocks * TILE, 7), words(2 * blocks * TILE, 13));
            let a = [x.as_ptr(), x[blocks * TILE..].as_ptr()];
            for (activation, from) in [
                (Activation::Silu, null()),
                (Activation::GeluTanh, of.as_ptr()),
                (Activation::Silu, of.as_ptr()),
            ] {
                let square = |c: &mut Vec<f32>| Square {
                    c: c.as_mut_ptr(),
                    stride: 4 * PANEL,
                    from,
                    from_stride: 4 * PANEL,
                    next: null(),
                };
                let run = |beside: bool| {
                    let (mut out, mut gated) = (vec![7; 2 * TILE], GatedRows::new(activation));
                    let mut c = [vec![0.0; CELL], vec![0.0; CELL]];
                    let to = [out.as_mut_ptr(), out[TILE..].as_mut_ptr()];
                    // SAFETY: the vectors are that long.
                    unsafe {
                        gated.begin(&tiles, of.as_ptr(), to, rows);
                        for c in &mut c {
                            match beside {
                                true => gated.product_32(&tiles, a, w.as_ptr(), blocks, square(c)),
                                false => tiles.product_32(a, w.as_ptr(), blocks, square(c)),
                            }
                        }
                    }
                    gated.finish(&tiles);
                    (c, out)
                };
                assert_eq!(run(true), run(false), "{blocks} blocks, {rows} rows, {activation:?}");
            }
        }
    }
}
