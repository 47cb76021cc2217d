//! Codes of 8 and 4 bits, and what they are counted in.

use half::f16;
use refrain_kernels::{Dtype, Slice};

/// The middle of values, and the step by which 127 codes to each side reach all of them.
pub(super) fn middle(values: &[f32]) -> (f16, f16) {
    let [low, high] = ends(values).map(|end| finite(end).to_f32());
    around(values, finite(low.midpoint(high)))
}

/// The step by which 127 codes to each side of `middle` reach all values.
pub(super) fn around(values: &[f32], middle: f16) -> (f16, f16) {
    let most = values.iter().fold(0.0_f32, |most, x| most.max((x - middle.to_f32()).abs()));
    (middle, finite(most / 127.0))
}

/// The code of a distance, in the step that the decoder will multiply by; a step of zero has no other code than zero.
pub(super) fn q8(x: f32, step: f32) -> u8 {
    let inverse = if step == 0.0 { 0.0 } else { 1.0 / step };
    (x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8 as u8
}

/// Minimum and step of 16 levels that reach the maximum.
pub(super) fn range(values: &[f32]) -> (f16, f16) {
    let [low, high] = ends(values);
    let low = finite(low);
    (low, finite((high - low.to_f32()) / 15.0))
}

pub(super) fn q4(x: f32, low: f32, step: f32) -> u8 {
    if step <= 0.0 {
        return 0;
    }
    ((x - low) / step).round_ties_even().clamp(0.0, 15.0) as u8
}

/// The least and the largest.
fn ends(values: &[f32]) -> [f32; 2] {
    values.iter().fold([f32::MAX, f32::MIN], |[low, high], x| [low.min(*x), high.max(*x)])
}

/// The nearest finite f16.
fn finite(x: f32) -> f16 {
    f16::from_f32(x.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()))
}

/// Two codes a byte, the first in the lower half.
pub(super) fn pack(codes: &[u8], out: &mut Vec<u8>) {
    out.extend(codes.chunks(2).map(|pair| pair[0] | pair.get(1).copied().unwrap_or(0) << 4));
}

/// Codes of rows of `row`, each from a byte on.
pub(super) fn unpack<'a>(bytes: &[u8], row: usize, codes: &'a mut [i8]) -> &'a [i8] {
    let rows = bytes.len() / row.div_ceil(2);
    for (bytes, codes) in bytes.chunks(row.div_ceil(2)).zip(codes.chunks_mut(row)) {
        let (pairs, last) = codes.as_chunks_mut::<2>();
        pairs.iter_mut().zip(bytes).for_each(|(pair, byte)| *pair = [(byte & 15) as i8, (byte >> 4) as i8]);
        if let ([last], Some(byte)) = (last, bytes.last()) {
            *last = (byte & 15) as i8;
        }
    }
    &codes[..rows * row]
}

/// The minima and the steps of pairs of both.
pub(super) fn split<'a>(pairs: &[f32], [low, step]: &'a mut [Vec<f32>; 2]) -> [&'a [f32]; 2] {
    let pairs = pairs.as_chunks::<2>().0;
    for ((pair, low), step) in pairs.iter().zip(low.iter_mut()).zip(step.iter_mut()) {
        [*low, *step] = *pair;
    }
    [&low[..pairs.len()], &step[..pairs.len()]]
}

pub(super) fn halves(bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; bytes.len() / 2];
    match Slice::from_bytes(Dtype::F16, bytes) {
        Ok(slice) => slice.to_f32(&mut out),
        Err(_) => {
            let each = bytes.as_chunks::<2>().0.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f32());
            out.iter_mut().zip(each).for_each(|(out, x)| *out = x);
        }
    }
    out
}
