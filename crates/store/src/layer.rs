//! One layer of a chunk in memory, as computed or as it lies at rest.

use std::fmt;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::ops::Range;
use std::sync::Arc;

use refrain_kernels::{Buffer, Dtype, Slice};

use crate::rest::Layout;

/// Keys before RoPE and values of one layer of a chunk. Immutable; clones share the memory.
#[derive(Clone)]
pub struct Layer(Arc<Inner>);

struct Inner {
    dtype: Dtype,
    data: Data,
    /// Bytes that it took at rest.
    at_rest: usize,
}

enum Data {
    /// Keys, then values, equally many, from `start`, a multiple of [`ALIGN`] in memory; or what lies at rest.
    Bytes { bytes: Vec<u8>, start: usize },
    /// Keys, then values, that were decoded.
    Decoded(Buffer),
}

/// Every element type can be read where it lies.
const ALIGN: usize = 8;

impl Layer {
    /// Copies keys and values, each tokens × heads × head size, as they are to lie at rest.
    pub(crate) fn encoded(layout: &Layout, k: Slice<'_>, v: Slice<'_>) -> Layer {
        debug_assert_eq!((k.len(), k.dtype()), (v.len(), v.dtype()));
        let bytes = layout.encode(k, v);
        Layer::join(k.dtype(), bytes.len(), [bytes.as_slice()].into_iter())
    }

    /// Keys and values of what lies at rest.
    pub(crate) fn decode(&self, layout: &Layout) -> Layer {
        if layout.is_exact() {
            return self.clone();
        }
        let (dtype, at_rest) = (self.0.dtype, self.0.at_rest);
        Layer(Arc::new(Inner { dtype, data: Data::Decoded(layout.decode(self.as_bytes())), at_rest }))
    }

    /// Copies the given tokens, with `row` bytes of keys each, one after the other.
    pub(crate) fn select(&self, row: usize, ranges: &[Range<usize>]) -> Layer {
        let (k, v) = self.as_bytes().split_at(self.bytes() / 2);
        let len = 2 * row * ranges.iter().map(Range::len).sum::<usize>();
        let tokens = |half| ranges.iter().map(move |range| (half, row * range.start..row * range.end));
        Layer::join(self.0.dtype, len, [k, v].into_iter().flat_map(tokens).map(|(half, place)| &half[place]))
    }

    /// Parts of a layer that lies at rest, `len` bytes in all.
    pub(crate) fn gathered<'a>(of: &Layer, len: usize, parts: impl Iterator<Item = &'a [u8]>) -> Layer {
        Layer::join(of.0.dtype, len, parts)
    }

    /// Copies parts of `len` bytes in all.
    fn join<'a>(dtype: Dtype, len: usize, parts: impl Iterator<Item = &'a [u8]>) -> Layer {
        let (mut bytes, start) = reserve(len);
        parts.for_each(|part| bytes.extend_from_slice(part));
        Layer::new(dtype, bytes, start)
    }

    fn new(dtype: Dtype, bytes: Vec<u8>, start: usize) -> Layer {
        let at_rest = bytes.len() - start;
        Layer(Arc::new(Inner { dtype, data: Data::Bytes { bytes, start }, at_rest }))
    }

    /// Reads a layer of `len` bytes.
    pub(crate) fn read(reader: &mut dyn Read, dtype: Dtype, len: usize) -> io::Result<Layer> {
        let (mut bytes, start) = reserve(len);
        append(reader, &mut bytes, len)?;
        Ok(Layer::new(dtype, bytes, start))
    }

    /// Reads parts of a file, each an offset and a number of bytes, one after the other.
    pub(crate) fn gather(
        file: &mut (impl Read + Seek),
        dtype: Dtype,
        parts: &[(u64, usize)],
    ) -> io::Result<Layer> {
        let (mut bytes, start) = reserve(parts.iter().map(|(_, len)| len).sum());
        for (offset, len) in parts {
            file.seek(SeekFrom::Start(*offset))?;
            append(file, &mut bytes, *len)?;
        }
        Ok(Layer::new(dtype, bytes, start))
    }

    /// Keys before RoPE: tokens × KV heads × head size.
    pub fn k(&self) -> Slice<'_> {
        self.slice(&self.as_bytes()[..self.bytes() / 2])
    }

    /// Values: tokens × KV heads × head size.
    pub fn v(&self) -> Slice<'_> {
        self.slice(&self.as_bytes()[self.bytes() / 2..])
    }

    /// Bytes of keys and values.
    pub fn bytes(&self) -> usize {
        self.as_bytes().len()
    }

    /// Bytes of what they were made of: fewer where they were encoded at rest.
    pub fn bytes_at_rest(&self) -> usize {
        self.0.at_rest
    }

    /// Keys, then values; or what lies at rest.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        match &self.0.data {
            Data::Bytes { bytes, start } => &bytes[*start..],
            Data::Decoded(buffer) => buffer.as_slice().as_bytes(),
        }
    }

    fn slice<'a>(&self, bytes: &'a [u8]) -> Slice<'a> {
        // The middle of a layer is a whole number of elements away from its aligned start.
        Slice::from_bytes(self.0.dtype, bytes).expect("aligned, whole elements")
    }
}

impl fmt::Debug for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of {}", self.bytes(), self.0.dtype)
    }
}

/// Reads `len` bytes into memory that nobody has filled before.
fn append(mut reader: &mut dyn Read, bytes: &mut Vec<u8>, len: usize) -> io::Result<()> {
    if Read::take(&mut reader, len as u64).read_to_end(bytes)? < len {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(())
}

/// Room for `len` bytes from the returned index, which lies at a multiple of [`ALIGN`]; all before it is filled.
///
/// The room exceeds what is asked for, so that a reader never makes the vector grow, and move.
fn reserve(len: usize) -> (Vec<u8>, usize) {
    let mut bytes: Vec<u8> = Vec::with_capacity(len + ALIGN);
    let start = bytes.as_ptr().addr().wrapping_neg() % ALIGN;
    bytes.resize(start, 0);
    (bytes, start)
}
