//! The items of a shard: one JSON object a line.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::manifest::Shard;
use crate::objects::JobObjects;
use crate::{Error, Result};

/// Most bytes of a shard. One document may have as many as a file that is read.
const MAX_SHARD: u64 = 1 << 30;
/// Most characters of an item's id.
const MAX_ID: usize = 128;

/// The smallest part of a job: a document, or a sample to be answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Item<T> {
    /// Its id, unique in the job: letters, digits, `-`, `_` and `.`.
    pub id: String,
    /// Its work, in the unit of the job.
    pub weight: u64,
    /// The thing itself.
    pub body: T,
}

/// The object of a shard.
pub(crate) fn name(shard: &Shard) -> String {
    format!("shards/{}.jsonl", shard.hash)
}

/// Whether a text may be the id of an item, of which the name of an object is made.
pub(crate) fn is_id(id: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=MAX_ID).contains(&id.len()) && id.bytes().all(allowed) && !id.starts_with('.')
}

/// The items of a shard, verified by its hash.
///
/// # Errors
/// If the object is missing or broken.
pub(crate) fn read<T: DeserializeOwned>(objects: &JobObjects, shard: &Shard) -> Result<Vec<Item<T>>> {
    let name = name(shard);
    let bytes = objects.get(&name, MAX_SHARD)?.ok_or_else(|| Error::broken(&name, "it is missing"))?;
    parse(&name, shard, &bytes)
}

fn parse<T: DeserializeOwned>(name: &str, shard: &Shard, bytes: &[u8]) -> Result<Vec<Item<T>>> {
    if blake3::hash(bytes).to_hex().as_str() != shard.hash {
        return Err(Error::broken(name, "its bytes are not those that were planned"));
    }
    let lines = bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let items = lines.zip(1..).map(|(line, number)| {
        let broken = |reason: String| Error::broken(name, format!("line {number}: {reason}"));
        let item: Item<T> = serde_json::from_slice(line).map_err(|error| broken(error.to_string()))?;
        if is_id(&item.id) { Ok(item) } else { Err(broken(format!("{:?} is no id", item.id))) }
    });
    items.collect()
}
