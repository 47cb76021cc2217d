//! Whose a chunk is: a namespace that follows from what its owner can prove, and from a key that only the program has.

use std::fmt;
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::Path;

use crate::file_names::{NAMESPACE_KEY, TEMPORARY};
use crate::folder::sync_dir;
use crate::hex;
use crate::{Result, StoreError};

/// The namespace of chunks that everybody may use, where the configuration allows it.
pub const SHARED: &str = "shared";
/// Domain of the keyed hash that gives namespaces.
const CONTEXT: &str = "refrain namespace, version 1";
/// Domain of the keyed hash that signs messages.
const SIGNATURE_CONTEXT: &str = "refrain gateway signature, version 1";
/// Bytes of a namespace's name before it is written in hexadecimal digits.
const NAME: usize = 16;

/// The key that namespaces are derived with. Programs with the same key, on one machine or several, give the same credential the
/// same namespace; without it nobody can tell which credential a namespace belongs to.
#[derive(Clone, PartialEq, Eq)]
pub struct NamespaceKey([u8; 32]);

impl NamespaceKey {
    /// The key in a file: 64 hexadecimal digits.
    ///
    /// # Errors
    /// If the file cannot be read, or holds no key.
    pub fn read(path: &Path) -> Result<NamespaceKey> {
        let failed = |action, source| StoreError::Io { action, path: path.to_owned(), source };
        let text = fs::read_to_string(path).map_err(|error| failed("read the key", error))?;
        let no_key = "it is not 64 hexadecimal digits; `openssl rand -hex 32` makes a key";
        text.trim()
            .parse()
            .map_err(|()| failed("use the key", std::io::Error::new(ErrorKind::InvalidData, no_key)))
    }

    /// The key of a store's folder, which is made, at random and readable by its owner only, if it is missing.
    ///
    /// # Errors
    /// If it can be neither read nor made, or is no key.
    pub fn of_folder(folder: &Path) -> Result<NamespaceKey> {
        let path = folder.join(NAMESPACE_KEY);
        match NamespaceKey::read(&path) {
            Err(StoreError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {}
            read => return read,
        }
        let failed = |source| StoreError::Io { action: "make the key", path: path.clone(), source };
        let mut key = [0; 32];
        getrandom::fill(&mut key).map_err(|error| failed(std::io::Error::other(error)))?;
        let mut file = tempfile::Builder::new().prefix(TEMPORARY).tempfile_in(folder).map_err(failed)?;
        writeln!(file, "{}", hex::encode(&key)).map_err(failed)?;
        file.as_file().sync_all().map_err(failed)?;
        match file.persist_noclobber(&path) {
            Ok(_) => sync_dir(folder).map(|()| NamespaceKey(key)),
            // Another process was faster.
            Err(error) if error.error.kind() == ErrorKind::AlreadyExists => NamespaceKey::read(&path),
            Err(error) => Err(failed(error.error)),
        }
    }

    /// The namespace of the holder of this credential (an API key, say): 32 hexadecimal digits, BLAKE3 keyed with this key.
    /// None without a credential is the namespace without a name.
    pub fn namespace(&self, credential: Option<&str>) -> String {
        let Some(credential) = credential else { return String::new() };
        let mut hasher = blake3::Hasher::new_keyed(&blake3::derive_key(CONTEXT, &self.0));
        hasher.update(credential.as_bytes());
        hex::encode(&hasher.finalize().as_bytes()[..NAME])
    }

    /// The signature of a message between programs that have this key: 64 hexadecimal digits, BLAKE3 keyed with this key. Namespaces
    /// are hashes of another domain, so that no credential can be chosen for its namespace to be a signature.
    pub fn sign(&self, message: &str) -> String {
        self.signature(message).to_hex().to_string()
    }

    /// Whether `signature` is that of the message. The time that this takes tells nothing of the right one.
    pub fn is_signed(&self, message: &str, signature: &str) -> bool {
        // `blake3::Hash` compares in constant time.
        blake3::Hash::from_hex(signature).is_ok_and(|shown| shown == self.signature(message))
    }

    fn signature(&self, message: &str) -> blake3::Hash {
        blake3::keyed_hash(&blake3::derive_key(SIGNATURE_CONTEXT, &self.0), message.as_bytes())
    }
}

impl std::str::FromStr for NamespaceKey {
    type Err = ();

    /// Reads 64 hexadecimal digits.
    fn from_str(text: &str) -> Result<NamespaceKey, ()> {
        hex::decode(text).and_then(|bytes| bytes.try_into().ok()).map(NamespaceKey).ok_or(())
    }
}

/// A secret is not shown.
impl fmt::Debug for NamespaceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NamespaceKey(…)")
    }
}
