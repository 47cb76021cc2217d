//! The objects of documents: their names, and their content as untrusted bytes.
//!
//! | object | content |
//! |---|---|
//! | `library.json` | the id of all documents as a whole |
//! | `documents/NAMESPACE/ID/document.json` | title, text and what is known of the chunks |
//! | `documents/NAMESPACE/ID/keys-HASH.json` | further chunk keys |
//! | `documents/NAMESPACE/ID/pinned` | nothing: the document is pinned |
//! | `documents/NAMESPACE/ID/removal-HASH.json` | keys of chunks of the removed document that are to be deleted |
//! | `documents/NAMESPACE/ID/removed` | nothing: the document was removed at the time of this object |
//! | `changes/TIME-RANDOM.json` | documents that were changed |
//!
//! `NAMESPACE` is a hash of the namespace, so that no namespace leads elsewhere, and `ID` follows from title and text. An object is
//! written once and never changed: two machines that write the same name write the same, and a change is an object that comes or goes.

use std::borrow::Cow;
use std::fmt;

use refrain_engine::Document;
use refrain_store::{ChunkKey, hex};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::replica::FoundDocument;
use crate::tables::document_id;

/// Most bytes of title and text of a document that is shared. In JSON a byte takes six at most.
pub(super) const MOST_TEXT: u64 = 16 << 20;
/// Most bytes of a document's object.
pub(super) const MOST_DOCUMENT: u64 = 8 * MOST_TEXT;
/// Most bytes of any other object.
pub(super) const MOST_BYTES: u64 = 16 << 20;
/// The version of all contents.
const VERSION: u32 = 1;
/// The object with the id of all documents as a whole.
pub(super) const LIBRARY: &str = "library.json";
/// The folder of documents.
pub(super) const DOCUMENTS: &str = "documents";
/// The folder of changes.
pub(super) const CHANGES: &str = "changes";
/// Digits of a hash in a name.
const HASH: usize = 32;

/// The reason for which an object's content is not used.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unusable {
    /// It is no content of its name.
    Broken(String),
    /// A newer program has written it.
    Newer(u32),
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unusable::Broken(why) => write!(f, "it is broken: {why}"),
            Unusable::Newer(version) => {
                write!(f, "it has version {version}, which this program does not know: use a newer one")
            }
        }
    }
}

/// `library.json`
#[derive(Serialize, Deserialize)]
pub(super) struct LibraryObject {
    pub(super) id: String,
}

/// `document.json`
#[derive(Serialize, Deserialize)]
pub(super) struct DocumentObject<'a> {
    pub(super) namespace: Cow<'a, str>,
    pub(super) title: Cow<'a, str>,
    pub(super) text: Cow<'a, str>,
    /// Seconds since 1970.
    pub(super) created: u64,
    /// Tokens and number of the chunks, for listings of those who cannot cut it.
    pub(super) tokens: usize,
    pub(super) chunks: u32,
    pub(super) chunk_keys: Vec<String>,
}

/// `keys-HASH.json` and `removal-HASH.json`
#[derive(Serialize, Deserialize)]
pub(super) struct KeysObject<'a> {
    pub(super) namespace: Cow<'a, str>,
    pub(super) chunk_keys: Vec<String>,
}

/// `changes/TIME-RANDOM.json`
#[derive(Serialize, Deserialize)]
pub(super) struct ChangesObject {
    /// Namespaces and ids.
    pub(super) documents: Vec<(String, String)>,
}

#[derive(Serialize, Deserialize)]
struct Versioned<T> {
    version: u32,
    #[serde(flatten)]
    content: T,
}

/// The version alone.
#[derive(Deserialize)]
struct VersionOnly {
    version: u32,
}

/// Asserts that a document is one that machines can share.
///
/// # Errors
/// [`Error::TooLarge`] if it has more than 16 MiB of title and text.
pub fn check_shareable(document: &Document) -> Result<(), Error> {
    let bytes = (document.title.len() + document.text.len()) as u64;
    if bytes > MOST_TEXT { Err(Error::TooLarge { bytes, most: MOST_TEXT }) } else { Ok(()) }
}

/// The bytes of an object.
pub(super) fn encode<T: Serialize>(content: T) -> Vec<u8> {
    // Structs of texts and numbers have a form in JSON.
    serde_json::to_vec(&Versioned { version: VERSION, content }).unwrap_or_default()
}

/// The content of an object.
pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Unusable> {
    let broken = |error: serde_json::Error| Unusable::Broken(error.to_string());
    let VersionOnly { version } = serde_json::from_slice(bytes).map_err(broken)?;
    if version > VERSION {
        return Err(Unusable::Newer(version));
    }
    let Versioned { content, .. } = serde_json::from_slice(bytes).map_err(broken)?;
    Ok(content)
}

/// The document of the object that lies in `place`.
pub(super) fn decode_document(bytes: &[u8], place: &Place) -> Result<FoundDocument, Unusable> {
    let object: DocumentObject<'static> = decode(bytes)?;
    let DocumentObject { namespace, title, text, created, tokens, chunks, chunk_keys } = object;
    let document = Document { title: title.into_owned(), text: text.into_owned() };
    if place_of(&namespace, &document_id(&document)) != *place {
        return Err(Unusable::Broken("it holds another document than its name says".to_owned()));
    }
    // A chunk has at least a byte of text.
    if u64::from(chunks) > MOST_TEXT {
        return Err(Unusable::Broken(format!("no text that is shared has {chunks} chunks")));
    }
    let keys = keys(&chunk_keys)?;
    Ok(FoundDocument { namespace: namespace.into_owned(), document, created, tokens, chunks, keys })
}

/// The chunk keys of an object.
pub(super) fn keys(texts: &[String]) -> Result<Vec<ChunkKey>, Unusable> {
    let key = |text: &String| text.parse().map_err(|_| Unusable::Broken(format!("{text:?} is no chunk key")));
    texts.iter().map(key).collect()
}

/// The chunk keys of `keys-HASH.json` or `removal-HASH.json` in `place`, with their namespace.
pub(super) fn decode_keys(bytes: &[u8], place: &Place) -> Result<(String, Vec<ChunkKey>), Unusable> {
    let KeysObject { namespace, chunk_keys } = decode(bytes)?;
    if namespace_name(&namespace) != place.namespace {
        return Err(Unusable::Broken("it is of another namespace than its name says".to_owned()));
    }
    Ok((namespace.into_owned(), keys(&chunk_keys)?))
}

/// The name's ending and the bytes of an object of chunk keys.
pub(super) fn encode_keys(namespace: &str, keys: &[ChunkKey]) -> (String, Vec<u8>) {
    let chunk_keys = keys.iter().map(ToString::to_string).collect();
    let bytes = encode(KeysObject { namespace: namespace.into(), chunk_keys });
    (format!("{}.json", hash("refrain chunk keys of a document, version 1", &bytes)), bytes)
}

/// The folder of a document's objects, named by hashes, so that no namespace and no id names another folder.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Place {
    /// The namespace's name in objects' names.
    pub(super) namespace: String,
    pub(super) id: String,
}

/// The place of a document. The id must have [the form of one](is_id).
pub(super) fn place_of(namespace: &str, id: &str) -> Place {
    Place { namespace: namespace_name(namespace), id: id.to_owned() }
}

impl Place {
    pub(super) fn folder(&self) -> String {
        format!("{DOCUMENTS}/{}/{}", self.namespace, self.id)
    }

    pub(super) fn name(&self, part: &str) -> String {
        format!("{}/{part}", self.folder())
    }

    /// The place and the last part of an object's name; none of a name that is no document's.
    pub(super) fn parse(name: &str) -> Option<(Place, &str)> {
        let mut parts = name.strip_prefix(DOCUMENTS)?.strip_prefix('/')?.splitn(3, '/');
        let (namespace, id, part) = (parts.next()?, parts.next()?, parts.next()?);
        let is_place = is_digits(namespace, HASH) && is_id(id);
        is_place.then(|| (Place { namespace: namespace.to_owned(), id: id.to_owned() }, part))
    }
}

pub(super) const DOCUMENT: &str = "document.json";
pub(super) const PINNED: &str = "pinned";
pub(super) const KEYS: &str = "keys-";
pub(super) const REMOVAL: &str = "removal-";
pub(super) const REMOVED: &str = "removed";

/// A namespace's name in objects' names.
fn namespace_name(namespace: &str) -> String {
    hash("refrain documents of a namespace, version 1", namespace.as_bytes())
}

fn hash(context: &str, bytes: &[u8]) -> String {
    let mut hasher = blake3::Hasher::new_derive_key(context);
    hasher.update(bytes);
    hex::encode(&hasher.finalize().as_bytes()[..HASH / 2])
}

/// Whether a text has the form of a document's id.
pub(super) fn is_id(id: &str) -> bool {
    id.strip_prefix("doc-").is_some_and(|digits| is_digits(digits, 24))
}

fn is_digits(text: &str, count: usize) -> bool {
    text.len() == count && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// The name of a change at a time in milliseconds since 1970.
pub(super) fn change_name(time: u64, random: u64) -> String {
    format!("{CHANGES}/{time:016x}-{random:016x}.json")
}

/// The name before those of all changes at this time, in milliseconds since 1970, and later.
pub(super) fn before_changes(time: u64) -> String {
    format!("{CHANGES}/{time:016x}")
}

/// When a change was made, in milliseconds since 1970; none of a name that is no change's.
pub(super) fn time_of_change(name: &str) -> Option<u64> {
    let name = name.strip_prefix(CHANGES)?.strip_prefix('/')?.strip_suffix(".json")?;
    let (time, random) = name.split_once('-')?;
    let is_name = is_digits(time, 16) && is_digits(random, 16);
    is_name.then(|| u64::from_str_radix(time, 16).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document() -> Document {
        Document { title: "A \"title\"".to_owned(), text: "螺栓\u{0}\n5 Nm".to_owned() }
    }

    fn object(namespace: &str, document: &Document) -> Vec<u8> {
        encode(DocumentObject {
            namespace: namespace.into(),
            title: (&document.title).into(),
            text: (&document.text).into(),
            created: 5,
            tokens: 7,
            chunks: 2,
            chunk_keys: vec![ChunkKey([3; 32]).to_string()],
        })
    }

    #[test]
    fn a_document_is_read_as_it_was_written_and_only_in_its_place() {
        let (document, bytes) = (document(), object("of/../x", &document()));
        let id = document_id(&document);
        let place = place_of("of/../x", &id);
        let found = decode_document(&bytes, &place).unwrap();
        let expected = FoundDocument {
            namespace: "of/../x".to_owned(),
            document,
            created: 5,
            tokens: 7,
            chunks: 2,
            keys: vec![ChunkKey([3; 32])],
        };
        assert_eq!(found, expected);
        for other in [place_of("", &id), place_of("of/../x", &format!("doc-{}", "0".repeat(24)))] {
            assert!(matches!(decode_document(&bytes, &other), Err(Unusable::Broken(_))));
        }
    }

    /// Whatever byte is changed or missing, the document is refused or is the one of its name.
    #[test]
    fn broken_bytes_are_told_and_never_another_document() {
        let bytes = object("", &document());
        let place = place_of("", &document_id(&document()));
        for index in 0..bytes.len() {
            for flipped in [0x01, 0x20, 0x80] {
                let mut changed = bytes.clone();
                changed[index] ^= flipped;
                if let Ok(found) = decode_document(&changed, &place) {
                    assert_eq!((found.document, found.namespace), (document(), String::new()));
                }
            }
            assert!(decode_document(&bytes[..index], &place).is_err());
        }
        let newer = String::from_utf8(bytes.clone()).unwrap().replace("\"version\":1", "\"version\":2");
        assert_eq!(decode_document(newer.as_bytes(), &place), Err(Unusable::Newer(2)));
        for (whole, broken) in [("0303", "03zz"), ("\"chunks\":2", "\"chunks\":4294967295")] {
            let changed = String::from_utf8(bytes.clone()).unwrap().replace(whole, broken);
            assert!(matches!(decode_document(changed.as_bytes(), &place), Err(Unusable::Broken(_))));
        }
    }

    /// The largest text that is shared fits into its object, whatever its characters.
    #[test]
    fn an_object_has_less_than_eight_bytes_a_byte_of_text() {
        for character in ["\u{1}", "\"", "é", "x"] {
            let text = character.repeat(1 << 16);
            let bytes = object("", &Document { title: String::new(), text: text.clone() });
            assert!(bytes.len() < 7 * text.len(), "{character:?}");
        }
        assert_eq!(MOST_DOCUMENT / MOST_TEXT, 8);
    }

    #[test]
    fn keys_are_read_in_their_namespace_alone() {
        let keys = [ChunkKey([1; 32]), ChunkKey([2; 32])];
        let (name, bytes) = encode_keys("x", &keys);
        assert_eq!(encode_keys("x", &keys).0, name);
        assert_ne!(encode_keys("x", &keys[..1]).0, name);
        let id = document_id(&document());
        assert_eq!(decode_keys(&bytes, &place_of("x", &id)), Ok(("x".to_owned(), keys.to_vec())));
        assert!(decode_keys(&bytes, &place_of("", &id)).is_err());
    }

    #[test]
    fn names_hold_hashes_alone_and_foreign_names_are_no_documents() {
        let id = document_id(&document());
        let hostile = ["", "/", "..", "../../library", "a/b\0c", &"x".repeat(5000), "shared", "%2e%2e"];
        let names: Vec<String> = hostile.iter().map(|of| place_of(of, &id).name(DOCUMENT)).collect();
        for name in &names {
            assert_eq!(name.len(), names[0].len());
            assert!(name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/-.".contains(&byte)));
            assert!(!name.contains("..") && Place::parse(name).unwrap().1 == DOCUMENT);
        }
        assert_eq!(names.iter().collect::<std::collections::BTreeSet<_>>().len(), hostile.len());
        for no_id in ["", "doc-", "doc-../../../../../../../..", "doc-0123456789abcdef0123456G", "DOC-0123"] {
            assert!(!is_id(no_id), "{no_id}");
        }
        let place = place_of("", &id);
        for foreign in ["documents", "documents/x", "ab/cd.safetensors", "documents/../..//x", LIBRARY] {
            assert_eq!(Place::parse(foreign), None, "{foreign}");
        }
        assert_eq!(Place::parse(&place.name("a/b")), Some((place, "a/b")));
    }

    #[test]
    fn changes_are_named_by_their_time_in_order() {
        let (one, two) = (change_name(0x1_9a0b_1c2d, 7), change_name(0x1_9a0b_1c2e, 3));
        assert!(one < two && before_changes(0x1_9a0b_1c2e) < two && one < before_changes(0x1_9a0b_1c2e));
        assert_eq!(time_of_change(&two), Some(0x1_9a0b_1c2e));
        for foreign in ["changes/x.json", "changes/", "documents/x", "changes/1-2.json"] {
            assert_eq!(time_of_change(foreign), None, "{foreign}");
        }
    }
}
