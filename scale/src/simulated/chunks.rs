//! The chunks of simulated requests: real files of the store, whose keys and values are zeros.

use std::time::Duration;

use refrain::kernels::{Buffer, Dtype};
use refrain::store::{BosPolicy, Chunk, ChunkId, KvQuantization, Layer, Store, StoreError};

use super::Simulation;

/// Where the chunks of a request that its worker lacked came from.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Sources {
    pub(super) prefilled: usize,
    pub(super) fetched: usize,
    pub(super) fetched_bytes: u64,
}

/// The work of a request.
#[derive(Debug)]
pub(super) struct Work {
    /// Time that it keeps others from computing.
    pub(super) time: Duration,
    /// Chunks that are to be stored after it.
    pub(super) prefilled: Vec<ChunkId>,
    pub(super) sources: Sources,
}

/// The identity of a text's chunk: one token a word.
pub(super) fn id(simulation: &Simulation, namespace: &str, text: &str) -> ChunkId {
    let token = |word: &str| {
        let hash = blake3::hash(word.as_bytes());
        u32::from_le_bytes([hash.as_bytes()[0], hash.as_bytes()[1], hash.as_bytes()[2], 0])
    };
    ChunkId {
        model: [simulation.model; 32],
        dtype: Dtype::F16,
        quantization: KvQuantization::Exact,
        layers: 1,
        kv_heads: 1,
        // Keys and values, two bytes an element.
        head_dim: (simulation.bytes / 4).max(1),
        bos: BosPolicy::None,
        prefix: None,
        numerics: None,
        namespace: namespace.to_owned(),
        tokens: text.split_whitespace().map(token).collect(),
    }
}

/// Brings in the chunks of a request, and says what there is to do for it. What the worker lacks is fetched or prefilled, by what is sooner.
///
/// # Errors
/// If a chunk is empty or too large.
pub(super) fn bring(
    store: &Store,
    simulation: &Simulation,
    ids: Vec<ChunkId>,
    question: usize,
) -> Result<Work, StoreError> {
    let (mut missing, mut prefilled) = (Vec::new(), Vec::new());
    for id in ids {
        // A chunk that is there counts as used.
        if store.contains(&id) && store.get(&id)?.is_some() {
            continue;
        }
        missing.push(id);
    }
    let seconds = |tokens: usize| tokens as f64 / simulation.prefill;
    let tokens = |ids: &[ChunkId]| ids.iter().map(|id| id.tokens.len()).sum::<usize>();
    let fetch = simulation.latency + (tokens(&missing) * simulation.bytes) as f64 / simulation.remote;
    let fetches = fetch.max(seconds(question)) <= seconds(question + tokens(&missing));
    let fetched_bytes = || store.remote_stats().map_or(0, |stats| stats.fetched_bytes);
    let (mut sources, before) = (Sources::default(), fetched_bytes());
    if fetches {
        store.prefetch(&missing.iter().map(Into::into).collect::<Vec<_>>(), &[], true);
    }
    for id in missing {
        match fetches && store.get(&id)?.is_some() {
            true => sources.fetched += 1,
            false => prefilled.push(id),
        }
    }
    sources.prefilled = prefilled.len();
    sources.fetched_bytes = fetched_bytes() - before;
    let compute = seconds(question + tokens(&prefilled));
    let time = if sources.fetched > 0 { compute.max(fetch) } else { compute };
    Ok(Work { time: Duration::from_secs_f64(time), prefilled, sources })
}

/// Stores chunks that were prefilled.
///
/// # Errors
/// If a chunk is empty or too large, or the store cannot keep it.
pub(super) fn store(store: &Store, prefilled: Vec<ChunkId>) -> Result<(), StoreError> {
    for id in prefilled {
        let empty = Buffer::zeros(Dtype::F16, id.tokens.len() * id.head_dim);
        let layers = vec![Layer::exact(empty.as_slice(), empty.as_slice())];
        store.put(Chunk::new(id, "simulated", layers)?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use refrain::store::{FetchPolicy, Limits, RemoteOptions};

    use super::*;

    #[test]
    fn what_is_missing_is_fetched_or_prefilled_by_what_is_sooner() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("library")).unwrap();
        let mut options = RemoteOptions::new(format!("file://{}/library", folder.path().display()));
        options.policy = FetchPolicy::Fetch;
        let machine = |name: &str| {
            Store::open_shared(folder.path().join(name), Limits::memory(1 << 20), &options).unwrap()
        };
        // Ten tokens are prefilled in 100 ms, and fetched in 30 ms, two chunks in 40 ms.
        let simulation: Simulation = "prefill=100,bytes=64,remote=64000,latency=0.02".parse().unwrap();
        let ids = |texts: &[&str]| texts.iter().map(|text| id(&simulation, "", &text.repeat(10))).collect();
        let first = machine("a");
        let work = bring(&first, &simulation, ids(&["a ", "b "]), 5).unwrap();
        assert_eq!((work.time, work.sources.prefilled), (Duration::from_millis(250), 2));
        store(&first, work.prefilled).unwrap();
        let again = bring(&first, &simulation, ids(&["a ", "b "]), 5).unwrap();
        assert_eq!((again.time, again.sources), (Duration::from_millis(50), Sources::default()));
        while first.remote_stats().unwrap().pending > 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        let second = machine("b");
        let work = bring(&second, &simulation, ids(&["a ", "b ", "c "]), 1).unwrap();
        assert_eq!((work.sources.fetched, work.sources.prefilled), (2, 1));
        assert!(work.sources.fetched_bytes > 2 * 640, "{work:?}");
        assert_eq!(work.time, Duration::from_millis(110));
        let slow = Simulation { remote: 64.0, ..simulation.clone() };
        let work = bring(&machine("c"), &slow, ids(&["a ", "b "]), 1).unwrap();
        assert_eq!((work.sources.fetched, work.sources.prefilled), (0, 2));
    }
}
