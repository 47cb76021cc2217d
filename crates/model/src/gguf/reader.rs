//! From bytes to metadata and tensor directory.
//!
//! Layout: magic `GGUF`, u32 version, u64 tensors, u64 keys; per key: string, u32 type, value; per tensor:
//! string, u32 dimensions, u64 each (innermost first), u32 type, u64 offset; padding to `general.alignment`;
//! data. A string is a u64 length and that many bytes; an array a u32 element type, a u64 count and the
//! elements.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;

use super::value::{Array, Value};
use crate::dtype::DType;

/// Arrays inside arrays, at most.
const MAX_NESTING: u32 = 4;
/// Elements of all metadata arrays together, at most; a vocabulary of 256 Ki tokens with its types, scores
/// and merges has 1.5 Mi.
const MAX_ELEMENTS: usize = 1 << 23;
/// Keys, and tensors, at most; large models have some hundred keys and some thousand tensors.
const MAX_ENTRIES: u64 = 1 << 17;
/// Bytes of a key or tensor name, at most (the format allows keys of 65535 bytes, ggml names of 64).
const MAX_NAME: usize = 65_535;
/// Dimensions of a tensor, at most.
const MAX_DIMS: u32 = 4;
/// Largest alignment taken, in bytes.
const MAX_ALIGNMENT: usize = 1 << 16;
/// Alignment where the file names none, in bytes.
const DEFAULT_ALIGNMENT: usize = 32;

/// One entry of the tensor directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The shape, outermost dimension first (the reverse of the file's order): `[rows, cols]` for a matrix.
    pub shape: Vec<usize>,
    /// ggml's number of the type.
    pub ggml_type: u32,
    /// The type, if it can be read.
    pub dtype: Option<DType>,
    /// Index of the file that holds the data, among those of a model in several files.
    pub file: usize,
    /// Where the data lies in that file, in bytes. For a type that cannot be read its length is unknown and
    /// the range is empty.
    pub range: Range<usize>,
}

/// A fault of the file, and the offset of the byte where it was found.
#[derive(Debug)]
pub(super) struct Malformed {
    pub(super) offset: usize,
    pub(super) message: String,
}

type Read<T> = Result<T, Malformed>;
type Metadata = BTreeMap<String, Value>;
type Directory = BTreeMap<String, TensorInfo>;

/// Reads a whole file's metadata and tensor directory.
pub(super) fn read(bytes: &[u8]) -> Read<(Metadata, Directory)> {
    let mut r = Reader { bytes, at: 0, elements_left: MAX_ELEMENTS };
    // `Gguf::parse` has looked at the magic and the version.
    r.take(8)?;
    // No allocation follows from these counts: entries are added one by one, as long as there are bytes.
    let tensors = r.u64()?;
    let keys = r.u64()?;
    if tensors > MAX_ENTRIES || keys > MAX_ENTRIES {
        return Err(
            r.malformed(format!("{tensors} tensors and {keys} metadata keys are more than is sensible"))
        );
    }
    let metadata = read_metadata(&mut r, keys)?;
    let directory = read_directory(&mut r, tensors, alignment(&metadata)?)?;
    Ok((metadata, directory))
}

fn read_metadata(r: &mut Reader<'_>, keys: u64) -> Read<Metadata> {
    let mut metadata = BTreeMap::new();
    for _ in 0..keys {
        let start = r.at;
        let key = r.name()?;
        let type_id = r.u32()?;
        let value = r.value(type_id)?;
        match metadata.entry(key) {
            Entry::Vacant(slot) => slot.insert(value),
            Entry::Occupied(slot) => {
                return Err(Malformed {
                    offset: start,
                    message: format!("the key '{}' appears twice", slot.key()),
                });
            }
        };
    }
    Ok(metadata)
}

fn alignment(metadata: &Metadata) -> Read<usize> {
    let Some(value) = metadata.get("general.alignment") else { return Ok(DEFAULT_ALIGNMENT) };
    value
        .as_u32()
        .and_then(|v| usize::try_from(v).ok())
        .filter(|v| v.is_power_of_two() && *v <= MAX_ALIGNMENT)
        .ok_or_else(|| Malformed {
            offset: 0,
            message: format!(
                "general.alignment must be a power of two up to {MAX_ALIGNMENT}, not {}",
                value.describe()
            ),
        })
}

/// A directory entry whose place in the file is not known yet.
struct Pending {
    entry_at: usize,
    name: String,
    info: TensorInfo,
    /// Bytes from the start of the data.
    offset: u64,
    /// Bytes, where the type is known.
    len: Option<usize>,
}

fn read_directory(r: &mut Reader<'_>, tensors: u64, alignment: usize) -> Read<Directory> {
    let mut pending = Vec::new();
    for _ in 0..tensors {
        pending.push(r.tensor_info()?);
    }
    let data_start =
        r.at.checked_next_multiple_of(alignment)
            .ok_or_else(|| r.malformed("the tensor directory reaches the end of the address space"))?;
    let mut directory = BTreeMap::new();
    for p in pending {
        let Pending { entry_at, name, mut info, offset, len } = p;
        let wrong = |message: String| Malformed { offset: entry_at, message };
        if offset % alignment as u64 != 0 {
            return Err(wrong(format!("the tensor '{name}' is not aligned to {alignment} bytes")));
        }
        let start = usize::try_from(offset).ok().and_then(|o| data_start.checked_add(o));
        let end = start.and_then(|s| s.checked_add(len.unwrap_or(0)));
        let (Some(start), Some(end)) = (start, end) else {
            return Err(wrong(format!("the tensor '{name}' lies at an impossible offset, {offset}")));
        };
        if end > r.bytes.len() {
            let have = r.bytes.len();
            return Err(wrong(format!(
                "the tensor '{name}' ends at byte {end}, but the file has {have} bytes"
            )));
        }
        info.range = start..end;
        match directory.entry(name) {
            Entry::Vacant(slot) => slot.insert(info),
            Entry::Occupied(slot) => return Err(wrong(format!("the tensor '{}' appears twice", slot.key()))),
        };
    }
    Ok(directory)
}

/// A position in the file; every read is checked against its end.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    /// How many more array elements may be read.
    elements_left: usize,
}

impl<'a> Reader<'a> {
    fn malformed(&self, message: impl Into<String>) -> Malformed {
        Malformed { offset: self.at, message: message.into() }
    }

    fn take(&mut self, len: usize) -> Read<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        if len > rest.len() {
            return Err(self.malformed(format!("{len} bytes are needed, {} are left", rest.len())));
        }
        self.at += len;
        Ok(&rest[..len])
    }

    fn array<const N: usize>(&mut self) -> Read<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    fn u32(&mut self) -> Read<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Read<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// A u64 that counts things in memory.
    fn length(&mut self) -> Read<usize> {
        let at = self.at;
        let n = self.u64()?;
        usize::try_from(n)
            .map_err(|_| Malformed { offset: at, message: format!("a length of {n} is impossible") })
    }

    fn string(&mut self) -> Read<String> {
        let len = self.length()?;
        let at = self.at;
        let bytes = self.take(len)?;
        std::str::from_utf8(bytes)
            .map(str::to_owned)
            .map_err(|e| Malformed { offset: at + e.valid_up_to(), message: "a string is not UTF-8".into() })
    }

    fn name(&mut self) -> Read<String> {
        let at = self.at;
        let name = self.string()?;
        if name.is_empty() || name.len() > MAX_NAME {
            return Err(Malformed { offset: at, message: format!("a name has {} bytes", name.len()) });
        }
        Ok(name)
    }

    fn bool(&mut self) -> Read<bool> {
        match self.array()? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(self.malformed(format!("a truth value is {other}, not 0 or 1"))),
        }
    }

    fn value(&mut self, type_id: u32) -> Read<Value> {
        Ok(match type_id {
            0 => Value::U8(u8::from_le_bytes(self.array()?)),
            1 => Value::I8(i8::from_le_bytes(self.array()?)),
            2 => Value::U16(u16::from_le_bytes(self.array()?)),
            3 => Value::I16(i16::from_le_bytes(self.array()?)),
            4 => Value::U32(u32::from_le_bytes(self.array()?)),
            5 => Value::I32(i32::from_le_bytes(self.array()?)),
            6 => Value::F32(f32::from_le_bytes(self.array()?)),
            7 => Value::Bool(self.bool()?),
            8 => Value::String(self.string()?),
            9 => Value::Array(self.array_value(MAX_NESTING)?),
            10 => Value::U64(u64::from_le_bytes(self.array()?)),
            11 => Value::I64(i64::from_le_bytes(self.array()?)),
            12 => Value::F64(f64::from_le_bytes(self.array()?)),
            other => return Err(self.malformed(format!("the metadata value type {other} does not exist"))),
        })
    }

    fn array_value(&mut self, nesting_left: u32) -> Read<Array> {
        let type_id = self.u32()?;
        let count = self.length()?;
        if count > self.elements_left {
            return Err(self.malformed(format!("an array of {count} elements is more than is sensible")));
        }
        self.elements_left -= count;
        Ok(match type_id {
            0 => Array::U8(self.numbers(count, u8::from_le_bytes)?),
            1 => Array::I8(self.numbers(count, i8::from_le_bytes)?),
            2 => Array::U16(self.numbers(count, u16::from_le_bytes)?),
            3 => Array::I16(self.numbers(count, i16::from_le_bytes)?),
            4 => Array::U32(self.numbers(count, u32::from_le_bytes)?),
            5 => Array::I32(self.numbers(count, i32::from_le_bytes)?),
            6 => Array::F32(self.numbers(count, f32::from_le_bytes)?),
            7 => Array::Bool(self.elements(count, 1, Self::bool)?),
            8 => Array::String(self.elements(count, 8, Self::string)?),
            9 if nesting_left == 0 => return Err(self.malformed("arrays are nested too deeply")),
            9 => Array::Array(self.elements(count, 12, |r| r.array_value(nesting_left - 1))?),
            10 => Array::U64(self.numbers(count, u64::from_le_bytes)?),
            11 => Array::I64(self.numbers(count, i64::from_le_bytes)?),
            12 => Array::F64(self.numbers(count, f64::from_le_bytes)?),
            other => return Err(self.malformed(format!("the metadata value type {other} does not exist"))),
        })
    }

    /// `count` numbers of `N` bytes, which are there before anything is allocated.
    fn numbers<const N: usize, T>(&mut self, count: usize, number: fn([u8; N]) -> T) -> Read<Vec<T>> {
        let len = count.checked_mul(N).ok_or_else(|| self.malformed("an array's length overflows"))?;
        Ok(self.take(len)?.as_chunks::<N>().0.iter().map(|b| number(*b)).collect())
    }

    /// `count` elements of at least `min_bytes` bytes each; a count beyond the remaining bytes allocates
    /// nothing.
    fn elements<T>(
        &mut self,
        count: usize,
        min_bytes: usize,
        mut element: impl FnMut(&mut Self) -> Read<T>,
    ) -> Read<Vec<T>> {
        let left = self.bytes.len() - self.at;
        if count.checked_mul(min_bytes).is_none_or(|needed| needed > left) {
            return Err(
                self.malformed(format!("an array of {count} elements does not fit into {left} bytes"))
            );
        }
        let mut out = Vec::with_capacity(count);
        for _ in 0..count {
            out.push(element(self)?);
        }
        Ok(out)
    }

    fn tensor_info(&mut self) -> Read<Pending> {
        let entry_at = self.at;
        let name = self.name()?;
        let dims = self.u32()?;
        if dims == 0 || dims > MAX_DIMS {
            return Err(
                self.malformed(format!("the tensor '{name}' has {dims} dimensions, not 1 to {MAX_DIMS}"))
            );
        }
        let mut shape = Vec::new();
        for _ in 0..dims {
            shape.push(self.length()?);
        }
        if shape.contains(&0) {
            return Err(self.malformed(format!("the tensor '{name}' is empty: {shape:?}")));
        }
        let values = shape
            .iter()
            .try_fold(1usize, |n, &d| n.checked_mul(d))
            .ok_or_else(|| self.malformed(format!("the size of the tensor '{name}' overflows: {shape:?}")))?;
        let ggml_type = self.u32()?;
        let offset = self.u64()?;
        let dtype = DType::from_ggml(ggml_type);
        let len = match dtype {
            None => None,
            // Rows are whole blocks; the innermost dimension comes first.
            Some(t) if shape[0].is_multiple_of(t.block_len()) => {
                Some(t.bytes_for(values).ok_or_else(|| {
                    self.malformed(format!("the size of the tensor '{name}' overflows: {shape:?} of {t}"))
                })?)
            }
            Some(t) => {
                let message =
                    format!("rows of {} values of the tensor '{name}' are no whole {t} blocks", shape[0]);
                return Err(self.malformed(message));
            }
        };
        shape.reverse();
        Ok(Pending {
            entry_at,
            name,
            info: TensorInfo { shape, ggml_type, dtype, file: 0, range: 0..0 },
            offset,
            len,
        })
    }
}
