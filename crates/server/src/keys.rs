//! API keys: who asks, and which namespace is theirs.
//!
//! A file has a line `NAME HASH` for each key; the key itself is stored nowhere. It is 256 random bits, so that a plain
//! hash keeps it. A namespace follows from the key (see [`refrain_store::NamespaceKey`]), and never from what a request says.

use std::fs;
use std::io;
use std::path::Path;

/// What keys begin with.
const PREFIX: &str = "sk-refrain-";
/// Domain of the hash.
const CONTEXT: &str = "refrain API key, version 1";

/// The keys that are let in.
#[derive(Debug, Default)]
pub struct Keys(Vec<Key>);

#[derive(Debug)]
struct Key {
    name: String,
    hash: blake3::Hash,
}

/// Why a file of keys cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeysError {
    /// It cannot be read or written.
    #[error("cannot use the file of API keys {path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// What the system says.
        source: io::Error,
    },
    /// A line is no key.
    #[error("line {line} of {path} is not NAME HASH: `refrain key new NAME` makes one")]
    Line {
        /// The file.
        path: String,
        /// Its line, from 1.
        line: usize,
    },
    /// No random bits.
    #[error("cannot make a key: {0}")]
    Random(getrandom::Error),
    /// A name that cannot be one.
    #[error("{0:?} is no name of a key: letters, digits, `-`, `_`, `.` and `@`, not there yet")]
    Name(String),
}

fn hash(key: &str) -> blake3::Hash {
    blake3::Hasher::new_derive_key(CONTEXT).update(key.as_bytes()).finalize()
}

impl Keys {
    /// Reads a file. Empty lines, and those that begin with `#`, are passed over.
    ///
    /// # Errors
    /// If it cannot be read, or a line is no key.
    pub fn read(path: &Path) -> Result<Keys, KeysError> {
        let text = fs::read_to_string(path).map_err(|source| io(path, source))?;
        let mut keys = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = || KeysError::Line { path: path.display().to_string(), line: index + 1 };
            let (name, hash) = line.split_once(char::is_whitespace).ok_or_else(wrong)?;
            let hash = blake3::Hash::from_hex(hash.trim()).map_err(|_| wrong())?;
            keys.push(Key { name: name.to_owned(), hash });
        }
        Ok(Keys(keys))
    }

    /// Makes a key, writes its hash to the file, which is made if it is missing, and returns it: it is shown only now.
    ///
    /// # Errors
    /// If the name is there or is none, or the file cannot be read or written.
    pub fn add(path: &Path, name: &str) -> Result<String, KeysError> {
        let known = if path.exists() { Keys::read(path)? } else { Keys::default() };
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.@".contains(c);
        if name.is_empty() || !name.chars().all(is_name) || known.0.iter().any(|key| key.name == name) {
            return Err(KeysError::Name(name.to_owned()));
        }
        let mut bits = [0; 32];
        getrandom::fill(&mut bits).map_err(KeysError::Random)?;
        let key = format!("{PREFIX}{}", bits.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
        let mut options = fs::OpenOptions::new();
        options.create(true).append(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let ends = fs::read(path).is_ok_and(|bytes| bytes.last().is_some_and(|last| *last != b'\n'));
        let line = format!("{}{name} {}\n", if ends { "\n" } else { "" }, hash(&key).to_hex());
        let written =
            options.open(path).and_then(|mut file| io::Write::write_all(&mut file, line.as_bytes()));
        written.map_err(|source| io(path, source))?;
        Ok(key)
    }

    /// Whether anybody is let in.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The name of a key that is let in. Every key is compared, each in the same time.
    pub(crate) fn name(&self, key: &str) -> Option<&str> {
        let presented = hash(key);
        // `Hash` compares in constant time.
        self.0
            .iter()
            .fold(None, |found, known| if known.hash == presented { Some(&known.name) } else { found })
    }
}

fn io(path: &Path, source: io::Error) -> KeysError {
    KeysError::Io { path: path.display().to_string(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_let_in_and_its_file_does_not_hold_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        let (anna, bob) = (Keys::add(&path, "anna").unwrap(), Keys::add(&path, "bob").unwrap());
        assert!(matches!(Keys::add(&path, "bob"), Err(KeysError::Name(_))));
        assert!(matches!(Keys::add(&path, "two words"), Err(KeysError::Name(_))));
        let text = fs::read_to_string(&path).unwrap();
        assert!(!text.contains(&anna[PREFIX.len()..]));
        let keys = Keys::read(&path).unwrap();
        assert_eq!((keys.name(&anna), keys.name(&bob)), (Some("anna"), Some("bob")));
        for wrong in ["", "sk-refrain-", &anna[1..], &anna.to_uppercase(), &format!("{anna}0")] {
            assert_eq!(keys.name(wrong), None, "{wrong}");
        }
        #[cfg(unix)]
        assert_eq!(
            std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&path).unwrap().permissions()) & 0o77,
            0
        );
        fs::write(&path, "# who\n\nanna notahash\n").unwrap();
        assert!(Keys::read(&path).unwrap_err().to_string().contains("line 3"));
    }
}
