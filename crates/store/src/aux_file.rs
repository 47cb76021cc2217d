//! The file of an aux tensors file, which lies beside its chunk's: a safetensors file too. See `docs/chunk-file.md`.
//!
//! [`Store::put_aux_tensors`](crate::Store::put_aux_tensors) and [`Store::aux_tensors`](crate::Store::aux_tensors) write and read it.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io::Read;

use refrain_kernels::{Buffer, Dtype};
use refrain_kv::{AuxTensors, Tensor};
use safetensors::tensor::TensorInfo;

use crate::header::{self, Raw, bad_value, stored_as, trouble};
use crate::hex;
use crate::{ChunkKey, Problem};

/// Value of the `format` entry.
const FORMAT: &str = "refrain-summary";
/// Version of the file.
const VERSION: u32 = 1;
/// Longest header in bytes: thousands of tensors.
const MAX_HEADER: u64 = 1 << 20;
/// Longest kind in characters.
const MAX_KIND: usize = 40;

/// The metadata of a tensor: name, type, sizes.
type Listed = (String, Dtype, Vec<usize>);

/// The bytes of an aux tensors file: always the same for the same content and time of creation, in seconds since 1970.
///
/// # Errors
/// If the format has no room for it: more than 1 MiB of header, or a tensor called `__metadata__`.
pub fn encode(chunk: &ChunkKey, kind: &str, created: u64, aux: &AuxTensors) -> Result<Vec<u8>, Problem> {
    let mut out = header(chunk, kind, created, aux)?;
    data(aux).for_each(|bytes| out.extend_from_slice(bytes));
    Ok(out)
}

/// Reads a whole file, as [`encode`] makes it for this chunk and kind, and verifies everything about it.
///
/// # Errors
/// The fault of the bytes.
pub fn decode(bytes: &[u8], chunk: &ChunkKey, kind: &str) -> Result<AuxTensors, Problem> {
    let mut reader = bytes;
    Header::read(&mut reader, bytes.len() as u64, chunk, kind)?.aux_tensors(&mut reader)
}

/// Whether it is one: it stands in names of files.
pub(crate) fn is_kind(kind: &str) -> bool {
    let allowed = |b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-');
    (1..=MAX_KIND).contains(&kind.len()) && kind.bytes().all(allowed)
}

/// The bytes before the tensors.
pub(crate) fn header(
    chunk: &ChunkKey,
    kind: &str,
    created: u64,
    aux: &AuxTensors,
) -> Result<Vec<u8>, Problem> {
    let listed = |tensor: &Tensor| (tensor.name.clone(), tensor.data.dtype(), tensor.shape.clone());
    let listed: Vec<Listed> = aux.tensors().iter().map(listed).collect();
    let (tensors, _) = places(&listed)?;
    let listed: Vec<_> = listed.iter().map(|(name, dtype, shape)| (name, dtype.name(), shape)).collect();
    let mut hasher = blake3::Hasher::new();
    data(aux).for_each(|bytes| _ = hasher.update(bytes));
    let entries = [
        ("format", FORMAT.to_owned()),
        ("version", VERSION.to_string()),
        ("chunk", chunk.to_string()),
        ("kind", kind.to_owned()),
        ("created", created.to_string()),
        ("tensors", serde_json::to_string(&listed).expect("strings and numbers go into a string")),
        ("data.blake3", hex::encode(hasher.finalize().as_bytes())),
    ];
    let out = header::encode(entries.map(|(name, value)| (name.to_owned(), value)).into(), tensors);
    header::bound((out.len() - 8) as u64, MAX_HEADER)?;
    Ok(out)
}

/// The tensors' bytes as they lie in the file.
pub(crate) fn data(aux: &AuxTensors) -> impl Iterator<Item = &[u8]> {
    let tensors = in_file_order(aux.tensors(), |tensor| tensor.data.dtype());
    tensors.into_iter().map(|tensor| tensor.data.as_slice().as_bytes())
}

/// Wide elements come first, so that every tensor lies at a multiple of its elements' size.
fn in_file_order<T>(tensors: &[T], dtype: impl Fn(&T) -> Dtype) -> Vec<&T> {
    let mut tensors: Vec<&T> = tensors.iter().collect();
    tensors.sort_by_key(|tensor| Reverse(dtype(tensor).size()));
    tensors
}

/// The header's entries of the listed tensors, and the bytes of all of them.
fn places(listed: &[Listed]) -> Result<(BTreeMap<String, TensorInfo>, usize), Problem> {
    let (mut places, mut start) = (BTreeMap::new(), 0_usize);
    for (name, dtype, shape) in in_file_order(listed, |(_, dtype, _)| *dtype) {
        let wrong = |what| Problem::Header(format!("tensor '{name}' {what}"));
        let elements = shape.iter().try_fold(1_usize, |elements, size| elements.checked_mul(*size));
        let end = elements.and_then(|elements| elements.checked_mul(dtype.size())?.checked_add(start));
        let end = end.ok_or_else(|| wrong("exceeds the address space"))?;
        let place = TensorInfo { dtype: stored_as(*dtype), shape: shape.clone(), data_offsets: (start, end) };
        if name == header::METADATA {
            return Err(wrong("has a name that the format keeps for itself"));
        }
        if places.insert(name.clone(), place).is_some() {
            return Err(wrong("is there twice"));
        }
        start = end;
    }
    Ok((places, start))
}

/// The first part of an aux tensors file.
pub(crate) struct Header {
    /// In the aux tensors's order.
    listed: Vec<Listed>,
    /// Bytes of all tensors.
    bytes: usize,
    /// BLAKE3 of these bytes as they lie in the file.
    checksum: [u8; 32],
}

impl Header {
    /// Reads the header of a file of `len` bytes, which must be that of this chunk and kind, and verifies it: format,
    /// version, checksum of the header, shape and place of every tensor, length of the file. Tensors are not read.
    pub(crate) fn read(
        reader: &mut dyn Read,
        len: u64,
        chunk: &ChunkKey,
        kind: &str,
    ) -> Result<Header, Problem> {
        let raw = Raw::read(reader, len, MAX_HEADER)?;
        let entries = raw.entries(FORMAT, &[VERSION])?;
        let typed = |(name, dtype, shape): (String, String, Vec<usize>)| {
            Ok((name, dtype.parse().map_err(|_| bad_value("tensors"))?, shape))
        };
        let listed: Vec<_> = entries.json("tensors")?;
        let listed: Vec<Listed> = listed.into_iter().map(typed).collect::<Result<_, _>>()?;
        let checksum = entries.digest("data.blake3")?;
        entries.parse::<u64>("created")?;
        let (places, bytes) = places(&listed)?;
        raw.check(&places, bytes)?;
        for (name, asked) in [("chunk", chunk.to_string().as_str()), ("kind", kind)] {
            if entries.text(name)? != asked {
                return Err(Problem::Identity(name));
            }
        }
        Ok(Header { listed, bytes, checksum })
    }

    /// Reads what follows the header and verifies it.
    pub(crate) fn aux_tensors(self, reader: &mut dyn Read) -> Result<AuxTensors, Problem> {
        let (mut hasher, mut data) = (blake3::Hasher::new(), BTreeMap::new());
        for (name, dtype, shape) in in_file_order(&self.listed, |(_, dtype, _)| *dtype) {
            // The file is as long as all of them.
            let mut tensor = Buffer::zeros(*dtype, shape.iter().product());
            let expected = self.bytes as u64;
            let read = reader.read_exact(bytes_of(&mut tensor));
            read.map_err(|error| trouble(&error, expected, hasher.count()))?;
            hasher.update(tensor.as_slice().as_bytes());
            data.insert(name.clone(), tensor);
        }
        if hasher.finalize() != self.checksum {
            return Err(Problem::DataChecksum);
        }
        let mut aux = AuxTensors::default();
        for (name, _, shape) in self.listed {
            if let Some(data) = data.remove(&name) {
                aux.push(name, shape, data);
            }
        }
        Ok(aux)
    }
}

fn bytes_of(buffer: &mut Buffer) -> &mut [u8] {
    match buffer {
        Buffer::F32(v) => bytemuck::cast_slice_mut(v),
        Buffer::F16(v) => bytemuck::cast_slice_mut(v),
        Buffer::Bf16(v) => bytemuck::cast_slice_mut(v),
    }
}
