//! Assembly that unpacks a block of weights to pairs of `bf16`, in parts between which something else may stand.
//!
//! Shape: 32 inputs and 32 outputs become 16 steps of 32 words. Bound: the two vector units, which carry out 13 operations for 32 weights, four of them the
//! conversion's: 4.7 cycles as measured.
//!
//! Bytes of q become floats as part of their bits: 0x43qq0000 is 128 + q for a q of up to seven bits, and 0x4700qq00 is 32,768 + q. A lane holds one weight and its neighbour the next input's of the same output, so that the conversion of two vectors
//! gives pairs in their order.
//!
//! Operands: `b` is the block, and its steps go to `write`. `p0` and `p1` are the [`bytes`] of the first two inputs of a word, for eight outputs each, `p2` and
//! `p3` those of the other two; `o0` and `o1` are the [`OUTPUTS`]; `zero`, `excess` and `byte` are of [`Floats`]; `s0`, `s1`, `m0`, `m1`, `v0` to `v3` and `w` are
//! changed. `ahead` are the bytes from a block to the one that is asked for. Blocks of four bits need the mask `nibbles`, and change `low`.

use super::format::BlockFormat;

/// Floats that have a byte of q among their bits.
pub(super) struct Floats {
    /// The float whose byte is 0. With a byte of q it is `zero + q`.
    pub(super) zero: f32,
    /// Index of the byte.
    pub(super) byte: usize,
    /// A float with a byte, times the scale, is too large by `excess` · scale, which the minimum makes up for: exactly for eight bits, and for four but
    /// for its rounding to `f32`, a 500th of the weight's to `bf16`.
    pub(super) excess: f32,
}

impl Floats {
    pub(super) const fn of(format: BlockFormat) -> Floats {
        match format {
            // Bytes are q + 128.
            BlockFormat::Q8 => Floats { zero: 32_768.0, byte: 1, excess: 32_768.0 + 128.0 },
            BlockFormat::Q4 => Floats { zero: 128.0, byte: 2, excess: 128.0 },
        }
    }
}

/// Lanes of two vectors, each with two inputs of eight outputs: the index of the output among 16.
pub(super) const OUTPUTS: [[u32; 16]; 2] = [
    [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7],
    [8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15],
];

/// The permutation that takes bytes of 16 words, each of four inputs of an output, to byte `byte` of the lanes of vector `half`: inputs 2 · `pair` and
/// 2 · `pair` + 1 of its outputs.
pub(super) const fn bytes(half: usize, pair: usize, byte: usize) -> [u8; 64] {
    let (mut bytes, mut lane) = ([0; 64], 0);
    while lane < 16 {
        bytes[4 * lane + byte] = (4 * OUTPUTS[half][lane] as usize + 2 * pair + lane % 2) as u8;
        lane += 1;
    }
    bytes
}

/// Assembly of the scales and minima of 16 outputs, `$i` of the two times 16.
macro_rules! head {
    ($i:literal, $minima:expr) => {
        concat!(
            "vcvtph2ps {v0}, ymmword ptr [{b} + 32*",
            $i,
            "]\n",
            $minima,
            "vfnmadd231ps {v1}, {v0}, {excess}\n",
            "vpermps {s0}, {o0}, {v0}\n",
            "vpermps {s1}, {o1}, {v0}\n",
            "vpermps {m0}, {o0}, {v1}\n",
            "vpermps {m1}, {o1}, {v1}\n",
        )
    };
}

/// Assembly that turns the bytes of `$q`, four inputs of 16 outputs, into pairs: those of quad `$t` of half `$i`.
macro_rules! pairs {
    ($q:literal, $t:literal, $i:literal) => {
        concat!(
            "vmovdqa64 {v0}, {zero}\n",
            "vmovdqa64 {v1}, {zero}\n",
            "vmovdqa64 {v2}, {zero}\n",
            "vmovdqa64 {v3}, {zero}\n",
            "vpermb {v0} {{{byte}}}, {p0}, ",
            $q,
            "\n",
            "vpermb {v1} {{{byte}}}, {p1}, ",
            $q,
            "\n",
            "vpermb {v2} {{{byte}}}, {p2}, ",
            $q,
            "\n",
            "vpermb {v3} {{{byte}}}, {p3}, ",
            $q,
            "\n",
            "vfmadd213ps {v0}, {s0}, {m0}\n",
            "vfmadd213ps {v1}, {s1}, {m1}\n",
            "vfmadd213ps {v2}, {s0}, {m0}\n",
            "vfmadd213ps {v3}, {s1}, {m1}\n",
            "vcvtne2ps2bf16 {v0}, {v1}, {v0}\n",
            "vcvtne2ps2bf16 {v2}, {v3}, {v2}\n",
            "vmovdqu64 [{write} + 256*",
            $t,
            " + 64*",
            $i,
            "], {v0}\n",
            "vmovdqu64 [{write} + 256*",
            $t,
            " + 64*",
            $i,
            " + 128], {v2}\n",
        )
    };
}

/// Assembly of quad `$t`, and of quad `$upper` in the upper halves of its bytes. The line of four blocks later is asked for: beside products of
/// 32 rows the processor's own reading ahead comes too late.
macro_rules! quads_q4 {
    ($t:literal, $upper:literal, $i:literal) => {
        concat!(
            "vmovdqu64 {w}, [{b} + 128 + 128*",
            $t,
            " + 64*",
            $i,
            "]\n",
            "prefetcht0 [{b} + {ahead} + 128 + 128*",
            $t,
            " + 64*",
            $i,
            "]\n",
            "vpandd {low}, {w}, {nibbles}\n",
            "vpsrld {w}, {w}, 4\n",
            "vpandd {w}, {w}, {nibbles}\n",
            pairs!("{low}", $t, $i),
            pairs!("{w}", $upper, $i),
        )
    };
}

/// Assembly of quad `$t`, which asks ahead as [`quads_q4`] does.
macro_rules! quad_q8 {
    ($t:literal, $i:literal) => {
        concat!(
            "vmovdqu64 {w}, [{b} + 64 + 128*",
            $t,
            " + 64*",
            $i,
            "]\n",
            "prefetcht0 [{b} + {ahead} + 64 + 128*",
            $t,
            " + 64*",
            $i,
            "]\n",
            pairs!("{w}", $t, $i)
        )
    };
}

/// Assembly that unpacks half `$i` of a block; something comes before each quarter.
macro_rules! half_q4 {
    ($i:literal, $a0:expr, $a1:expr, $a2:expr, $a3:expr) => {
        concat!(
            head!($i, concat!("vcvtph2ps {v1}, ymmword ptr [{b} + 64 + 32*", $i, "]\n")),
            $a0,
            quads_q4!(0, 4, $i),
            $a1,
            quads_q4!(1, 5, $i),
            $a2,
            quads_q4!(2, 6, $i),
            $a3,
            quads_q4!(3, 7, $i),
        )
    };
}

/// Assembly as of [`half_q4`], for a block of eight bits.
macro_rules! half_q8 {
    ($i:literal, $a0:expr, $a1:expr, $a2:expr, $a3:expr) => {
        concat!(
            head!($i, "vpxord {v1}, {v1}, {v1}\n"),
            $a0,
            quad_q8!(0, $i),
            quad_q8!(1, $i),
            $a1,
            quad_q8!(2, $i),
            quad_q8!(3, $i),
            $a2,
            quad_q8!(4, $i),
            quad_q8!(5, $i),
            $a3,
            quad_q8!(6, $i),
            quad_q8!(7, $i),
        )
    };
}

pub(super) use {half_q4, half_q8, head, pairs, quad_q8, quads_q4};
