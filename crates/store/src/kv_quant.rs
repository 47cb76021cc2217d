//! Keys and values at rest: as computed, or in fewer bits.
//!
//! A layer at rest is a few tensors one after the other, its parts. Each covers a run of tokens, in groups of one or more,
//! so that the bytes of some tokens can be found without the others.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use half::f16;
use refrain_kernels::{Buffer, Dtype, Slice};
use safetensors::tensor::Dtype as Stored;

use crate::header::stored_as;

/// Tokens that share the range of a channel of keys in [`KvQuantization::Q4`] (KIVI's group size).
pub(crate) const GROUP: usize = 32;
/// Channels that share the range of a token's values in [`KvQuantization::Q4`].
const CHANNELS: usize = 32;
/// The last tokens that [`KvQuantization::Q4`] leaves as computed, besides those that fill no group (KIVI's residual window).
const RESIDUAL: usize = 32;

/// How keys and values lie at rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KvQuantization {
    /// As computed.
    #[default]
    Exact,
    /// 8 bits an element and an f16 scale a token and head: `round(x / s)` with `s = max |x| / 127`.
    Q8,
    /// 4 bits an element with an f16 minimum and step: keys by channel over 32 tokens, values by token over 32 channels.
    /// The last 32 to 63 tokens are as computed (KIVI, arXiv 2402.02750, §3.3).
    Q4,
}

impl KvQuantization {
    /// All of them.
    pub const ALL: [KvQuantization; 3] = [KvQuantization::Exact, KvQuantization::Q8, KvQuantization::Q4];

    /// The name that [`FromStr`] reads: `exact`, `q8` or `q4`.
    pub fn name(self) -> &'static str {
        match self {
            KvQuantization::Exact => "exact",
            KvQuantization::Q8 => "q8",
            KvQuantization::Q4 => "q4",
        }
    }

    pub(crate) fn tag(self) -> u8 {
        match self {
            KvQuantization::Exact => 0,
            KvQuantization::Q8 => 1,
            KvQuantization::Q4 => 2,
        }
    }
}

impl fmt::Display for KvQuantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is none of `exact`, `q8` and `q4`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown quantization {0:?}: use exact, q8 or q4")]
#[non_exhaustive]
pub struct UnknownKvQuantization(pub String);

impl FromStr for KvQuantization {
    type Err = UnknownKvQuantization;

    fn from_str(s: &str) -> Result<KvQuantization, UnknownKvQuantization> {
        let known = KvQuantization::ALL.into_iter().find(|quantization| quantization.name() == s);
        known.ok_or_else(|| UnknownKvQuantization(s.to_owned()))
    }
}

/// One tensor of a layer at rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Its name after the layer's.
    pub(crate) name: &'static str,
    pub(crate) dtype: Stored,
    pub(crate) shape: Vec<usize>,
    /// Tokens that it covers.
    tokens: Range<usize>,
    /// Tokens of a group, and bytes of one.
    group: usize,
    stride: usize,
    /// Where it begins in the layer, in bytes.
    pub(crate) start: usize,
}

impl Part {
    /// Bytes of it.
    pub(crate) fn bytes(&self) -> usize {
        self.tokens.len().div_ceil(self.group) * self.stride
    }

    /// Where the groups of some tokens lie in the layer, in bytes.
    pub(crate) fn place(&self, tokens: &Range<usize>) -> Range<usize> {
        let clip = |token: usize| token.clamp(self.tokens.start, self.tokens.end) - self.tokens.start;
        let (start, end) = (clip(tokens.start) / self.group, clip(tokens.end).div_ceil(self.group));
        self.start + start * self.stride..self.start + end.max(start) * self.stride
    }
}

/// Segments of a layer of some tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    quantization: KvQuantization,
    dtype: Dtype,
    heads: usize,
    head_dim: usize,
    tokens: usize,
    pub(crate) parts: Vec<Part>,
    /// Bytes of a layer at rest.
    pub(crate) layer: usize,
}

/// Tokens of `tokens` that [`KvQuantization::Q4`] encodes.
fn encoded(quantization: KvQuantization, tokens: usize) -> usize {
    match quantization {
        KvQuantization::Q4 => tokens.saturating_sub(RESIDUAL) / GROUP * GROUP,
        KvQuantization::Exact | KvQuantization::Q8 => tokens,
    }
}

impl Layout {
    /// Of a layer with this many tokens, all sizes at least 1; none if it exceeds the address space.
    pub(crate) fn new(
        quantization: KvQuantization,
        dtype: Dtype,
        (heads, head_dim): (usize, usize),
        tokens: usize,
    ) -> Option<Layout> {
        // The largest there can be: nothing below overflows if this does not.
        let elements = heads.checked_mul(head_dim)?.checked_mul(tokens)?;
        elements.checked_mul(64).filter(|bytes| *bytes < isize::MAX as usize)?;
        Some(Layout::of(quantization, dtype, (heads, head_dim), (encoded(quantization, tokens), tokens)))
    }

    /// The same where the first `encoded` of the tokens are so.
    fn of(
        quantization: KvQuantization,
        dtype: Dtype,
        (heads, head_dim): (usize, usize),
        (encoded, tokens): (usize, usize),
    ) -> Layout {
        let mut parts: Vec<Part> = Vec::new();
        let mut push = |name, dtype: Stored, tokens: Range<usize>, group: usize, inner: &[usize], size| {
            let start = parts.last().map_or(0, |last| last.start + last.bytes());
            let stride = inner.iter().product::<usize>() * size;
            let shape = [&[tokens.len().div_ceil(group)], inner].concat();
            parts.push(Part { name, dtype, shape, tokens, group, stride, start });
        };
        let (stored, size) = (stored_as(dtype), dtype.size());
        let row = heads * head_dim;
        match quantization {
            KvQuantization::Exact => {
                push("k", stored, 0..tokens, 1, &[heads, head_dim], size);
                push("v", stored, 0..tokens, 1, &[heads, head_dim], size);
            }
            KvQuantization::Q8 => {
                for [codes, scale] in [["k.q8", "k.scale"], ["v.q8", "v.scale"]] {
                    push(scale, Stored::F16, 0..tokens, 1, &[heads], 2);
                    push(codes, Stored::I8, 0..tokens, 1, &[heads, head_dim], 1);
                }
            }
            KvQuantization::Q4 => {
                let (head, rest) = (0..encoded, encoded..tokens);
                let groups = head_dim.div_ceil(CHANNELS);
                push("k.rest", stored, rest.clone(), 1, &[heads, head_dim], size);
                push("v.rest", stored, rest, 1, &[heads, head_dim], size);
                push("k.range", Stored::F16, head.clone(), GROUP, &[heads, head_dim, 2], 2);
                push("v.range", Stored::F16, head.clone(), 1, &[heads, groups, 2], 2);
                push("k.q4", Stored::U8, head.clone(), 1, &[row.div_ceil(2)], 1);
                push("v.q4", Stored::U8, head, 1, &[row.div_ceil(2)], 1);
            }
        }
        let layer = parts.last().map_or(0, |last| last.start + last.bytes());
        Layout { quantization, dtype, heads, head_dim, tokens, parts, layer }
    }

    /// Of a layer that has only the tokens `runs` of this one, one run after the other. Runs begin at multiples of [`GROUP`].
    pub(crate) fn only(&self, runs: &[Range<usize>]) -> Layout {
        let bound = encoded(self.quantization, self.tokens);
        let encoded = runs.iter().map(|run| run.end.min(bound).saturating_sub(run.start)).sum();
        let tokens = runs.iter().map(Range::len).sum();
        Layout::of(self.quantization, self.dtype, (self.heads, self.head_dim), (encoded, tokens))
    }

    pub(crate) fn is_exact(&self) -> bool {
        self.quantization == KvQuantization::Exact
    }

    /// Bytes of the keys of a token as computed, and of its values.
    pub(crate) fn row(&self) -> usize {
        self.heads * self.head_dim * self.dtype.size()
    }

    /// Where the tokens `runs` of a layer lie in it: by part, by run.
    pub(crate) fn places(&self, runs: &[Range<usize>]) -> impl Iterator<Item = Range<usize>> {
        let places = self.parts.iter().flat_map(|part| runs.iter().map(|run| part.place(run)));
        places.filter(|place| !place.is_empty())
    }

    /// The bytes at rest of the keys and values of a layer, each tokens × heads × head size, in parts that follow each other.
    pub(crate) fn encode<'a>(&self, k: Slice<'a>, v: Slice<'a>) -> Vec<Cow<'a, [u8]>> {
        let mut out = Vec::with_capacity(self.layer);
        let (tokens, row) = (self.tokens, self.heads * self.head_dim);
        match self.quantization {
            KvQuantization::Exact => return [k, v].map(|x| Cow::Borrowed(x.as_bytes())).into(),
            KvQuantization::Q8 => {
                for x in [k, v] {
                    let (mut scales, mut codes) = (Vec::new(), Vec::with_capacity(tokens * row));
                    for_rows(x, self.head_dim, |head| q8(head, &mut scales, &mut codes));
                    out.extend(scales.iter().flat_map(|scale| scale.to_le_bytes()));
                    out.extend(codes.iter().map(|code| *code as u8));
                }
            }
            KvQuantization::Q4 => {
                let bound = encoded(self.quantization, tokens);
                for x in [k, v] {
                    out.extend_from_slice(x.range(bound * row..tokens * row).as_bytes());
                }
                let (keys, key_ranges) = self.q4_keys(k, bound);
                let (values, value_ranges) = self.q4_values(v, bound);
                for ranges in [key_ranges, value_ranges] {
                    out.extend(ranges.iter().flat_map(|range| range.to_le_bytes()));
                }
                for codes in [keys, values] {
                    codes.chunks(row.max(1)).for_each(|row| pack(row, &mut out));
                }
            }
        }
        debug_assert_eq!(out.len(), self.layer);
        vec![Cow::Owned(out)]
    }

    /// Codes of the first `bound` tokens' keys, and minimum and step of each channel of each group of tokens.
    fn q4_keys(&self, k: Slice<'_>, bound: usize) -> (Vec<u8>, Vec<f16>) {
        let row = self.heads * self.head_dim;
        let (mut codes, mut ranges) = (vec![0; bound * row], Vec::with_capacity(bound / GROUP * row * 2));
        let mut group = vec![0.0; GROUP * row];
        for start in (0..bound).step_by(GROUP) {
            k.range(start * row..(start + GROUP) * row).to_f32(&mut group);
            for channel in 0..row {
                let (low, step) = range(group.iter().skip(channel).step_by(row));
                ranges.extend([low, step]);
                for token in 0..GROUP {
                    codes[(start + token) * row + channel] = q4(group[token * row + channel], low, step);
                }
            }
        }
        (codes, ranges)
    }

    /// Codes of the first `bound` tokens' values, and minimum and step of each group of channels of each head.
    fn q4_values(&self, v: Slice<'_>, bound: usize) -> (Vec<u8>, Vec<f16>) {
        let (mut codes, mut ranges) = (Vec::with_capacity(bound * self.heads * self.head_dim), Vec::new());
        for_rows(v.range(0..bound * self.heads * self.head_dim), self.head_dim, |head| {
            for group in head.chunks(CHANNELS) {
                let (low, step) = range(group.iter());
                ranges.extend([low, step]);
                codes.extend(group.iter().map(|x| q4(*x, low, step)));
            }
        });
        (codes, ranges)
    }

    /// Keys and values, one after the other, of a layer's bytes at rest.
    pub(crate) fn decode(&self, bytes: &[u8]) -> Buffer {
        let (tokens, row) = (self.tokens, self.heads * self.head_dim);
        let mut out = Buffer::zeros(self.dtype, 2 * tokens * row);
        let part = |index: usize| {
            let part = &self.parts[index];
            &bytes[part.start..part.start + part.bytes()]
        };
        match self.quantization {
            KvQuantization::Exact => {
                if let Ok(slice) = Slice::from_bytes(self.dtype, bytes) {
                    out.write(0, slice);
                }
            }
            KvQuantization::Q8 => {
                for half in 0..2 {
                    let (scales, codes) = (halves(part(2 * half)), bytemuck::cast_slice(part(2 * half + 1)));
                    out.dequantize_runs(
                        half * tokens * row,
                        codes,
                        (self.head_dim, self.head_dim),
                        &[],
                        &scales,
                    );
                }
            }
            KvQuantization::Q4 => {
                let rest = part(0).len() / self.dtype.size() / row;
                let bound = tokens - rest;
                for half in 0..2 {
                    if let Ok(slice) = Slice::from_bytes(self.dtype, part(half)) {
                        out.write((half * tokens + bound) * row, slice);
                    }
                }
                self.decode_q4(&mut out, part);
            }
        }
        out
    }

    fn decode_q4<'a>(&self, out: &mut Buffer, part: impl Fn(usize) -> &'a [u8]) {
        let row = self.heads * self.head_dim;
        let (mut codes, mut ranges) = (vec![0; GROUP * row], [vec![0.0; row], vec![0.0; row]]);
        let key_ranges = halves(part(2));
        let packed = GROUP * row.div_ceil(2);
        for (group, (bytes, of)) in part(4).chunks(packed).zip(key_ranges.chunks(2 * row)).enumerate() {
            let codes = unpack(bytes, row, &mut codes);
            let [low, step] = split(of, &mut ranges);
            out.dequantize_columns(group * GROUP * row, codes, low, step);
        }
        let groups = self.heads * self.head_dim.div_ceil(CHANNELS);
        let value_ranges = halves(part(3));
        ranges.iter_mut().for_each(|range| range.resize(GROUP * groups, 0.0));
        // As many tokens at once as keys have in a group.
        for (group, (bytes, of)) in
            part(5).chunks(packed).zip(value_ranges.chunks(2 * GROUP * groups)).enumerate()
        {
            let codes = unpack(bytes, row, &mut codes);
            let [low, step] = split(of, &mut ranges);
            out.dequantize_runs(
                (self.tokens + group * GROUP) * row,
                codes,
                (self.head_dim, CHANNELS),
                low,
                step,
            );
        }
    }
}

/// Calls `f` with every run of `len` elements.
fn for_rows(x: Slice<'_>, len: usize, mut f: impl FnMut(&[f32])) {
    let mut row = vec![0.0; len];
    for start in (0..x.len()).step_by(len.max(1)) {
        x.range(start..start + len).to_f32(&mut row);
        f(&row);
    }
}

fn q8(head: &[f32], scales: &mut Vec<f16>, codes: &mut Vec<i8>) {
    let most = head.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    let scale = finite(most / 127.0);
    scales.push(scale);
    // The factor that the decoder will multiply by; all zeros have a scale of zero.
    let inverse = if scale == f16::ZERO { 0.0 } else { 1.0 / scale.to_f32() };
    codes.extend(head.iter().map(|x| (x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8));
}

/// Minimum and step of 16 levels that reach the maximum.
fn range<'a>(values: impl Iterator<Item = &'a f32>) -> (f16, f16) {
    let (low, high) = values.fold((f32::MAX, f32::MIN), |(low, high), x| (low.min(*x), high.max(*x)));
    let low = finite(low);
    (low, finite((high - low.to_f32()) / 15.0))
}

fn q4(x: f32, low: f16, step: f16) -> u8 {
    if step <= f16::ZERO {
        return 0;
    }
    ((x - low.to_f32()) / step.to_f32()).round_ties_even().clamp(0.0, 15.0) as u8
}

/// The nearest finite f16.
fn finite(x: f32) -> f16 {
    f16::from_f32(x.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()))
}

/// Two codes a byte, the first in the lower half.
fn pack(codes: &[u8], out: &mut Vec<u8>) {
    out.extend(codes.chunks(2).map(|pair| pair[0] | pair.get(1).copied().unwrap_or(0) << 4));
}

/// Codes of rows of `row`, each from a byte on.
fn unpack<'a>(bytes: &[u8], row: usize, codes: &'a mut [i8]) -> &'a [i8] {
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
fn split<'a>(pairs: &[f32], [low, step]: &'a mut [Vec<f32>; 2]) -> [&'a [f32]; 2] {
    let pairs = pairs.as_chunks::<2>().0;
    for ((pair, low), step) in pairs.iter().zip(low.iter_mut()).zip(step.iter_mut()) {
        [*low, *step] = *pair;
    }
    [&low[..pairs.len()], &step[..pairs.len()]]
}

fn halves(bytes: &[u8]) -> Vec<f32> {
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
