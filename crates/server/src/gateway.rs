//! The gateway before several servers. It checks API keys itself and signs whose a request is, and each server reports to it which
//! chunks it holds and how busy it is.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use refrain::store::{ChunkKey, NamespaceKey};
use serde::{Deserialize, Serialize};

use crate::random::random_seed;

/// Header in which a gateway tells whose a request is: `SIGNATURE:NAMESPACE:NAME`. The signature is made with the namespace key, which
/// gateways and servers share and clients do not know.
pub const TENANT_HEADER: &str = "x-refrain-tenant";

/// Changes of the held chunks that are remembered: a reader that saw none of the last ones is sent the whole list.
const REMEMBERED: usize = 64;
/// Least time between two comparisons of the store with the list.
const COMPARE_EVERY: Duration = Duration::from_millis(200);

/// The value of [`TENANT_HEADER`] for the holder `name` of an API key, whose chunks lie in `namespace`.
pub fn sign_tenant(key: &NamespaceKey, name: &str, namespace: &str) -> String {
    let tenant = format!("{namespace}:{name}");
    format!("{}:{tenant}", key.sign(&tenant))
}

/// Name and namespace of a signed tenant; none if the signature is wrong.
pub fn signed_tenant<'a>(key: &NamespaceKey, signed: &'a str) -> Option<(&'a str, &'a str)> {
    let (signature, tenant) = signed.split_once(':')?;
    let (namespace, name) = tenant.split_once(':')?;
    key.is_signed(tenant, signature).then_some((name, namespace))
}

/// A chunk's key among those of a report: the first 8 bytes of its name, most significant first. Two chunks with the same key cost time
/// and change no answer, since a gateway only chooses servers by them.
pub fn short_key(key: &ChunkKey) -> u64 {
    let [first, ..] = key.0.as_chunks::<8>().0 else { return 0 };
    u64::from_be_bytes(*first)
}

/// A server's report to a gateway.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Number of the server's start, at random; sequence numbers of another start mean nothing.
    pub epoch: u64,
    /// Number of the last change of the held chunks.
    pub sequence: u64,
    /// The chunks that are held in memory and on disk.
    pub chunks: HeldChunks,
    /// Requests whose answer is decoded.
    pub running: usize,
    /// Requests that have no token yet: in the queue, or being prefilled or ingested.
    pub waiting: usize,
    /// What the server measures of itself.
    pub rates: Rates,
    /// Whether the server shuts down and takes no more requests.
    pub stopping: bool,
    /// Whether it can take requests: it has compared its documents with those of other machines, and its device computes. A server of an older
    /// version does not tell it.
    #[serde(default = "is_ready_unless_told")]
    pub ready: bool,
    /// The served model.
    pub model: ModelCard,
}

fn is_ready_unless_told() -> bool {
    true
}

impl Report {
    /// Whether the server takes requests.
    pub fn takes_requests(&self) -> bool {
        self.ready && !self.stopping
    }
}

/// What a server measures of itself, as averages of its latest requests. 0 where nothing is known yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Seconds for which a request is computed up to its first token.
    pub seconds: f64,
    /// Tokens of prompts computed a second.
    pub tokens_per_second: f64,
    /// Bytes of stored chunks brought in a second, out of memory and disk.
    pub bytes_per_second: f64,
    /// Bytes of chunks brought in a second out of the object store. A server of an older version does not tell it.
    #[serde(default)]
    pub remote_bytes_per_second: f64,
    /// Seconds until the first byte of an object of the object store. A server of an older version does not tell it.
    #[serde(default)]
    pub remote_latency: f64,
}

/// The chunks that a server holds, by [`short_key`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeldChunks {
    /// All of them, ascending.
    All(Vec<u64>),
    /// The difference to the report that the reader saw last.
    Changed {
        /// Keys that have come, ascending.
        added: Vec<u64>,
        /// Keys that have gone, ascending.
        removed: Vec<u64>,
    },
}

/// The model that a server answers with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelCard {
    /// Name of the model in requests.
    pub name: String,
    /// Identity of weights, configuration and precision, in hexadecimal digits. Servers of different ones share no chunk.
    pub fingerprint: String,
    /// Bytes of a token's keys and values in a chunk file, over all layers. A server of an older version tells those in the cache, which are
    /// more where chunks are at rest in 8 or 4 bits.
    pub kv_bytes_per_token: usize,
    /// Version of the program.
    pub version: String,
    /// What decides over the last bits of an answer beside the model: precision and kernels. Empty where a server of an older version does
    /// not tell it.
    #[serde(default)]
    pub numerics: String,
}

/// The chunks that a request's prompt is made of.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChunkPlan {
    /// Key ([`short_key`]) and number of tokens of each, in the prompt's order.
    pub chunks: Vec<(u64, usize)>,
    /// Tokens of the prompt, chunks included.
    pub prompt_tokens: usize,
    /// Rows of the chunks that the request's method is expected to compute, as a share of all of them: 1 for one that reuses nothing.
    pub charge: f64,
}

/// The list of held chunks with its last changes.
#[derive(Debug)]
pub struct HeldLog(Mutex<Log>);

#[derive(Debug)]
struct Log {
    epoch: u64,
    sequence: u64,
    held: BTreeSet<u64>,
    /// Keys that came and went with each of the last changes, up to `sequence`.
    changes: VecDeque<(Vec<u64>, Vec<u64>)>,
    compared: Option<Instant>,
}

impl HeldLog {
    /// A list without chunks.
    #[expect(clippy::new_without_default, reason = "each has a random epoch")]
    pub fn new() -> HeldLog {
        let (held, changes) = (BTreeSet::new(), VecDeque::new());
        HeldLog(Mutex::new(Log {
            epoch: u64::from(random_seed()),
            sequence: 0,
            held,
            changes,
            compared: None,
        }))
    }

    /// Epoch, sequence number and chunks for a reader that has seen `seen`. `held` lists the store, unless that was done just now.
    ///
    /// # Errors
    /// If `held` fails.
    pub fn report<E>(
        &self,
        seen: Option<(u64, u64)>,
        held: impl FnOnce() -> Result<BTreeSet<u64>, E>,
    ) -> Result<(u64, u64, HeldChunks), E> {
        let mut log = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if log.compared.is_none_or(|compared| compared.elapsed() >= COMPARE_EVERY) {
            log.compare(held()?);
            log.compared = Some(Instant::now());
        }
        Ok((log.epoch, log.sequence, log.since(seen)))
    }
}

impl Log {
    fn compare(&mut self, held: BTreeSet<u64>) {
        let added: Vec<u64> = held.difference(&self.held).copied().collect();
        let removed: Vec<u64> = self.held.difference(&held).copied().collect();
        if added.is_empty() && removed.is_empty() {
            return;
        }
        self.held = held;
        self.sequence += 1;
        self.changes.push_back((added, removed));
        if self.changes.len() > REMEMBERED {
            self.changes.pop_front();
        }
    }

    fn since(&self, seen: Option<(u64, u64)>) -> HeldChunks {
        let missed = seen.filter(|(epoch, _)| *epoch == self.epoch);
        let missed = missed.and_then(|(_, sequence)| self.sequence.checked_sub(sequence));
        let Some(missed) = missed.filter(|missed| *missed as usize <= self.changes.len()) else {
            return HeldChunks::All(self.held.iter().copied().collect());
        };
        let (mut added, mut removed) = (BTreeSet::new(), BTreeSet::new());
        for (came, went) in self.changes.iter().skip(self.changes.len() - missed as usize) {
            came.iter().for_each(|key| _ = removed.remove(key) || added.insert(*key));
            went.iter().for_each(|key| _ = added.remove(key) || removed.insert(*key));
        }
        HeldChunks::Changed { added: added.into_iter().collect(), removed: removed.into_iter().collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_is_whom_the_key_signs() {
        let key: NamespaceKey = "ab".repeat(32).parse().unwrap();
        let other: NamespaceKey = "ac".repeat(32).parse().unwrap();
        let signed = sign_tenant(&key, "anna", "00ff");
        assert_eq!(signed_tenant(&key, &signed), Some(("anna", "00ff")));
        assert_eq!(signed_tenant(&key, &sign_tenant(&key, "", "")), Some(("", "")));
        let signature = signed.split(':').next().unwrap();
        for forged in [
            sign_tenant(&other, "anna", "00ff"),
            format!("{signature}:00fe:anna"),
            format!("{signature}:00ff:bob"),
            ":00ff:anna".to_owned(),
            "00ff:anna".to_owned(),
            String::new(),
            // A credential's namespace is a hash under the same key, and no signature.
            format!("{}:00ff:anna", key.namespace(Some("00ff:anna")).repeat(2)),
        ] {
            assert_eq!(signed_tenant(&key, &forged), None, "{forged}");
        }
    }

    #[test]
    fn rates_of_older_servers_are_read() {
        let rates = r#"{"seconds": 0.5, "tokens_per_second": 3000.0, "bytes_per_second": 1e9}"#;
        let rates: Rates = serde_json::from_str(rates).unwrap();
        let wanted =
            Rates { seconds: 0.5, tokens_per_second: 3000.0, bytes_per_second: 1e9, ..Rates::default() };
        assert_eq!(rates, wanted);
    }

    fn set(keys: &[u64]) -> BTreeSet<u64> {
        keys.iter().copied().collect()
    }

    #[test]
    fn a_reader_is_told_what_it_missed_or_all() {
        let (held, changes) = (BTreeSet::new(), VecDeque::new());
        let mut log = Log { epoch: 7, sequence: 0, held, changes, compared: None };
        log.compare(set(&[1, 2]));
        log.compare(set(&[2, 3]));
        log.compare(set(&[2, 3]));
        assert_eq!(log.sequence, 2, "equal lists are no change");
        let changed = |added: &[u64], removed: &[u64]| HeldChunks::Changed {
            added: added.to_vec(),
            removed: removed.to_vec(),
        };
        assert_eq!(log.since(Some((7, 2))), changed(&[], &[]));
        assert_eq!(log.since(Some((7, 1))), changed(&[3], &[1]));
        // 1 came and went meanwhile.
        assert_eq!(log.since(Some((7, 0))), changed(&[2, 3], &[]));
        let all = HeldChunks::All(vec![2, 3]);
        for seen in [None, Some((8, 2)), Some((7, 3))] {
            assert_eq!(log.since(seen), all, "{seen:?}");
        }
        for key in 10..10 + REMEMBERED as u64 {
            log.compare(set(&[key]));
        }
        assert_eq!(log.since(Some((7, 1))), HeldChunks::All(vec![9 + REMEMBERED as u64]));
        assert!(matches!(log.since(Some((7, 2))), HeldChunks::Changed { .. }));
    }
}
