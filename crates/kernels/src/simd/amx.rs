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

use super::features::{Amx, Features};
use super::pair_tiles::{PairTiles, PairUnit, SIDE, Scores, Square, TILE, Values};
use super::tile_weights::{LOWER, TileWeights};

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

    /// C (16 × 32) = A · B for 16 rows of A, added to C if `add`. `a`: `blocks` tiles; `b`: as in [`PairUnit::product_32`].
    ///
    /// # Safety
    /// As for [`PairUnit::product_32`].
    #[inline(always)]
    pub(crate) unsafe fn product_16(
        &self,
        a: *const u32,
        b: *const u32,
        blocks: usize,
        c: *mut f32,
        stride: usize,
        add: bool,
    ) {
        // SAFETY: the caller's.
        unsafe {
            asm!(
                "test {add:e}, {add:e}",
                "jnz 3f",
                "tilezero tmm0",
                "tilezero tmm1",
                "jmp 2f",
                "3:",
                "tileloadd tmm0, [{c} + {cs}*1]",
                "tileloadd tmm1, [{c} + {cs}*1 + 64]",
                "2:",
                "tileloadd tmm4, [{a} + {s64}*1]",
                "tileloadd tmm6, [{b} + {s128}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b} + {s128}*1 + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "add {a}, 1024",
                "add {b}, 2048",
                "dec {n}",
                "jnz 2b",
                "tilestored [{c} + {cs}*1], tmm0",
                "tilestored [{c} + {cs}*1 + 64], tmm1",
                a = inout(reg) a => _,
                b = inout(reg) b => _,
                n = inout(reg) blocks => _,
                c = in(reg) c,
                cs = in(reg) stride,
                s64 = in(reg) 64usize,
                s128 = in(reg) 128usize,
                add = in(reg) u32::from(add),
                out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
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

/// Assembly of step `$i` of weights, as [`TileWeights::step`] computes it. Where a step stands after each product, vector units compute it
/// while the tiles' one multiplies: a product is on its way for sixteen cycles and a step for fourteen, and later instructions than some two
/// hundred do not begin before the product ends.
macro_rules! step {
    ($i:literal) => {
        concat!(
            "vaddps {t0}, {start}, [{s} + 256*",
            $i,
            "]\n",
            "vaddps {t1}, {start}, [{s} + 256*",
            $i,
            " + 64]\n",
            "vaddps {t2}, {start}, [{s} + 256*",
            $i,
            " + 128]\n",
            "vaddps {t3}, {start}, [{s} + 256*",
            $i,
            " + 192]\n",
            "vcvtps2dq {t0}, {t0}\n",
            "vcvtps2dq {t1}, {t1}\n",
            "vcvtps2dq {t2}, {t2}\n",
            "vcvtps2dq {t3}, {t3}\n",
            "vpackusdw {t0}, {t0}, {t1}\n",
            "vpackusdw {t2}, {t2}, {t3}\n",
            "vpshufb {t0}, {t0}, {interleaved}\n",
            "vpshufb {t2}, {t2}, {interleaved}\n",
            "vpsrlw {t1}, {t0}, 2\n",
            "vpsrlw {t3}, {t2}, 2\n",
            "vpermb {t1} {{{lower}}} {{z}}, {t1}, {differences}\n",
            "vpermb {t3} {{{lower}}} {{z}}, {t3}, {differences}\n",
            "vpsubw {t0}, {t0}, {t1}\n",
            "vpsubw {t2}, {t2}, {t3}\n",
            "vpsrlw {t0}, {t0}, 1\n",
            "vpsrlw {t2}, {t2}, 1\n",
            "vmovdqu64 [{p} + 128*",
            $i,
            "], {t0}\n",
            "vmovdqu64 [{p} + 128*",
            $i,
            " + 64], {t2}\n",
            "vdpbf16ps {sum0}, {t0}, {ones}\n",
            "vdpbf16ps {sum1}, {t2}, {ones}\n",
        )
    };
}

/// Assembly with steps of `$beside`, and the stores of the registers 0 to 3 to four tiles from `$c` on. One block of assembly, since products
/// keep nothing in registers from block to block.
macro_rules! beside_weights {
    ([$($assembly:expr),* $(,)?], $beside:expr, c = $c:expr, $($operands:tt)*) => {
        asm!(
            $($assembly,)*
            "tilestored [{c} + {s64}*1], tmm0",
            "tilestored [{c} + {s64}*1 + 1024], tmm1",
            "tilestored [{c} + {s64}*1 + 2048], tmm2",
            "tilestored [{c} + {s64}*1 + 3072], tmm3",
            $($operands)*,
            s = inout(reg) $beside.s,
            p = inout(reg) $beside.p,
            c = in(reg) $c,
            s64 = in(reg) 64usize,
            start = in(zmm_reg) $beside.start,
            differences = in(zmm_reg) $beside.differences,
            interleaved = in(zmm_reg) $beside.interleaved,
            ones = in(zmm_reg) $beside.ones,
            lower = in(kreg) LOWER,
            sum0 = inout(zmm_reg) $beside.sums[0],
            sum1 = inout(zmm_reg) $beside.sums[1],
            t0 = out(zmm_reg) _,
            t1 = out(zmm_reg) _,
            t2 = out(zmm_reg) _,
            t3 = out(zmm_reg) _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

/// Assembly of the products of a block of elements with four strips of keys; something comes after each.
macro_rules! four_strips {
    ($($after:expr),*) => {
        concat!(
            "tileloadd tmm4, [{q} + {s64}*1]\n",
            "tileloadd tmm5, [{k} + {s64}*1]\n",
            four_strips!(@ "tdpbf16ps tmm0, tmm5, tmm4\n", "tileloadd tmm6, [{k1} + {s64}*1]\n",
                "tdpbf16ps tmm1, tmm6, tmm4\n", "tileloadd tmm7, [{k2} + {s64}*1]\n",
                "tdpbf16ps tmm2, tmm7, tmm4\n", "tileloadd tmm5, [{k3} + {s64}*1]\n",
                "tdpbf16ps tmm3, tmm5, tmm4\n"; $($after),*),
            "add {q}, 1024\n",
            "add {k}, 1024\n",
            "add {k1}, 1024\n",
            "add {k2}, 1024\n",
            "add {k3}, 1024\n",
        )
    };
    (@ $p0:literal, $l1:literal, $p1:literal, $l2:literal, $p2:literal, $l3:literal, $p3:literal; $a0:expr, $a1:expr, $a2:expr, $a3:expr) => {
        concat!($p0, $a0, $l1, $p1, $a1, $l2, $p2, $a2, $l3, $p3, $a3)
    };
}

/// Assembly of the products of four blocks of values with the weights of 64 keys; something comes after each.
macro_rules! four_blocks {
    ($a0:expr, $a1:expr, $a2:expr, $a3:expr, $a4:expr, $a5:expr, $a6:expr, $a7:expr) => {
        concat!(
            "tileloadd tmm4, [{pairs} + {s64}*1]\n",
            "tileloadd tmm5, [{pairs} + {s64}*1 + 1024]\n",
            "tileloadd tmm0, [{c} + {s64}*1]\n",
            "tileloadd tmm6, [{v} + {s64}*1]\n",
            "tdpbf16ps tmm0, tmm6, tmm4\n",
            $a0,
            "tileloadd tmm1, [{c} + {s64}*1 + 1024]\n",
            "tileloadd tmm7, [{v} + {s64}*1 + 1024]\n",
            "tdpbf16ps tmm1, tmm7, tmm4\n",
            $a1,
            "tileloadd tmm2, [{c} + {s64}*1 + 2048]\n",
            "tileloadd tmm6, [{v} + {s64}*1 + 2048]\n",
            "tdpbf16ps tmm2, tmm6, tmm4\n",
            $a2,
            "tileloadd tmm3, [{c} + {s64}*1 + 3072]\n",
            "tileloadd tmm7, [{v} + {s64}*1 + 3072]\n",
            "tdpbf16ps tmm3, tmm7, tmm4\n",
            $a3,
            "tileloadd tmm6, [{w} + {s64}*1]\n",
            "tdpbf16ps tmm0, tmm6, tmm5\n",
            $a4,
            "tileloadd tmm7, [{w} + {s64}*1 + 1024]\n",
            "tdpbf16ps tmm1, tmm7, tmm5\n",
            $a5,
            "tileloadd tmm6, [{w} + {s64}*1 + 2048]\n",
            "tdpbf16ps tmm2, tmm6, tmm5\n",
            $a6,
            "tileloadd tmm7, [{w} + {s64}*1 + 3072]\n",
            "tdpbf16ps tmm3, tmm7, tmm5\n",
            $a7,
        )
    };
}

impl PairUnit for Tiles {
    #[inline(always)]
    unsafe fn product_32(&self, a: [*const u32; 2], b: *const u32, blocks: usize, to: Square) {
        let Square { c, stride, from, from_stride, next } = to;
        // B comes from the second-level cache, and goes through the first (`tileloaddt1`) without driving A out of it.
        // SAFETY: the caller's; asking for memory ahead faults at no address.
        unsafe {
            asm!(
                "test {f}, {f}",
                "jnz 3f",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "jmp 2f",
                "3:",
                "tileloadd tmm0, [{f} + {fs}*1]",
                "tileloadd tmm1, [{f} + {fs}*1 + 64]",
                "tileloadd tmm2, [{g} + {fs}*1]",
                "tileloadd tmm3, [{g} + {fs}*1 + 64]",
                "2:",
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
                "tilestored [{c} + {cs}*1], tmm0",
                "tilestored [{c} + {cs}*1 + 64], tmm1",
                "tilestored [{d} + {cs}*1], tmm2",
                "tilestored [{d} + {cs}*1 + 64], tmm3",
                a0 = inout(reg) a[0] => _,
                a1 = inout(reg) a[1] => _,
                b = inout(reg) b => _,
                n = inout(reg) blocks => _,
                next = inout(reg) next => _,
                c = in(reg) c,
                d = in(reg) c.wrapping_byte_add(SIDE * stride),
                cs = in(reg) stride,
                f = in(reg) from,
                g = in(reg) from.wrapping_byte_add(SIDE * from_stride),
                fs = in(reg) from_stride,
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
        unsafe { scores(of, beside) }
    }

    #[inline(always)]
    unsafe fn values(&self, of: Values, beside: &mut TileWeights) {
        // SAFETY: the caller's; AVX-512 with BF16 and VBMI comes with the tiles.
        unsafe { values(of, beside) }
    }
}

/// [`PairUnit::scores`] by tiles, four steps beside each of the first blocks.
///
/// # Safety
/// As for [`PairUnit::scores`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
unsafe fn scores(of: Scores, beside: &mut TileWeights) {
    let Scores { k, q, blocks, s, .. } = of;
    let with_steps = beside.take(4, blocks.min(beside.beside_scores / 4));
    // SAFETY: the caller's.
    unsafe {
        beside_weights!(
            [
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "test {m}, {m}",
                "jz 3f",
                "2:",
                four_strips!(step!(0), step!(1), step!(2), step!(3)),
                "add {s}, 1024",
                "add {p}, 512",
                "dec {m}",
                "jnz 2b",
                "3:",
                "test {n}, {n}",
                "jz 5f",
                "4:",
                four_strips!("", "", "", ""),
                "dec {n}",
                "jnz 4b",
                "5:",
            ],
            beside,
            c = s,
            k = inout(reg) k => _,
            k1 = inout(reg) k.add(blocks * TILE) => _,
            k2 = inout(reg) k.add(2 * blocks * TILE) => _,
            k3 = inout(reg) k.add(3 * blocks * TILE) => _,
            q = inout(reg) q => _,
            m = inout(reg) with_steps => _,
            n = inout(reg) blocks - with_steps => _
        );
    }
}

/// [`PairUnit::values`] by tiles, eight steps beside each four blocks.
///
/// # Safety
/// As for [`PairUnit::values`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
unsafe fn values(of: Values, beside: &mut TileWeights) {
    let Values { v, p, blocks, o, .. } = of;
    let mut done = 0;
    while done + 4 <= blocks {
        let with_steps = beside.take(8, 1);
        // SAFETY: the caller's.
        unsafe {
            beside_weights!(
                [
                    "test {m}, {m}",
                    "jz 2f",
                    four_blocks!(
                        step!(0),
                        step!(1),
                        step!(2),
                        step!(3),
                        step!(4),
                        step!(5),
                        step!(6),
                        step!(7)
                    ),
                    "add {s}, 2048",
                    "add {p}, 1024",
                    "jmp 3f",
                    "2:",
                    four_blocks!("", "", "", "", "", "", "", ""),
                    "3:",
                ],
                beside,
                c = o.add(done * TILE),
                v = in(reg) v.add(done * TILE),
                w = in(reg) v.add((blocks + done) * TILE),
                pairs = in(reg) p,
                m = in(reg) with_steps
            );
        }
        done += 4;
    }
    for block in done..blocks {
        // SAFETY: the caller's.
        unsafe {
            asm!(
                "tileloadd tmm4, [{p} + {s64}*1]",
                "tileloadd tmm5, [{p} + {s64}*1 + 1024]",
                "tileloadd tmm0, [{c} + {s64}*1]",
                "tileloadd tmm6, [{v} + {s64}*1]",
                "tdpbf16ps tmm0, tmm6, tmm4",
                "tileloadd tmm6, [{w} + {s64}*1]",
                "tdpbf16ps tmm0, tmm6, tmm5",
                "tilestored [{c} + {s64}*1], tmm0",
                v = in(reg) v.add(block * TILE),
                w = in(reg) v.add((blocks + block) * TILE),
                p = in(reg) p,
                c = in(reg) o.add(block * TILE),
                s64 = in(reg) 64usize,
                out("tmm0") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
                options(nostack),
            );
        }
    }
}
