//! The manifest of a job: all that must be equal for everyone who works on it.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::objects::JobObjects;
use crate::{Error, Result};

/// The object of the manifest.
pub(crate) const MANIFEST: &str = "manifest.json";
/// The layout of a job's objects that this crate reads and writes.
const FORMAT: u32 = 1;
/// Most bytes of a manifest.
const MAX_MANIFEST: u64 = 256 << 20;

/// The manifest of a job. It is written once, and names the shards by what they hold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    format: u32,
    /// Version of the program that planned the job, and that runs it.
    pub version: String,
    /// The kind of its work: `ingest` or `eval`.
    pub kind: String,
    /// The settings that results depend on, by name.
    pub settings: Map<String, Value>,
    /// The shards, in order.
    pub shards: Vec<Shard>,
}

/// A part of a job, done by one runner at a time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// BLAKE3 of its items as they are written, hexadecimal: the name of their object.
    pub hash: String,
    /// Number of its items.
    pub items: usize,
    /// Work of all of them: tokens of documents, or samples to be answered.
    pub weight: u64,
}

impl Manifest {
    pub(crate) fn new(kind: &str, settings: Map<String, Value>, shards: Vec<Shard>) -> Manifest {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Manifest { format: FORMAT, version, kind: kind.to_owned(), settings, shards }
    }

    /// The manifest at a URL, and its bytes; none if nothing was planned there.
    pub(crate) fn read(objects: &JobObjects) -> Result<Option<(Manifest, Vec<u8>)>> {
        let Some(bytes) = objects.get(MANIFEST, MAX_MANIFEST)? else { return Ok(None) };
        Ok(Some((Manifest::parse(&bytes)?, bytes)))
    }

    fn parse(bytes: &[u8]) -> Result<Manifest> {
        #[derive(Deserialize)]
        struct Format {
            format: u32,
        }
        let broken = |error: serde_json::Error| Error::broken(MANIFEST, error);
        let Format { format } = serde_json::from_slice(bytes).map_err(broken)?;
        if format != FORMAT {
            let reason = format!("it has format {format}, and this program reads format {FORMAT}");
            return Err(Error::broken(MANIFEST, reason));
        }
        let manifest: Manifest = serde_json::from_slice(bytes).map_err(broken)?;
        let is_hash = |hash: &str| hash.len() == 64 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
        match manifest.shards.iter().position(|shard| !is_hash(&shard.hash)) {
            Some(index) => Err(Error::broken(MANIFEST, format!("shard {index} has no hash of 64 digits"))),
            None => Ok(manifest),
        }
    }

    pub(crate) fn bytes(&self) -> Result<Vec<u8>> {
        serde_json::to_vec_pretty(self).map_err(|error| Error::broken(MANIFEST, error))
    }

    /// The hash that the results of this job carry.
    pub(crate) fn hash(bytes: &[u8]) -> String {
        blake3::hash(bytes).to_hex()[..16].to_owned()
    }

    /// Number of all items.
    pub fn items(&self) -> usize {
        self.shards.iter().map(|shard| shard.items).sum()
    }

    /// Work of all items.
    pub fn weight(&self) -> u64 {
        self.shards.iter().map(|shard| shard.weight).sum()
    }

    /// Asserts that `other`, which is to be planned or run, is this job.
    ///
    /// # Errors
    /// The settings that differ.
    pub(crate) fn check_same(&self, other: &Manifest) -> Result<()> {
        let mut differences = self.different_settings(&other.version, &other.kind, &other.settings);
        if self.shards != other.shards {
            let of = |manifest: &Manifest| {
                format!("{} items in {} shards", manifest.items(), manifest.shards.len())
            };
            let (was, is) = (of(self), of(other));
            differences.push(if was == is { "other items".to_owned() } else { format!("{was}, not {is}") });
        }
        if differences.is_empty() { Ok(()) } else { Err(Error::OtherJob { differences }) }
    }

    /// Asserts that a runner has the settings that the job was planned with.
    ///
    /// # Errors
    /// The settings that differ.
    pub fn check_settings(&self, kind: &str, settings: &Map<String, Value>) -> Result<()> {
        let differences = self.different_settings(env!("CARGO_PKG_VERSION"), kind, settings);
        if differences.is_empty() { Ok(()) } else { Err(Error::OtherJob { differences }) }
    }

    fn different_settings(&self, version: &str, kind: &str, settings: &Map<String, Value>) -> Vec<String> {
        let mut differences = Vec::new();
        let mut compare = |name: &str, was: Option<&Value>, is: Option<&Value>| {
            if was != is {
                differences.push(format!("{} {}, not {}", name.replace('_', " "), text(was), text(is)));
            }
        };
        compare("version", Some(&self.version.as_str().into()), Some(&version.into()));
        compare("kind", Some(&self.kind.as_str().into()), Some(&kind.into()));
        let added = settings.keys().filter(|name| !self.settings.contains_key(*name));
        for name in self.settings.keys().chain(added) {
            compare(name, self.settings.get(name), settings.get(name));
        }
        differences
    }
}

/// A setting as a person reads it.
fn text(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => "none".to_owned(),
        Some(Value::String(text)) if text.is_empty() => "none".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}
