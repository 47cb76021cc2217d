//! Runs of stored numbers: `f32`, `f16` or `bf16`, borrowed ([`Slice`]) or owned ([`Buffer`]).

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use half::{bf16, f16};

use crate::{convert, pages};

#[cfg(target_endian = "big")]
compile_error!("stored numbers are little-endian and are used in place");

/// Element type of stored keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE single precision, 4 bytes.
    F32,
    /// IEEE half precision, 2 bytes.
    F16,
    /// The upper half of an `f32`, 2 bytes.
    Bf16,
}

impl Dtype {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }

    /// The name that [`FromStr`] reads: `f32`, `f16` or `bf16`.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is none of `f32`, `f16` and `bf16`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnknownDtype(pub String);

impl fmt::Display for UnknownDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown element type {:?}: use f32, f16 or bf16", self.0)
    }
}

impl std::error::Error for UnknownDtype {}

impl FromStr for Dtype {
    type Err = UnknownDtype;

    fn from_str(s: &str) -> Result<Dtype, UnknownDtype> {
        match s {
            "f32" => Ok(Dtype::F32),
            "f16" => Ok(Dtype::F16),
            "bf16" => Ok(Dtype::Bf16),
            _ => Err(UnknownDtype(s.to_owned())),
        }
    }
}

/// Why bytes cannot be read as a run of elements in place.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CastError {
    /// The first byte is not at a multiple of the element's size.
    Misaligned {
        /// The type asked for.
        dtype: Dtype,
    },
    /// The number of bytes is not a whole number of elements.
    Partial {
        /// The type asked for.
        dtype: Dtype,
        /// The number of bytes given.
        bytes: usize,
    },
}

impl fmt::Display for CastError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CastError::Misaligned { dtype } => {
                write!(f, "bytes of {dtype} do not start at a multiple of {}: copy them first", dtype.size())
            }
            CastError::Partial { dtype, bytes } => {
                write!(
                    f,
                    "{bytes} bytes are not a whole number of {dtype} elements of {} bytes",
                    dtype.size()
                )
            }
        }
    }
}

impl std::error::Error for CastError {}

/// A borrowed run of elements of one type.
#[derive(Clone, Copy, Debug)]
pub enum Slice<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// Half precision.
    F16(&'a [f16]),
    /// Brain float.
    Bf16(&'a [bf16]),
}

impl<'a> Slice<'a> {
    /// Type of the elements.
    pub fn dtype(&self) -> Dtype {
        match self {
            Slice::F32(_) => Dtype::F32,
            Slice::F16(_) => Dtype::F16,
            Slice::Bf16(_) => Dtype::Bf16,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Slice::F32(s) => s.len(),
            Slice::F16(s) => s.len(),
            Slice::Bf16(s) => s.len(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements `r`, borrowed from the same place.
    ///
    /// # Panics
    /// If `r` reaches past the end.
    pub fn range(&self, r: Range<usize>) -> Slice<'a> {
        match self {
            Slice::F32(s) => Slice::F32(&s[r]),
            Slice::F16(s) => Slice::F16(&s[r]),
            Slice::Bf16(s) => Slice::Bf16(&s[r]),
        }
    }

    /// Reinterprets little-endian bytes, the layout of a chunk file, without copying.
    ///
    /// # Errors
    /// If the bytes are misaligned for the type or not a whole number of elements.
    pub fn from_bytes(dtype: Dtype, bytes: &'a [u8]) -> Result<Slice<'a>, CastError> {
        if !bytes.len().is_multiple_of(dtype.size()) {
            return Err(CastError::Partial { dtype, bytes: bytes.len() });
        }
        let misaligned = |_| CastError::Misaligned { dtype };
        Ok(match dtype {
            Dtype::F32 => Slice::F32(bytemuck::try_cast_slice(bytes).map_err(misaligned)?),
            Dtype::F16 => Slice::F16(bytemuck::try_cast_slice(bytes).map_err(misaligned)?),
            Dtype::Bf16 => Slice::Bf16(bytemuck::try_cast_slice(bytes).map_err(misaligned)?),
        })
    }

    /// The elements, copied.
    pub fn to_buffer(&self) -> Buffer {
        match self {
            Slice::F32(s) => Buffer::F32(s.to_vec()),
            Slice::F16(s) => Buffer::F16(s.to_vec()),
            Slice::Bf16(s) => Buffer::Bf16(s.to_vec()),
        }
    }

    /// The elements as little-endian bytes.
    pub fn as_bytes(&self) -> &'a [u8] {
        match self {
            Slice::F32(s) => bytemuck::cast_slice(s),
            Slice::F16(s) => bytemuck::cast_slice(s),
            Slice::Bf16(s) => bytemuck::cast_slice(s),
        }
    }

    /// Element `i` as `f32`. A convenience; [`Slice::to_f32`] is the fast way.
    pub fn get(&self, i: usize) -> f32 {
        match self {
            Slice::F32(s) => s[i],
            Slice::F16(s) => s[i].to_f32(),
            Slice::Bf16(s) => s[i].to_f32(),
        }
    }

    /// All elements, converted exactly.
    pub fn floats(&self) -> Vec<f32> {
        let mut floats = vec![0.0; self.len()];
        self.to_f32(&mut floats);
        floats
    }

    /// Writes all elements, converted exactly, to `out` of the same length.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn to_f32(&self, out: &mut [f32]) {
        assert_eq!(self.len(), out.len(), "as many outputs as elements");
        match self {
            Slice::F32(s) => out.copy_from_slice(s),
            Slice::F16(s) => convert::f16_to_f32(s, out),
            Slice::Bf16(s) => convert::bf16_to_f32(s, out),
        }
    }
}

/// Elements of a device's tensor in the host's memory.
#[derive(Debug)]
pub enum HostElements<'a> {
    /// Elements that are read in the tensor itself.
    Lent(Slice<'a>),
    /// Elements that were copied out of the tensor.
    Copied(Buffer),
}

impl HostElements<'_> {
    /// The elements.
    pub fn as_slice(&self) -> Slice<'_> {
        match self {
            HostElements::Lent(slice) => *slice,
            HostElements::Copied(buffer) => buffer.as_slice(),
        }
    }

    /// The elements, copied unless they are a copy.
    pub fn into_buffer(self) -> Buffer {
        match self {
            HostElements::Lent(slice) => slice.to_buffer(),
            HostElements::Copied(buffer) => buffer,
        }
    }
}

/// An owned run of elements of one type.
#[derive(Clone, Debug, PartialEq)]
pub enum Buffer {
    /// Single precision.
    F32(Vec<f32>),
    /// Half precision.
    F16(Vec<f16>),
    /// Brain float.
    Bf16(Vec<bf16>),
}

/// Zeros from the system, which are not touched yet.
fn zeros<T: bytemuck::Zeroable>(len: usize) -> Vec<T> {
    let zeros = bytemuck::zeroed_vec(len);
    pages::advise_huge_pages(&zeros);
    zeros
}

impl Buffer {
    /// A buffer of `len` zeros.
    pub fn zeros(dtype: Dtype, len: usize) -> Buffer {
        match dtype {
            Dtype::F32 => Buffer::F32(zeros(len)),
            Dtype::F16 => Buffer::F16(zeros(len)),
            Dtype::Bf16 => Buffer::Bf16(zeros(len)),
        }
    }

    /// Sets the length; memory is kept, and new elements are zeros.
    pub fn resize(&mut self, len: usize) {
        match self {
            Buffer::F32(v) => v.resize(len, 0.0),
            Buffer::F16(v) => v.resize(len, f16::ZERO),
            Buffer::Bf16(v) => v.resize(len, bf16::ZERO),
        }
    }

    /// The elements, borrowed.
    pub fn as_slice(&self) -> Slice<'_> {
        match self {
            Buffer::F32(v) => Slice::F32(v),
            Buffer::F16(v) => Slice::F16(v),
            Buffer::Bf16(v) => Slice::Bf16(v),
        }
    }

    /// Type of the elements.
    pub fn dtype(&self) -> Dtype {
        self.as_slice().dtype()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Elements for which there is memory.
    pub fn capacity(&self) -> usize {
        match self {
            Buffer::F32(v) => v.capacity(),
            Buffer::F16(v) => v.capacity(),
            Buffer::Bf16(v) => v.capacity(),
        }
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        self.capacity() * self.dtype().size()
    }

    /// Copies the elements `from` to where `to` begins.
    ///
    /// # Panics
    /// If either range reaches past the end.
    pub fn copy_within(&mut self, from: Range<usize>, to: usize) {
        match self {
            Buffer::F32(v) => v.copy_within(from, to),
            Buffer::F16(v) => v.copy_within(from, to),
            Buffer::Bf16(v) => v.copy_within(from, to),
        }
    }

    /// Overwrites `self[at .. at + src.len()]` with `src`.
    ///
    /// # Panics
    /// If the range reaches past the end, or the types differ.
    pub fn write(&mut self, at: usize, src: Slice<'_>) {
        match (self, src) {
            (Buffer::F32(v), Slice::F32(src)) => v[at..at + src.len()].copy_from_slice(src),
            (Buffer::F16(v), Slice::F16(src)) => v[at..at + src.len()].copy_from_slice(src),
            (Buffer::Bf16(v), Slice::Bf16(src)) => v[at..at + src.len()].copy_from_slice(src),
            (to, src) => panic!("{} cannot be written among {}", src.dtype(), to.dtype()),
        }
    }

    /// Overwrites `self[at .. at + src.len()]` with `src` rounded to the buffer's type, ties to even.
    ///
    /// # Panics
    /// If the range reaches past the end.
    pub fn write_f32(&mut self, at: usize, src: &[f32]) {
        match self {
            Buffer::F32(v) => v[at..at + src.len()].copy_from_slice(src),
            Buffer::F16(v) => convert::f32_to_f16(src, &mut v[at..at + src.len()]),
            Buffer::Bf16(v) => convert::f32_to_bf16(src, &mut v[at..at + src.len()]),
        }
    }
}
