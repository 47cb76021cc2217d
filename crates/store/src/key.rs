//! Names of chunks.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use crate::hex;

/// The name of a chunk. Shown and read as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkKey(pub [u8; 32]);

impl ChunkKey {
    /// The first digits, enough to tell chunks apart in a list.
    pub fn short(&self) -> ShortKey {
        ShortKey(*self)
    }
}

impl fmt::Display for ChunkKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&hex::encode(&self.0))
    }
}

impl fmt::Debug for ChunkKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChunkKey({self})")
    }
}

impl FromStr for ChunkKey {
    type Err = InvalidKey;

    fn from_str(s: &str) -> Result<ChunkKey, InvalidKey> {
        let bad = || InvalidKey { text: s.to_owned(), expected: "64" };
        hex::decode(s).and_then(|bytes| bytes.try_into().ok()).map(ChunkKey).ok_or_else(bad)
    }
}

impl Serialize for ChunkKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Shows the first 12 hexadecimal digits of a [`ChunkKey`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShortKey(ChunkKey);

impl fmt::Display for ShortKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&hex::encode(&self.0.0[..6]))
    }
}

/// Text that is not a key, nor the beginning of one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is no chunk key: give {expected} hexadecimal digits")]
#[non_exhaustive]
pub struct InvalidKey {
    /// The text.
    pub text: String,
    /// How many digits there may be.
    pub expected: &'static str,
}
