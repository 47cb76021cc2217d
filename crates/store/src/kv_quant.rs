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

use codes::{around, halves, middle, pack, q4, q8, range, split, unpack};

mod codes;

/// Tokens that share the range of a channel of keys (KIVI's group size).
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
    /// 8 bits an element. Keys have an f16 middle and step by channel over 32 tokens: biases of a model put some of their channels
    /// hundreds of steps away from the others. Values have an f16 scale by token and head: `round(x / s)` with `s = max |x| / 127`.
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

    /// Its byte of a chunk's key. 1 was that of keys in 8 bits with one scale for a token and head.
    pub(crate) fn tag(self) -> u8 {
        match self {
            KvQuantization::Exact => 0,
            KvQuantization::Q8 => 3,
            KvQuantization::Q4 => 2,
        }
    }

    /// Its name in a chunk file.
    pub(crate) fn encoding(self) -> &'static str {
        match self {
            KvQuantization::Q8 => "q8-channel",
            KvQuantization::Exact | KvQuantization::Q4 => self.name(),
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
                push("k.range", Stored::F16, 0..tokens, GROUP, &[heads, head_dim, 2], 2);
                push("k.q8", Stored::I8, 0..tokens, 1, &[heads, head_dim], 1);
                push("v.scale", Stored::F16, 0..tokens, 1, &[heads], 2);
                push("v.q8", Stored::I8, 0..tokens, 1, &[heads, head_dim], 1);
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

    /// The layout of a layer that has only the tokens `runs` of this one, one run after the other. Runs begin at multiples of [`GROUP`], and end
    /// there or with the last token.
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
                let (keys, ranges) =
                    self.by_channel(k, tokens, middle, |x, middle, step| q8(x - middle, step));
                let (mut values, mut scales) = (Vec::with_capacity(tokens * row), Vec::new());
                for_rows(v, self.head_dim, |head| {
                    let (_, scale) = around(head, f16::ZERO);
                    scales.push(scale);
                    values.extend(head.iter().map(|x| q8(*x, scale.to_f32())));
                });
                for (scales, codes) in [(ranges, keys), (scales, values)] {
                    out.extend(scales.iter().flat_map(|scale| scale.to_le_bytes()));
                    out.extend_from_slice(&codes);
                }
            }
            KvQuantization::Q4 => {
                let bound = encoded(self.quantization, tokens);
                for x in [k, v] {
                    out.extend_from_slice(x.range(bound * row..tokens * row).as_bytes());
                }
                let (keys, key_ranges) = self.by_channel(k, bound, range, q4);
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

    /// Codes of the first `tokens` keys, and what `range` says of each channel of each group of tokens.
    fn by_channel(
        &self,
        k: Slice<'_>,
        tokens: usize,
        range: impl Fn(&[f32]) -> (f16, f16),
        code: impl Fn(f32, f32, f32) -> u8,
    ) -> (Vec<u8>, Vec<f16>) {
        let row = self.heads * self.head_dim;
        let (mut codes, mut ranges) =
            (vec![0; tokens * row], Vec::with_capacity(tokens.div_ceil(GROUP) * row * 2));
        let (mut group, mut channel) = (vec![0.0; GROUP * row], Vec::with_capacity(GROUP));
        for codes in codes.chunks_mut(GROUP * row) {
            let start = ranges.len() / 2 * GROUP;
            let group = &mut group[..codes.len()];
            k.range(start..start + group.len()).to_f32(group);
            for at in 0..row {
                channel.clear();
                channel.extend(group.iter().skip(at).step_by(row));
                let (low, step) = range(&channel);
                ranges.extend([low, step]);
                let codes = codes.iter_mut().skip(at).step_by(row);
                codes.zip(&channel).for_each(|(to, x)| *to = code(*x, low.to_f32(), step.to_f32()));
            }
        }
        (codes, ranges)
    }

    /// Codes of the first `bound` tokens' values, and minimum and step of each group of channels of each head.
    fn q4_values(&self, v: Slice<'_>, bound: usize) -> (Vec<u8>, Vec<f16>) {
        let (mut codes, mut ranges) = (Vec::with_capacity(bound * self.heads * self.head_dim), Vec::new());
        for_rows(v.range(0..bound * self.heads * self.head_dim), self.head_dim, |head| {
            for group in head.chunks(CHANNELS) {
                let (low, step) = range(group);
                ranges.extend([low, step]);
                codes.extend(group.iter().map(|x| q4(*x, low.to_f32(), step.to_f32())));
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
                let mut ranges = [vec![0.0; row], vec![0.0; row]];
                let keys: &[i8] = bytemuck::cast_slice(part(1));
                for (group, (codes, of)) in
                    keys.chunks(GROUP * row).zip(halves(part(0)).chunks(2 * row)).enumerate()
                {
                    let [middle, step] = split(of, &mut ranges);
                    out.dequantize_columns(group * GROUP * row, codes, middle, step);
                }
                let runs = (self.head_dim, self.head_dim);
                out.dequantize_runs(tokens * row, bytemuck::cast_slice(part(3)), runs, &[], &halves(part(2)));
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
