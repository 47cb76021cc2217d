//! Downloads into the hub's cache, as other programs lay it out.
//!
//! The hub's client would retry a download at the wrong place of the file, and looks at neither its length nor its hash.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use hf_hub::CacheRepo;

use super::client::{Client, Metadata};
use crate::checksum::checksum;
use crate::output::{Console, Fail};

/// Times that a download is tried.
const TRIES: u32 = 4;

/// Wait before the second try; that before the third is twice as long.
const WAIT: Duration = Duration::from_millis(300);

/// Downloads of a repository's files.
pub(super) struct Downloads<'a> {
    pub(super) console: &'a Console,
    pub(super) cache: &'a CacheRepo,
    pub(super) client: &'a Client,
}

impl Downloads<'_> {
    /// Downloads a file, or the rest of one whose download was interrupted.
    ///
    /// # Errors
    /// A [`Fail`] if this machine is to blame, any other error if the hub or the way there is.
    pub(super) fn file(&self, url: &str, file: &str) -> Result<()> {
        let Metadata { etag, commit, size } = self.client.metadata(url)?;
        // A proxy that compresses marks the tag as weak.
        let (etag, commit) = (etag.trim_start_matches("W/"), commit.as_str());
        // Both become names of files in the cache.
        for (what, name) in [("etag", etag), ("commit", commit)] {
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
            ensure!(
                !name.is_empty() && name.bytes().all(is_plain),
                "the hub's {what} of {file} cannot name a file: '{name}'"
            );
        }
        let (blob, pointer) = (self.cache.blob_path(etag), self.cache.pointer_path(commit).join(file));
        for path in [&blob, &pointer] {
            path.parent().map_or(Ok(()), fs::create_dir_all).map_err(|error| unwritable(path, error))?;
        }
        let lock_path = blob.with_extension("lock");
        let lock = File::create(&lock_path).map_err(|error| unwritable(&lock_path, error))?;
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            return Err(Fail::new(format!("{file} is being fetched by another process")).into());
        }
        let part = blob.with_extension("part");
        let mut tries = 1;
        while let Err(error) = self.try_once(url, &part, etag, size) {
            if tries == TRIES || error.is::<Fail>() {
                return Err(error);
            }
            thread::sleep(WAIT * tries);
            tries += 1;
        }
        fs::rename(&part, &blob).map_err(|error| unwritable(&blob, error))?;
        let up = "../".repeat(2 + file.matches('/').count());
        // A run that ended before its commit was noted leaves a link.
        let _ = fs::remove_file(&pointer);
        symlink(format!("{up}blobs/{etag}"), &pointer).map_err(|error| unwritable(&pointer, error))?;
        self.cache.create_ref(commit).map_err(|error| unwritable(&pointer, error))
    }

    /// Downloads what `part` lacks, and holds the whole against its length and, where `etag` is one, its SHA-256.
    fn try_once(&self, url: &str, part: &Path, etag: &str, size: u64) -> Result<()> {
        let is_sum = etag.len() == 64 && etag.bytes().all(|byte| byte.is_ascii_hexdigit());
        let local = |error| unwritable(part, error);
        let mut file = OpenOptions::new().create(true).append(true).open(part).map_err(local)?;
        let mut length = file.metadata().map_err(local)?.len();
        // Only what can be held against a sum is gone on with.
        if length > size || !is_sum {
            file.set_len(0).map_err(local)?;
            length = 0;
        }
        if length < size {
            length = self.append(url, &mut file, length, size)?.map_err(local)?;
        }
        ensure!(length == size, "the download ended after {length} of {size} bytes");
        if is_sum {
            let sum = checksum(self.console, part)?;
            if !sum.eq_ignore_ascii_case(etag) {
                fs::remove_file(part).map_err(local)?;
                bail!("its SHA-256 is {sum}, and {etag} was expected");
            }
        }
        Ok(())
    }

    /// Downloads from `start` on. Returns the length of the file, or why it cannot be written.
    fn append(&self, url: &str, file: &mut File, start: u64, size: u64) -> Result<io::Result<u64>> {
        let response = self.client.rest(url, start)?;
        let range = response.headers().get("content-range").and_then(|range| range.to_str().ok());
        // A mirror without ranges sends the whole file.
        ensure!(
            (start == 0 && range.is_none())
                || range.is_some_and(|range| range.starts_with(&format!("bytes {start}-"))),
            "the bytes from {start} on were asked for, and the answer has others"
        );
        let bar = self.console.bar("fetching", "{bytes} of {total_bytes}, {bytes_per_sec}{left}");
        bar.set_length(size);
        let (mut length, mut block) = (start, vec![0; 1 << 16]);
        let mut reader = response.into_body().into_reader().take(size - start);
        loop {
            bar.set_position(length);
            match reader.read(&mut block).context("the connection broke")? {
                0 => break,
                read => match file.write_all(&block[..read]) {
                    Ok(()) => length += read as u64,
                    Err(error) => return Ok(Err(error)),
                },
            }
        }
        bar.finish_and_clear();
        Ok(Ok(length))
    }
}

/// The cache takes no file at this path.
fn unwritable(path: &Path, error: io::Error) -> anyhow::Error {
    let fail = Fail::new(format!("cannot write {}", path.display())).hint(
        "the hub's cache must be writable and have room for the model; HF_HUB_CACHE names another folder for it",
    );
    anyhow!(error).context(fail)
}
