//! Products of attention by the tiles of AMX, with the softmax of another tile computed between them.
//!
//! Both functions run on a thread whose tile registers are configured ([`Tiles`](super::amx::Tiles)).

use std::arch::asm;

use super::pair_tiles::{Scores, TILE, Values};
use super::tile_weights::{LOWER, TileWeights};

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
    ($a0:expr, $a1:expr, $a2:expr, $a3:expr) => {
        concat!(
            "tileloadd tmm4, [{q} + {s64}*1]\n",
            "tileloadd tmm5, [{k} + {s64}*1]\n",
            "tdpbf16ps tmm0, tmm5, tmm4\n",
            $a0,
            "tileloadd tmm6, [{k1} + {s64}*1]\n",
            "tdpbf16ps tmm1, tmm6, tmm4\n",
            $a1,
            "tileloadd tmm7, [{k2} + {s64}*1]\n",
            "tdpbf16ps tmm2, tmm7, tmm4\n",
            $a2,
            "tileloadd tmm5, [{k3} + {s64}*1]\n",
            "tdpbf16ps tmm3, tmm5, tmm4\n",
            $a3,
            "add {q}, 1024\n",
            "add {k}, 1024\n",
            "add {k1}, 1024\n",
            "add {k2}, 1024\n",
            "add {k3}, 1024\n",
        )
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

/// [`PairUnit::scores`](super::pair_tiles::PairUnit::scores) by tiles, four steps beside each of the first blocks.
///
/// # Safety
/// The pointers must be valid for the tiles that they stand for, and the steps may not touch the scores.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
pub(super) unsafe fn scores(of: Scores, beside: &mut TileWeights) {
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

/// [`PairUnit::values`](super::pair_tiles::PairUnit::values) by tiles, eight steps beside each four blocks.
///
/// # Safety
/// The pointers must be valid for the tiles that they stand for, and the steps may not touch the values and weights.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
pub(super) unsafe fn values(of: Values, beside: &mut TileWeights) {
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
