//! Files of benchmarks' data.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use super::haystack::read;
use crate::{Error, Result};

/// A file that was read.
pub(crate) struct DataFile {
    pub(crate) path: PathBuf,
    pub(crate) text: String,
}

impl DataFile {
    pub(crate) fn open(path: &Path) -> Result<DataFile> {
        Ok(DataFile { path: path.into(), text: read(path)? })
    }

    /// The first of some files that a folder has.
    pub(crate) fn find(folder: &Path, names: &[String]) -> Result<DataFile> {
        let path = names.iter().map(|name| folder.join(name)).find(|path| path.is_file());
        let path = path.ok_or_else(|| {
            let names = names.join(", nor ");
            Error::data(
                folder,
                format!("has no {names}; `refrain eval fetch` explains where data comes from"),
            )
        })?;
        DataFile::open(&path)
    }

    /// The name without folder and extension.
    pub(crate) fn stem(&self) -> &str {
        self.path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default()
    }

    /// BLAKE3, hexadecimal.
    pub(crate) fn hash(&self) -> String {
        blake3::hash(self.text.as_bytes()).to_hex().to_string()
    }

    /// Its lines as JSON, but for blank ones; at least one.
    pub(crate) fn lines<T: DeserializeOwned>(&self) -> Result<Vec<T>> {
        self.checked_lines(|_| None)
    }

    /// Its lines as JSON, of which `fault` finds nothing wrong.
    pub(crate) fn checked_lines<T: DeserializeOwned>(
        &self,
        fault: impl Fn(&T) -> Option<&'static str>,
    ) -> Result<Vec<T>> {
        let lines = self.text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty());
        let records = lines.map(|(line, number)| {
            let record =
                serde_json::from_str(line).map_err(|error| self.wrong_line(number, &error.to_string()))?;
            fault(&record).map_or(Ok(record), |fault| Err(self.wrong_line(number, fault)))
        });
        let records = records.collect::<Result<Vec<T>>>()?;
        if records.is_empty() {
            return Err(self.wrong("no records in it"));
        }
        Ok(records)
    }

    pub(crate) fn wrong(&self, reason: impl ToString) -> Error {
        Error::data(&self.path, reason)
    }

    /// A fault of a line, counted from 1. A JSON error's own line is that of the record, which is always 1.
    fn wrong_line(&self, number: usize, reason: &str) -> Error {
        self.wrong(format!("line {number}: {}", reason.replace(" at line 1 column ", " at column ")))
    }
}

/// The first `limit` of `count` things in an order whose every beginning is spread over all of them: files are often sorted by
/// length, and a run may be stopped. (Van der Corput: numbers with their bits turned round.)
pub(crate) fn spread(count: usize, limit: Option<usize>) -> impl Iterator<Item = usize> {
    let bits = count.next_power_of_two().trailing_zeros();
    let turned = (0..1usize << bits)
        .map(move |i| if bits == 0 { 0 } else { i.reverse_bits() >> (usize::BITS - bits) });
    turned.filter(move |i| *i < count).take(limit.unwrap_or(count))
}

#[cfg(test)]
mod tests {
    use super::spread;

    #[test]
    fn every_beginning_is_spread_over_all() {
        assert_eq!(spread(8, None).collect::<Vec<_>>(), [0, 4, 2, 6, 1, 5, 3, 7]);
        assert_eq!(spread(5, Some(3)).collect::<Vec<_>>(), [0, 4, 2]);
        assert_eq!(
            (spread(0, None).count(), spread(1, None).count(), spread(40, Some(99)).count()),
            (0, 1, 40)
        );
        let mut all: Vec<usize> = spread(40, None).collect();
        let half: usize = all[..20].iter().sum();
        assert!((15 * 20..25 * 20).contains(&half), "{half}");
        all.sort_unstable();
        assert_eq!(all, (0..40).collect::<Vec<_>>());
    }
}
