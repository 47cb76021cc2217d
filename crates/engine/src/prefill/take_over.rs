//! Keys and values of earlier prompts and answers that a prompt begins with.

use std::sync::Arc;

use refrain_eviction::Eviction;
use refrain_fusion::{FusionMethod, Pie};
use refrain_store::ChunkKey;

use crate::engine::Engine;
use crate::prefix_cache::{CachedPrefix, FusedQuestion, PrefixRoot, hash, namespace_hash};
use crate::prompt::Prompt;

/// A prompt as the prefix cache sees it.
#[derive(Debug, Default)]
pub(crate) struct PromptPrefix {
    /// The chain that the prompt's own keys and values belong to; none if they are not to be kept.
    pub(crate) root: Option<PrefixRoot>,
    /// The beginning of the prompt that is taken over.
    pub(crate) found: Option<Arc<CachedPrefix>>,
}

impl PromptPrefix {
    /// Looks for the beginning of a prompt, if `takes`. An eviction policy sees the prompt's tokens as they are computed, so a cache
    /// that it bounds takes nothing over. A prompt over a chunk that was deleted is not kept.
    pub(crate) fn look_up(
        engine: &Engine,
        prompt: &Prompt,
        (method, eviction): (&dyn FusionMethod, &Eviction),
        max_rope_position: usize,
        takes: bool,
    ) -> PromptPrefix {
        let cache = engine.prefix_cache();
        let bounded = !eviction.is_full() || eviction.per_query_head;
        if !cache.is_on() || bounded || !method.goes_on() {
            return PromptPrefix::default();
        }
        let ids = prompt.ids();
        let ropes = format!("{:?}", engine.decoder().ropes(max_rope_position));
        let (namespace, shared) = (&engine.settings().namespace, engine.settings().shared.as_deref());
        let around: [&[u8]; 2] = [namespace.as_bytes(), ropes.as_bytes()];
        let namespaces = match prompt.chunks.is_empty() {
            true => [None, None],
            false => [Some(namespace_hash(namespace)), shared.map(namespace_hash)],
        };
        let unfused =
            PrefixRoot { hash: hash(&around, &[]), fused: None, namespaces, forgotten: cache.clock() };
        let keys: Vec<ChunkKey> =
            (0..prompt.chunks.len()).map(|index| engine.chunk_id_in(prompt, index).key()).collect();
        // The documents may have been removed while the prompt waited for its turn. A removal that comes later is told by the clock.
        if keys.iter().any(|key| engine.store().is_deleted(key)) {
            return PromptPrefix::default();
        }
        if !method.reuses() || prompt.chunks.is_empty() {
            let root = unfused;
            let found = if takes { cache.find(&root, &ids, ids.len() - 1) } else { None };
            // The system part lies in the store already.
            let least = if method.reuses() { prompt.system.len() } else { 1 };
            let found = found.filter(|found| found.len() >= least).map(Arc::new);
            return PromptPrefix { root: Some(root), found };
        }
        let method = format!("{method:?}");
        let keys: Vec<String> = keys.iter().map(ChunkKey::to_string).collect();
        let mut parts: Vec<&[u8]> = vec![around[0], around[1], method.as_bytes()];
        parts.extend(keys.iter().map(String::as_bytes));
        let fused = ids.len() - prompt.question.len();
        let chunks = hash(&parts, &ids[..fused]);
        let own = PrefixRoot {
            hash: hash(&[&chunks.0], &prompt.question),
            fused: Some(FusedQuestion::new(chunks, prompt.asked())),
            ..unfused
        };
        let found = if takes { cache.find_fused(&own, &ids, fused) } else { None };
        PromptPrefix {
            root: Some(found.as_ref().map_or(own, |found| found.root)),
            found: found.map(Arc::new),
        }
    }
}

/// The prompt as one whose first `taken` tokens are a system part that lies in the cache, and the method that computes the others.
pub(crate) fn rest_of(prompt: &Prompt, taken: usize) -> (Prompt, Arc<Pie>) {
    let ids = prompt.ids();
    let (system, question) = ids.split_at(taken);
    let rest = Prompt { system: system.to_vec(), question: question.to_vec(), ..Prompt::default() };
    (rest, Arc::new(Pie))
}
