//! Checksums of files.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use anyhow::{Context as _, Result};
use refrain::store::hex;
use sha2::{Digest, Sha256};

use crate::output::Console;

/// SHA-256 of a file, hexadecimal.
pub(crate) fn checksum(console: &Console, path: &Path) -> Result<String> {
    let sum = || -> io::Result<String> {
        let mut file = File::open(path)?;
        let bar = console.bar("verifying", "{bytes} of {total_bytes}");
        bar.set_length(file.metadata()?.len());
        let (mut hasher, mut block) = (Sha256::new(), vec![0; 1 << 20]);
        loop {
            match file.read(&mut block)? {
                0 => break,
                length => {
                    hasher.update(&block[..length]);
                    bar.inc(length as u64);
                }
            }
        }
        bar.finish_and_clear();
        Ok(hex::encode(&hasher.finalize()))
    };
    sum().with_context(|| format!("cannot read {}", path.display()))
}
