//! Products of tiles with a panel of blocks, which is unpacked to pairs of `bf16` beside them.
//!
//! Shape of a block: 16 or 32 rows, 32 inputs, 32 outputs. Bound: unpacking ([`amx_unpack`](super::amx_unpack)), 4.7 cycles for 32 weights. Products and loads of their
//! tiles take 3.8 alone, and both together 6.1 where they alternate, 10 to 11 where one comes after the other (measured on a Xeon with AMX).

use std::arch::asm;
use std::arch::x86_64::*;

use super::amx_unpack::{Floats, OUTPUTS, bytes, half_q4, half_q8, head, pairs, quad_q8, quads_q4};
use super::format::{BLOCK, BlockFormat};
use crate::simd::PANEL;
use crate::simd::amx::{Tiles, initial, load_16, load_32, store_16, store_32};
use crate::simd::pair_tiles::{SIDE, Square};

/// Bytes of a block's 16 steps of pairs.
const STEPS: usize = BLOCK / 2 * PANEL * size_of::<u32>();

/// Blocks between one that is unpacked and one that is asked for.
const AHEAD: usize = 4;

/// Assembly for 16 rows: initial values, the parts of a block's products, the step to the next tiles, and the stores of the results.
macro_rules! rows_16 {
    (initial) => {
        load_16!()
    };
    (0) => {
        "tileloadd tmm4, [{a0} + {s64}*1]\n"
    };
    (1) => {
        "tileloadd tmm6, [{read} + {s128}*1]\ntdpbf16ps tmm0, tmm4, tmm6\n"
    };
    (2) => {
        "tileloadd tmm7, [{read} + {s128}*1 + 64]\n"
    };
    (3) => {
        "tdpbf16ps tmm1, tmm4, tmm7\n"
    };
    (4) => {
        ""
    };
    (5) => {
        ""
    };
    (6) => {
        ""
    };
    (next) => {
        "add {a0}, 1024\n"
    };
    (results) => {
        store_16!()
    };
}

/// [`rows_16`] for 32 rows.
macro_rules! rows_32 {
    (initial) => {
        load_32!()
    };
    (0) => {
        rows_16!(0)
    };
    (1) => {
        rows_16!(1)
    };
    (2) => {
        rows_16!(2)
    };
    (3) => {
        rows_16!(3)
    };
    (4) => {
        "tileloadd tmm5, [{a1} + {s64}*1]\n"
    };
    (5) => {
        "tdpbf16ps tmm2, tmm5, tmm6\n"
    };
    (6) => {
        "tdpbf16ps tmm3, tmm5, tmm7\n"
    };
    (next) => {
        "add {a0}, 1024\nadd {a1}, 1024\n"
    };
    (results) => {
        store_32!()
    };
}

/// A product with all blocks of a panel. One block of assembly, since the compiler knows nothing of what tiles hold.
macro_rules! product {
    ($format:expr, $half:ident, $rows:ident, $of:expr, $($operands:tt)*) => {
        asm!(
            initial!($rows!(initial)),
            $half!(0, "", "", "", ""),
            $half!(1, "", "", "", ""),
            "jmp 5f",
            // The products of a block stand between the parts of the next one.
            "4:",
            $half!(0, $rows!(0), $rows!(1), $rows!(2), $rows!(3)),
            $half!(1, $rows!(4), $rows!(5), "", $rows!(6)),
            $rows!(next),
            "5:",
            "add {b}, {size}",
            "mov {read}, {write}",
            "add {write}, {steps}",
            "and {write}, {mask}",
            "dec {n}",
            "jnz 4b",
            concat!($rows!(0), $rows!(1), $rows!(2), $rows!(3), $rows!(4), $rows!(5), $rows!(6)),
            $rows!(results),
            $($operands)*
            size = const 4 * $format.words(),
            ahead = const AHEAD * 4 * $format.words(),
            steps = const STEPS,
            b = inout(reg) $of.panel.as_ptr() => _,
            n = inout(reg) $of.blocks() => _,
            read = out(reg) _,
            write = inout(reg) $of.pairs.start() => _,
            mask = in(reg) $of.pairs.mask(),
            a0 = inout(reg) $of.a[0] => _,
            c = inout(reg) $of.to.c => _,
            cs = inout(reg) $of.to.stride => _,
            f = inout(reg) $of.to.from => _,
            fs = inout(reg) $of.to.from_stride => _,
            s64 = in(reg) 64usize,
            s128 = in(reg) 128usize,
            p0 = in(zmm_reg) words(const { &bytes(0, 0, Floats::of($format).byte) }),
            p1 = in(zmm_reg) words(const { &bytes(1, 0, Floats::of($format).byte) }),
            p2 = in(zmm_reg) words(const { &bytes(0, 1, Floats::of($format).byte) }),
            p3 = in(zmm_reg) words(const { &bytes(1, 1, Floats::of($format).byte) }),
            o0 = in(zmm_reg) words(&OUTPUTS[0]),
            o1 = in(zmm_reg) words(&OUTPUTS[1]),
            zero = in(zmm_reg) _mm512_set1_ps(Floats::of($format).zero),
            excess = in(zmm_reg) _mm512_set1_ps(Floats::of($format).excess),
            byte = in(kreg) 0x1111_1111_1111_1111u64 << Floats::of($format).byte,
            s0 = out(zmm_reg) _,
            s1 = out(zmm_reg) _,
            m0 = out(zmm_reg) _,
            m1 = out(zmm_reg) _,
            v0 = out(zmm_reg) _,
            v1 = out(zmm_reg) _,
            v2 = out(zmm_reg) _,
            v3 = out(zmm_reg) _,
            w = out(zmm_reg) _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

/// Room for a panel as pairs, 16 steps of 32 words for each block.
pub(in crate::linear) enum Pairs<'a> {
    /// All of the panel's, which are there afterwards.
    Kept(&'a mut [u32]),
    /// [`PASSING`] words for two blocks in turn, which stay in the first-level cache.
    Passing(&'a mut [u32]),
}

/// Words among which two blocks begin at an address that is a multiple of four blocks' bytes: there one bit tells the place after the second
/// block, and without it that is the first block's.
pub(in crate::linear) const PASSING: usize = 6 * STEPS / size_of::<u32>();

impl Pairs<'_> {
    fn start(&mut self) -> *mut u32 {
        match self {
            Pairs::Kept(room) => room.as_mut_ptr(),
            Pairs::Passing(room) => {
                let skipped = room.as_ptr().align_offset(4 * STEPS);
                room[skipped..].as_mut_ptr()
            }
        }
    }

    /// The mask of the address after a block, which leads back to the first of two passing blocks after the second.
    fn mask(&self) -> usize {
        match self {
            Pairs::Kept(_) => !0,
            Pairs::Passing(_) => !(2 * STEPS),
        }
    }

    fn holds(&self, blocks: usize) -> bool {
        match self {
            Pairs::Kept(room) => size_of_val(*room) >= blocks * STEPS,
            Pairs::Passing(room) => room.len() >= PASSING,
        }
    }
}

/// A product with a panel of blocks.
pub(in crate::linear) struct BlockProduct<'a> {
    /// One or two columns of tiles of the rows, a tile for each block.
    pub(in crate::linear) a: [*const u32; 2],
    pub(in crate::linear) format: BlockFormat,
    /// Blocks of the panel, one at least.
    pub(in crate::linear) panel: &'a [u32],
    pub(in crate::linear) pairs: Pairs<'a>,
    /// Results of 16 or 32 rows.
    pub(in crate::linear) to: Square,
}

impl BlockProduct<'_> {
    fn blocks(&self) -> usize {
        self.panel.len() / self.format.words()
    }

    /// C (16 or 32 × 32) = initial values + A · B, and B as pairs.
    ///
    /// # Safety
    /// The pointers must be valid for that, those of the first 16 rows alone if there are 16; only this thread may use C and the room.
    #[inline(always)]
    pub(in crate::linear) unsafe fn run(&mut self, _: &Tiles, rows: usize) {
        assert!(
            self.blocks() > 0 && self.pairs.holds(self.blocks()),
            "there are blocks, and room for their pairs"
        );
        // SAFETY: the caller's; the instructions come with the tiles.
        unsafe {
            match (self.format, rows > SIDE) {
                (BlockFormat::Q4, false) => q4_16(self),
                (BlockFormat::Q4, true) => q4_32(self),
                (BlockFormat::Q8, false) => q8_16(self),
                (BlockFormat::Q8, true) => q8_32(self),
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16,avx512vbmi")]
unsafe fn q4_16(of: &mut BlockProduct<'_>) {
    // SAFETY: the caller's.
    unsafe {
        product!(
            BlockFormat::Q4,
            half_q4,
            rows_16,
            of,
            nibbles = in(zmm_reg) _mm512_set1_epi8(15),
            low = out(zmm_reg) _,
        );
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16,avx512vbmi")]
unsafe fn q4_32(of: &mut BlockProduct<'_>) {
    // SAFETY: the caller's.
    unsafe {
        product!(
            BlockFormat::Q4,
            half_q4,
            rows_32,
            of,
            a1 = inout(reg) of.a[1] => _,
            nibbles = in(zmm_reg) _mm512_set1_epi8(15),
            low = out(zmm_reg) _,
        );
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16,avx512vbmi")]
unsafe fn q8_16(of: &mut BlockProduct<'_>) {
    // SAFETY: the caller's.
    unsafe {
        product!(BlockFormat::Q8, half_q8, rows_16, of,);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16,avx512vbmi")]
unsafe fn q8_32(of: &mut BlockProduct<'_>) {
    // SAFETY: the caller's.
    unsafe {
        product!(
            BlockFormat::Q8,
            half_q8,
            rows_32,
            of,
            a1 = inout(reg) of.a[1] => _,
        );
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn words<T>(of: &T) -> __m512i {
    const { assert!(size_of::<T>() == size_of::<__m512i>()) };
    // SAFETY: 64 bytes.
    unsafe { _mm512_loadu_si512((&raw const *of).cast()) }
}

#[cfg(test)]
mod tests {
    use std::array::from_fn;
    use std::ptr::null;

    use half::f16;

    use super::super::format::{Q4Block, Q8Block, pack_q4, pack_q8};
    use super::super::kernels::Unpack;
    use super::*;
    use crate::simd::features::Features;
    use crate::simd::pair_tiles::{PairTiles as _, PairUnit as _, TILE};

    const BLOCKS: usize = 5;
    const ROWS: usize = 2 * SIDE;

    /// Numbers from 0 to 1, the same for every call.
    fn numbers() -> impl FnMut() -> f32 {
        let mut state = 24u32;
        move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32
        }
    }

    fn panel(format: BlockFormat, next: &mut impl FnMut() -> f32) -> Vec<u32> {
        let mut panel = vec![0; BLOCKS * format.words()];
        for lane in 0..PANEL {
            match format {
                BlockFormat::Q8 => {
                    let row: [Q8Block; BLOCKS] = from_fn(|_| Q8Block {
                        scale: f16::from_f32(0.001 + 0.02 * next()),
                        q: from_fn(|_| (254.0 * next() - 127.0) as i8),
                    });
                    pack_q8(&row, lane, &mut panel);
                }
                BlockFormat::Q4 => {
                    let row: [Q4Block; BLOCKS] = from_fn(|_| Q4Block {
                        scale: 0.001 + 0.02 * next(),
                        min: -0.1 * next(),
                        q: from_fn(|_| (16.0 * next()) as u8),
                    });
                    pack_q4(&row, lane, &mut panel);
                }
            }
        }
        panel
    }

    /// Unpacking beside products has the bits of unpacking before them.
    #[test]
    fn a_panel_is_unpacked_beside_its_products() {
        let Some(amx) = Features::detect().and_then(Features::with_amx).and_then(Features::amx) else {
            println!("skipped: the CPU has no AMX");
            return;
        };
        let next = &mut numbers();
        let tiles = Tiles::configure(amx);
        for format in [BlockFormat::Q4, BlockFormat::Q8] {
            let panel = panel(format, next);
            let mut expected = vec![0; BLOCKS * BLOCK / 2 * PANEL];
            amx.run(Unpack { format, panel: &panel, out: &mut expected });
            let mut x = vec![0; 2 * BLOCKS * TILE];
            for r in 0..ROWS {
                let row: Vec<f32> = (0..BLOCKS * BLOCK).map(|_| 2.0 * next() - 1.0).collect();
                amx.round_row(&row, 1.0, &mut x[r / SIDE * BLOCKS * TILE..], r % SIDE);
            }
            let a = [x.as_ptr(), x[BLOCKS * TILE..].as_ptr()];
            let initial: Vec<f32> = (0..ROWS * PANEL).map(|_| 2.0 * next() - 1.0).collect();
            for (rows, from) in
                [(SIDE, null()), (SIDE, initial.as_ptr()), (ROWS, null()), (ROWS, initial.as_ptr())]
            {
                let square = |c: &mut Vec<f32>| Square {
                    c: c.as_mut_ptr(),
                    stride: 4 * PANEL,
                    from,
                    from_stride: 4 * PANEL,
                    next: null(),
                };
                let (mut c, mut of_pairs) = (vec![0.0; ROWS * PANEL], vec![0.0; ROWS * PANEL]);
                // SAFETY: the vectors are that long.
                unsafe {
                    match rows {
                        SIDE => tiles.product_16(a[0], expected.as_ptr(), BLOCKS, square(&mut of_pairs)),
                        _ => tiles.product_32(a, expected.as_ptr(), BLOCKS, square(&mut of_pairs)),
                    }
                }
                for passing in [false, true] {
                    let mut room = vec![0; if passing { PASSING } else { expected.len() }];
                    let pairs = if passing { Pairs::Passing(&mut room) } else { Pairs::Kept(&mut room) };
                    let to = square(&mut c);
                    let mut product = BlockProduct { a, format, panel: &panel, pairs, to };
                    // SAFETY: the vectors are that long.
                    unsafe { product.run(&tiles, rows) };
                    assert_eq!(c, of_pairs, "{format:?}, {rows} rows, passing: {passing}");
                    assert!(passing || room == expected, "{format:?}, {rows} rows");
                }
            }
        }
    }
}
