//! Tile products of Intel's AMX: `bf16` pairs, summed in `f32`.
//!
//! The compiler knows the tile registers only as clobbers, so every product is one block of assembly: the
//! accumulators are loaded from memory and stored back. A tile is 16 rows of 64 bytes. Every tile instruction runs
//! between [`Tiles::configure`] and the drop of its result, on the same thread.

use std::arch::asm;
use std::arch::x86_64::*;
use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::transmute;

use super::avx512::Avx512;
use super::features::Amx;
use super::vector::Simd;

/// 32-bit words of a tile: 16 rows of 16 words.
pub(crate) const TILE: usize = 256;
/// Rows, columns and words of a row of a tile.
pub(crate) const SIDE: usize = 16;

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

/// Results of 32 × 32 and their initial values (null: zeros); strides are bytes from row to row.
#[derive(Clone, Copy)]
pub(crate) struct Square {
    pub(crate) c: *mut f32,
    pub(crate) stride: usize,
    pub(crate) from: *const f32,
    pub(crate) from_stride: usize,
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

    /// C (32 × 32) = initial values + A · B. `a`: two columns of tiles of A, one of 16 rows below the other, each
    /// `blocks` tiles in a row. `b`: `blocks` × 16 rows of 32 words.
    ///
    /// # Safety
    /// The pointers must be valid for that; only this thread may use C.
    #[inline(always)]
    pub(crate) unsafe fn product_32(&self, a: [*const u32; 2], b: *const u32, blocks: usize, to: Square) {
        let Square { c, stride, from, from_stride } = to;
        // SAFETY: the caller's.
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
                "tileloadd tmm6, [{b} + {s128}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b} + {s128}*1 + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{a1} + {s64}*1]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a0}, 1024",
                "add {a1}, 1024",
                "add {b}, 2048",
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

    /// C (16 × 32) = A · B for 16 rows of A, added to C if `add`. `a`: `blocks` tiles; `b`: as in [`Tiles::product_32`].
    ///
    /// # Safety
    /// As for [`Tiles::product_32`].
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

impl Amx {
    /// Rounds `src`, times `factor`, to `bf16` and writes it as row `r` of ⌈n / 32⌉ tiles, zeros at the end.
    ///
    /// # Panics
    /// If `dst` does not hold the tiles, or `r` is not a row of a tile.
    #[inline(always)]
    pub(crate) fn round_row(self, src: &[f32], factor: f32, dst: &mut [u32], r: usize) {
        assert!(r < SIDE && dst.len() >= src.len().div_ceil(2 * SIDE) * TILE, "the row lies in the tiles");
        // SAFETY: the token proves that the instructions are there; the assertion bounds the writes.
        unsafe { round_row(src.as_ptr(), src.len(), factor, dst.as_mut_ptr(), r) }
    }

    /// Mirrors a 16 × 16 square of words, the rows of a tile, about its diagonal; writes the rows `stride` words apart.
    ///
    /// # Panics
    /// If `src` or `dst` is shorter than that.
    #[inline(always)]
    pub(crate) fn transpose(self, src: &[u32], dst: &mut [u32], stride: usize) {
        assert!(src.len() >= TILE && dst.len() >= (SIDE - 1) * stride + SIDE, "both are a square of words");
        // SAFETY: the token proves that the instructions are there; the assertion bounds reads and writes.
        unsafe { transpose(self, src.as_ptr(), dst.as_mut_ptr(), stride) }
    }

    /// Rounds 16 numbers of each of two rows to `bf16` and writes them as 16 pairs, the first row's in the lower halves.
    ///
    /// # Panics
    /// If one of the slices is shorter than 16.
    #[inline(always)]
    pub(crate) fn round_pairs(self, first: &[f32], second: &[f32], dst: &mut [u32]) {
        assert!(first.len() >= SIDE && second.len() >= SIDE && dst.len() >= SIDE, "16 of each");
        // SAFETY: the token proves that the instructions are there; the assertion bounds reads and writes.
        unsafe { round_pairs(first.as_ptr(), second.as_ptr(), dst.as_mut_ptr()) }
    }
}

/// [`Amx::round_row`] of `n` numbers.
///
/// # Safety
/// `src` must be valid for `n` floats and `dst` for the tiles.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn round_row(src: *const f32, n: usize, factor: f32, dst: *mut u32, r: usize) {
    let factor = _mm512_set1_ps(factor);
    // SAFETY: the caller's; masked loads do not touch what is beyond `n`.
    unsafe {
        let mut i = 0;
        let mut to = dst.add(r * SIDE);
        while i < n {
            let left = n - i;
            let mask = |left: usize| if left >= SIDE { !0 } else { (1u16 << left) - 1 };
            let low = _mm512_maskz_loadu_ps(mask(left), src.add(i));
            let high = if left > SIDE {
                _mm512_maskz_loadu_ps(mask(left - SIDE), src.add(i + SIDE))
            } else {
                _mm512_setzero_ps()
            };
            let (low, high) = (_mm512_mul_ps(low, factor), _mm512_mul_ps(high, factor));
            let words = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
            _mm512_storeu_si512(to.cast(), words);
            to = to.add(TILE);
            i += 2 * SIDE;
        }
    }
}

/// [`Amx::transpose`].
///
/// # Safety
/// both must be valid for a tile.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn transpose(amx: Amx, src: *const u32, dst: *mut u32, stride: usize) {
    // SAFETY: the caller's; words are moved as they are.
    unsafe { Avx512::widening(amx.features()).transpose(src.cast(), SIDE, dst.cast(), stride, SIDE) }
}

/// [`Amx::round_pairs`].
///
/// # Safety
/// the pointers must be valid for 16 elements.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn round_pairs(first: *const f32, second: *const f32, dst: *mut u32) {
    // SAFETY: the caller's.
    unsafe {
        let (first, second) = (_mm512_loadu_ps(first), _mm512_loadu_ps(second));
        let words = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(second, first));
        // Lane 2i of the result is lane i of the lower half of the words, lane 2i + 1 of the upper half.
        let order: [u16; 32] = std::array::from_fn(|i| (i / 2 + i % 2 * 16) as u16);
        let order = _mm512_loadu_si512(order.as_ptr().cast());
        _mm512_storeu_si512(dst.cast(), _mm512_permutexvar_epi16(order, words));
    }
}

impl Tiles {
    /// Sᵀ (64 × 16) = K · Qᵀ. `k`: four rows of `blocks` tiles; `q`: `blocks` tiles; `s`: 64 rows of 16.
    ///
    /// # Safety
    /// The pointers must be valid for that.
    #[inline(always)]
    pub(crate) unsafe fn scores(&self, k: *const u32, q: *const u32, blocks: usize, s: *mut f32) {
        // SAFETY: the caller's.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "2:",
                "tileloadd tmm4, [{q} + {s64}*1]",
                "tileloadd tmm5, [{k} + {s64}*1]",
                "tdpbf16ps tmm0, tmm5, tmm4",
                "tileloadd tmm6, [{k1} + {s64}*1]",
                "tdpbf16ps tmm1, tmm6, tmm4",
                "tileloadd tmm7, [{k2} + {s64}*1]",
                "tdpbf16ps tmm2, tmm7, tmm4",
                "tileloadd tmm5, [{k3} + {s64}*1]",
                "tdpbf16ps tmm3, tmm5, tmm4",
                "add {q}, 1024",
                "add {k}, 1024",
                "add {k1}, 1024",
                "add {k2}, 1024",
                "add {k3}, 1024",
                "dec {n}",
                "jnz 2b",
                "tilestored [{c} + {s64}*1], tmm0",
                "tilestored [{c} + {s64}*1 + 1024], tmm1",
                "tilestored [{c} + {s64}*1 + 2048], tmm2",
                "tilestored [{c} + {s64}*1 + 3072], tmm3",
                k = inout(reg) k => _,
                k1 = inout(reg) k.add(blocks * TILE) => _,
                k2 = inout(reg) k.add(2 * blocks * TILE) => _,
                k3 = inout(reg) k.add(3 * blocks * TILE) => _,
                q = inout(reg) q => _,
                n = inout(reg) blocks => _,
                c = in(reg) s,
                s64 = in(reg) 64usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }

    /// Oᵀ (16 · `blocks` × 16) += Vᵀ · Pᵀ over 64 keys. `v`: two rows of `blocks` tiles, 32 keys each; `p`: two tiles.
    ///
    /// # Safety
    /// The pointers must be valid for that.
    #[inline(always)]
    pub(crate) unsafe fn values(&self, v: *const u32, p: *const u32, blocks: usize, o: *mut f32) {
        let mut done = 0;
        while done + 4 <= blocks {
            // SAFETY: the caller's.
            unsafe {
                asm!(
                    "tileloadd tmm4, [{p} + {s64}*1]",
                    "tileloadd tmm5, [{p} + {s64}*1 + 1024]",
                    "tileloadd tmm0, [{c} + {s64}*1]",
                    "tileloadd tmm6, [{v} + {s64}*1]",
                    "tdpbf16ps tmm0, tmm6, tmm4",
                    "tileloadd tmm1, [{c} + {s64}*1 + 1024]",
                    "tileloadd tmm7, [{v} + {s64}*1 + 1024]",
                    "tdpbf16ps tmm1, tmm7, tmm4",
                    "tileloadd tmm2, [{c} + {s64}*1 + 2048]",
                    "tileloadd tmm6, [{v} + {s64}*1 + 2048]",
                    "tdpbf16ps tmm2, tmm6, tmm4",
                    "tileloadd tmm3, [{c} + {s64}*1 + 3072]",
                    "tileloadd tmm7, [{v} + {s64}*1 + 3072]",
                    "tdpbf16ps tmm3, tmm7, tmm4",
                    "tileloadd tmm6, [{w} + {s64}*1]",
                    "tdpbf16ps tmm0, tmm6, tmm5",
                    "tileloadd tmm7, [{w} + {s64}*1 + 1024]",
                    "tdpbf16ps tmm1, tmm7, tmm5",
                    "tileloadd tmm6, [{w} + {s64}*1 + 2048]",
                    "tdpbf16ps tmm2, tmm6, tmm5",
                    "tileloadd tmm7, [{w} + {s64}*1 + 3072]",
                    "tdpbf16ps tmm3, tmm7, tmm5",
                    "tilestored [{c} + {s64}*1], tmm0",
                    "tilestored [{c} + {s64}*1 + 1024], tmm1",
                    "tilestored [{c} + {s64}*1 + 2048], tmm2",
                    "tilestored [{c} + {s64}*1 + 3072], tmm3",
                    v = in(reg) v.add(done * TILE),
                    w = in(reg) v.add((blocks + done) * TILE),
                    p = in(reg) p,
                    c = in(reg) o.add(done * TILE),
                    s64 = in(reg) 64usize,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
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
}
