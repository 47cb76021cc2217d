//! Tile products of Intel's AMX: `bf16` pairs, summed in `f32`.
//!
//! Bound: a product of two tiles begins every 16 cycles, and as it was measured, of operands that are loaded beside it, every 18 to 20. A tile
//! is loaded from the first-level cache in 8 cycles, from the second in 21. Its stores take 15, in which the core begins nothing else, so that
//! results stay in registers as long as they can. A product of 32 × 32 results reaches 83 % of the bound from the first-level cache, and 60 to 64 %
//! where the weights come from the second and each part of a sum has 512 inputs or more.
//!
//! The compiler knows the tile registers only as clobbers, so every product is one block of assembly: the
//! accumulators are loaded from memory and stored back. A tile is 16 rows of 64 bytes. Every tile instruction runs
//! between [`Tiles::configure`] and the drop of its result, on the same thread.

use std::arch::asm;
use std::cell::Cell;
use std::marker::PhantomData;

use super::amx_attention;
use super::features::{Amx, Features};
use super::pair_tiles::{PairTiles, PairUnit, SIDE, Scores, Square, Values};
use super::tile_weights::TileWeights;

/// Assembly of initial values: `$load`, or zeros where there are none at `f`. Changes `f`; ends at label 2.
macro_rules! initial {
    ($load:expr) => {
        concat!(
            "test {f}, {f}\njnz 3f\n",
            "tilezero tmm0\ntilezero tmm1\ntilezero tmm2\ntilezero tmm3\njmp 2f\n",
            "3:\n",
            $load,
            "2:\n",
        )
    };
}

/// Assembly that loads the initial values of 16 × 32 sums from `f`, whose rows lie `fs` bytes apart.
macro_rules! load_16 {
    () => {
        "tileloadd tmm0, [{f} + {fs}*1]\ntileloadd tmm1, [{f} + {fs}*1 + 64]\n"
    };
}

/// [`load_16`] for 32 × 32 sums.
macro_rules! load_32 {
    () => {
        concat!(
            $crate::simd::amx::load_16!(),
            "shl {fs}, 4\nadd {f}, {fs}\nshr {fs}, 4\n",
            "tileloadd tmm2, [{f} + {fs}*1]\ntileloadd tmm3, [{f} + {fs}*1 + 64]\n",
        )
    };
}

/// Assembly that stores 16 × 32 sums to `c`, whose rows lie `cs` bytes apart.
macro_rules! store_16 {
    () => {
        "tilestored [{c} + {cs}*1], tmm0\ntilestored [{c} + {cs}*1 + 64], tmm1\n"
    };
}

/// [`store_16`] for 32 × 32 sums. Changes `c`.
macro_rules! store_32 {
    () => {
        concat!(
            $crate::simd::amx::store_16!(),
            "shl {cs}, 4\nadd {c}, {cs}\nshr {cs}, 4\n",
            "tilestored [{c} + {cs}*1], tmm2\ntilestored [{c} + {cs}*1 + 64], tmm3\n",
        )
    };
}

pub(crate) use {initial, load_16, load_32, store_16, store_32};

thread_local! {
    /// How many [`Tiles`] of this thread are alive: the last one releases the registers.
    static CONFIGURED: Cell<usize> = const { Cell::new(0) };
}

/// The configured tile registers of this thread, all 16 rows of 64 bytes. Not `Send`: another thread's registers are
/// not configured.
pub(crate) struct Tiles(PhantomData<*mut ()>);

#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Tiles {
    /// Configures the registers. Products keep nothing in them from call to call, so that configuring them again does
    /// no harm.
    pub(crate) fn configure(_: Amx) -> Tiles {
        let mut c =
            Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        c.row_bytes[..8].fill(64);
        c.rows[..8].fill(SIDE as u8);
        // SAFETY: the token proves that the instruction is there; `c` is a valid configuration.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &c, options(nostack, readonly)) };
        CONFIGURED.set(CONFIGURED.get() + 1);
        Tiles(PhantomData)
    }

    /// C (16 × 32) = initial values + A · B for 16 rows of A. `a`: `blocks` tiles; `b`: as in [`PairUnit::product_32`].
    ///
    /// # Safety
    /// As for [`PairUnit::product_32`].
    #[inline(always)]
    pub(crate) unsafe fn product_16(&self, a: *const u32, b: *const u32, blocks: usize, to: Square) {
        let Square { c, stride, from, from_stride, .. } = to;
        // SAFETY: the caller's.
        unsafe {
            asm!(
                initial!(load_16!()),
                "tileloadd tmm4, [{a} + {s64}*1]",
                "tileloadd tmm6, [{b} + {s128}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b} + {s128}*1 + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "add {a}, 1024",
                "add {b}, 2048",
                "dec {n}",
                "jnz 2b",
                store_16!(),
                a = inout(reg) a => _,
                b = inout(reg) b => _,
                n = inout(reg) blocks => _,
                c = in(reg) c,
                cs = in(reg) stride,
                f = in(reg) from,
                fs = in(reg) from_stride,
                s64 = in(reg) 64usize,
                s128 = in(reg) 128usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        CONFIGURED.set(CONFIGURED.get() - 1);
        if CONFIGURED.get() == 0 {
            // SAFETY: the registers were configured on this thread: `Tiles` is made by `configure` and is not `Send`.
            unsafe { asm!("tilerelease", options(nostack, nomem)) };
        }
    }
}

// SAFETY: the token of AMX proves AVX-512 BF16, too.
unsafe impl PairTiles for Amx {
    type Unit = Tiles;

    const ELEMENTS_FIRST: bool = true;

    fn features(self) -> Features {
        Amx::features(self)
    }

    fn unit(self) -> Tiles {
        Tiles::configure(self)
    }
}

impl PairUnit for Tiles {
    #[inline(always)]
    unsafe fn product_32(&self, a: [*const u32; 2], b: *const u32, blocks: usize, to: Square) {
        let Square { c, stride, from, from_stride, next } = to;
        // B comes from the second-level cache, and goes through the first (`tileloaddt1`) without driving A out of it.
        // SAFETY: the caller's; asking for memory ahead faults at no address.
        unsafe {
            asm!(
                initial!(load_32!()),
                "tileloadd tmm4, [{a0} + {s64}*1]",
                "tileloaddt1 tmm6, [{b} + {s128}*1]",
                "prefetchw [{next}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloaddt1 tmm7, [{b} + {s128}*1 + 64]",
                "prefetchw [{next} + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{a1} + {s64}*1]",
                "prefetchw [{next} + {cs}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "prefetchw [{next} + {cs} + 64]",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a0}, 1024",
                "add {a1}, 1024",
                "add {b}, 2048",
                "lea {next}, [{next} + {cs}*2]",
                "dec {n}",
                "jnz 2b",
                store_32!(),
                a0 = inout(reg) a[0] => _,
                a1 = inout(reg) a[1] => _,
                b = inout(reg) b => _,
                n = inout(reg) blocks => _,
                next = inout(reg) next => _,
                c = inout(reg) c => _,
                cs = inout(reg) stride => _,
                f = inout(reg) from => _,
                fs = inout(reg) from_stride => _,
                s64 = in(reg) 64usize,
                s128 = in(reg) 128usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }

    #[inline(always)]
    unsafe fn scores(&self, of: Scores, beside: &mut TileWeights) {
        // SAFETY: the caller's; AVX-512 with BF16 and VBMI comes with the tiles.
        unsafe { amx_attention::scores(of, beside) }
    }

    #[inline(always)]
    unsafe fn values(&self, of: Values, beside: &mut TileWeights) {
        // SAFETY: the caller's; AVX-512 with BF16 and VBMI comes with the tiles.
        unsafe { amx_attention::values(of, beside) }
    }
}
