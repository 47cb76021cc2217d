//! API keys and the file that lists them.
//!
//! The file has a line `NAME HASH` for each key. The key itself is stored nowhere: it is 256 random bits, so a plain hash
//! protects it. A tenant's namespace follows from the key (see [`refrain::store::NamespaceKey`]), and never from the content of
//! a request.

use std::fs;
use std::io;
use std::path::Path;

use axum::http::{HeaderMap, StatusCode, header};
use refrain::store::hex;

use crate::api_error::ApiError;

/// Prefix of every key.
const PREFIX: &str = "sk-refrain-";
/// Domain of the hash of a key.
const CONTEXT: &str = "refrain API key, version 1";

/// The API keys that a server accepts.
#[derive(Debug, Default)]
pub struct ApiKeys(Vec<ApiKey>);

#[derive(Debug)]
struct ApiKey {
    name: String,
    hash: blake3::Hash,
}

/// The reason for which a file of API keys cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ApiKeysError {
    /// The file cannot be read or written.
    #[error("cannot use the file of API keys {path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// The system's error.
        source: io::Error,
    },
    /// A line is not a name and a hash.
    #[error("line {line} of {path} is not NAME HASH: `refrain key new NAME` makes one")]
    Line {
        /// The file.
        path: String,
        /// Number of the line, from 1.
        line: usize,
    },
    /// The system has no random bits.
    #[error("cannot make a key: {0}")]
    Random(getrandom::Error),
    /// The name has other characters than the allowed ones, or the file has it already.
    #[error(
        "{0:?} is no name for a new key: it takes letters, digits, `-`, `_`, `.` and `@`, and no name that the file has already"
    )]
    Name(String),
}

fn hash(key: &str) -> blake3::Hash {
    blake3::Hasher::new_derive_key(CONTEXT).update(key.as_bytes()).finalize()
}

impl ApiKeys {
    /// Reads a file of keys. Empty lines, and those that begin with `#`, are skipped.
    ///
    /// # Errors
    /// If the file cannot be read, or a line is not a name and a hash.
    pub fn read(path: &Path) -> Result<ApiKeys, ApiKeysError> {
        let text = fs::read_to_string(path).map_err(|source| io(path, source))?;
        let mut keys = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = || ApiKeysError::Line { path: path.display().to_string(), line: index + 1 };
            let (name, hash) = line.split_once(char::is_whitespace).ok_or_else(wrong)?;
            let hash = blake3::Hash::from_hex(hash.trim()).map_err(|_| wrong())?;
            keys.push(ApiKey { name: name.to_owned(), hash });
        }
        Ok(ApiKeys(keys))
    }

    /// Makes a new key and appends its name and hash to the file, which is created if it is missing. Returns the key, which
    /// cannot be read from the file later.
    ///
    /// # Errors
    /// If the name is not allowed or taken, or the file cannot be read or written.
    pub fn add(path: &Path, name: &str) -> Result<String, ApiKeysError> {
        let known = if path.exists() { ApiKeys::read(path)? } else { ApiKeys::default() };
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.@".contains(c);
        if name.is_empty() || !name.chars().all(is_name) || known.0.iter().any(|key| key.name == name) {
            return Err(ApiKeysError::Name(name.to_owned()));
        }
        let mut bits = [0; 32];
        getrandom::fill(&mut bits).map_err(ApiKeysError::Random)?;
        let key = format!("{PREFIX}{}", hex::encode(&bits));
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

    /// Whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The name of the accepted key that a request shows as a bearer token, and the key.
    ///
    /// # Errors
    /// If the request shows none, or one that is not accepted.
    pub fn shown<'a>(&'a self, headers: &'a HeaderMap) -> Result<(&'a str, &'a str), ApiError> {
        let shown = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let key = shown.and_then(|value| value.split_once(' '));
        let key = key.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).map(|(_, key)| key.trim());
        let refused =
            |message: &str| ApiError::new(StatusCode::UNAUTHORIZED, message).with_code("invalid_api_key");
        let key = key.ok_or_else(|| refused("an API key is needed: Authorization: Bearer KEY"))?;
        Ok((self.name(key).ok_or_else(|| refused("the API key is unknown"))?, key))
    }

    /// The name of an accepted key. All keys are compared, each in constant time.
    fn name(&self, key: &str) -> Option<&str> {
        let presented = hash(key);
        // `blake3::Hash` compares in constant time.
        self.0
            .iter()
            .fold(None, |found, known| if known.hash == presented { Some(&known.name) } else { found })
    }
}

fn io(path: &Path, source: io::Error) -> ApiKeysError {
    ApiKeysError::Io { path: path.display().to_string(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_accepted_and_its_file_does_not_contain_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        let (anna, bob) = (ApiKeys::add(&path, "anna").unwrap(), ApiKeys::add(&path, "bob").unwrap());
        assert!(matches!(ApiKeys::add(&path, "bob"), Err(ApiKeysError::Name(_))));
        assert!(matches!(ApiKeys::add(&path, "two words"), Err(ApiKeysError::Name(_))));
        let text = fs::read_to_string(&path).unwrap();
        assert!(!text.contains(&anna[PREFIX.len()..]));
        let keys = ApiKeys::read(&path).unwrap();
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
        assert!(ApiKeys::read(&path).unwrap_err().to_string().contains("line 3"));
    }
}
