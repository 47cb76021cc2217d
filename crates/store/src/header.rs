//! The beginning of every file of the store: a safetensors header whose metadata carries its own checksum.
//!
//! Everything read here is untrusted: lengths are bounded by the bytes that remain before memory is taken for them.

use std::collections::{BTreeMap, HashMap};
use std::io::{ErrorKind, Read};
use std::str::FromStr;

use refrain_kernels::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Serialize;

use crate::Problem;
use crate::hex;

/// Name of the entry with the checksum of all others.
const CHECKSUM: &str = "header.blake3";

/// Name that no tensor can have.
pub(crate) const METADATA: &str = "__metadata__";

/// The header's JSON, in the order in which it is written.
#[derive(Serialize)]
struct Json {
    #[serde(rename = "__metadata__")]
    metadata: BTreeMap<String, String>,
    #[serde(flatten)]
    tensors: BTreeMap<String, TensorInfo>,
}

/// Length of the JSON (8 bytes), JSON, spaces up to a multiple of 8. Adds the checksum to the entries.
pub(crate) fn encode(
    mut metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, TensorInfo>,
) -> Vec<u8> {
    let checksum = checksum(metadata.iter());
    metadata.insert(CHECKSUM.to_owned(), checksum);
    let mut out = vec![0; 8];
    serde_json::to_writer(&mut out, &Json { metadata, tensors }).expect("strings and numbers go into memory");
    out.resize(out.len().next_multiple_of(8), b' ');
    let length = (out.len() - 8) as u64;
    out[..8].copy_from_slice(&length.to_le_bytes());
    out
}

/// Bytes of the header that `bytes` begin with, once they tell.
#[cfg(feature = "remote")]
pub(crate) fn length(bytes: &[u8], most: u64) -> Result<Option<usize>, Problem> {
    let Some(length) = bytes.first_chunk() else { return Ok(None) };
    let length = u64::from_le_bytes(*length);
    bound(length, most)?;
    Ok(Some(8 + length as usize))
}

/// A header as safetensors sees it: tensors follow each other without gaps. What they mean is not looked at yet.
pub(crate) struct Raw {
    metadata: Metadata,
    /// Where the tensors begin: bytes of the header and its length.
    start: u64,
    /// Bytes of the file.
    len: u64,
}

impl Raw {
    /// Reads the header, of at most `most` bytes, of a file of `len` bytes.
    pub(crate) fn read(reader: &mut dyn Read, len: u64, most: u64) -> Result<Raw, Problem> {
        let mut length = [0; 8];
        read_exact(reader, &mut length, len, 8)?;
        let length = u64::from_le_bytes(length);
        bound(length, most)?;
        if length > len - 8 {
            return Err(Problem::Length { expected: 8 + length, found: len });
        }
        // At most `most` and at most what the file has.
        let mut json = vec![0; length as usize];
        read_exact(reader, &mut json, len, 8 + length)?;
        let metadata = serde_json::from_slice(&json).map_err(|error| Problem::Header(error.to_string()))?;
        Ok(Raw { metadata, start: 8 + length, len })
    }

    /// The entries of `__metadata__`, if it is a file of this format, of one of these versions, with a checksum that matches.
    pub(crate) fn entries(&self, format: &str, versions: &[u32]) -> Result<Entries<'_>, Problem> {
        let entries = self.metadata.metadata().as_ref();
        let entries = Entries(entries.ok_or_else(|| Problem::Header("it has no __metadata__".to_owned()))?);
        if entries.text("format")? != format {
            return Err(Problem::Header(format!("its format is not '{format}'")));
        }
        let found = entries.text("version")?;
        if versions.iter().all(|version| found != version.to_string()) {
            return Err(Problem::UnknownVersion(found.chars().take(20).collect()));
        }
        entries.check()?;
        Ok(entries)
    }

    /// Every tensor must be where the entries put it, there must be no other, and the file must end with the last.
    pub(crate) fn check(&self, expected: &BTreeMap<String, TensorInfo>, bytes: usize) -> Result<(), Problem> {
        if self.metadata.offset_keys().len() != expected.len() {
            return Err(Problem::Header(format!("it does not name {} tensors", expected.len())));
        }
        for (name, expected) in expected {
            let found = self.metadata.info(name).is_some_and(|found| {
                found.dtype == expected.dtype
                    && found.shape == expected.shape
                    && found.data_offsets == expected.data_offsets
            });
            if !found {
                return Err(Problem::Header(format!("tensor '{name}' is not as its metadata says")));
            }
        }
        let expected = self.start.saturating_add(bytes as u64);
        if expected == self.len { Ok(()) } else { Err(Problem::Length { expected, found: self.len }) }
    }
}

/// The entries of `__metadata__`.
pub(crate) struct Entries<'a>(&'a HashMap<String, String>);

impl Entries<'_> {
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub(crate) fn text(&self, name: &str) -> Result<&str, Problem> {
        let missing = || Problem::Header(format!("its metadata has no '{name}'"));
        self.0.get(name).map(String::as_str).ok_or_else(missing)
    }

    pub(crate) fn parse<T: FromStr>(&self, name: &str) -> Result<T, Problem> {
        self.text(name)?.parse().map_err(|_| bad_value(name))
    }

    pub(crate) fn json<T: serde::de::DeserializeOwned>(&self, name: &str) -> Result<T, Problem> {
        serde_json::from_str(self.text(name)?).map_err(|error| Problem::Header(format!("'{name}': {error}")))
    }

    /// Exactly `bytes` bytes in hexadecimal digits.
    pub(crate) fn bytes(&self, name: &str, bytes: usize) -> Result<Vec<u8>, Problem> {
        hex::decode(self.text(name)?).filter(|found| found.len() == bytes).ok_or_else(|| bad_value(name))
    }

    pub(crate) fn digest(&self, name: &str) -> Result<[u8; 32], Problem> {
        self.bytes(name, 32)?.try_into().map_err(|_| bad_value(name))
    }

    fn check(&self) -> Result<(), Problem> {
        let sorted: BTreeMap<&String, &String> = self.0.iter().collect();
        let same = checksum(sorted.into_iter()) == self.text(CHECKSUM)?;
        if same { Ok(()) } else { Err(Problem::HeaderChecksum) }
    }
}

pub(crate) fn bad_value(name: &str) -> Problem {
    Problem::Header(format!("'{name}' has no meaning"))
}

/// BLAKE3 over all entries but itself, ascending by name: length and bytes of the name, length and bytes of the value.
pub(crate) fn checksum<'a>(entries: impl Iterator<Item = (&'a String, &'a String)>) -> String {
    let mut hasher = blake3::Hasher::new();
    for (name, value) in entries.filter(|(name, _)| *name != CHECKSUM) {
        for text in [name, value] {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
    }
    hex::encode(hasher.finalize().as_bytes())
}

/// The format's name of a type.
pub(crate) fn stored_as(dtype: Dtype) -> safetensors::Dtype {
    match dtype {
        Dtype::F32 => safetensors::Dtype::F32,
        Dtype::F16 => safetensors::Dtype::F16,
        Dtype::Bf16 => safetensors::Dtype::BF16,
    }
}

/// A header has at most `most` bytes.
pub(crate) fn bound(length: u64, most: u64) -> Result<(), Problem> {
    if length > most {
        return Err(Problem::Header(format!("it claims {length} bytes, more than {most}")));
    }
    Ok(())
}

fn read_exact(reader: &mut dyn Read, out: &mut [u8], len: u64, needed: u64) -> Result<(), Problem> {
    if len < needed {
        return Err(Problem::Length { expected: needed, found: len });
    }
    reader.read_exact(out).map_err(|error| trouble(&error, needed, len))
}

/// A file that shrinks while it is read is truncated; everything else is the system's trouble.
pub(crate) fn trouble(error: &std::io::Error, expected: u64, found: u64) -> Problem {
    match error.kind() {
        ErrorKind::UnexpectedEof => Problem::Length { expected, found },
        _ => Problem::Io(error.to_string()),
    }
}
