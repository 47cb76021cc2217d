//! Identity of chunks in the store.

use std::borrow::Cow;
use std::sync::Arc;

use refrain_fusion::FusionMethod;
use refrain_store::{BosPolicy, ChunkId, ChunkKey, KvQuantization};

use super::prefilled_prefix::PrefilledPrefix;
use crate::engine::Engine;
use crate::prompt::{Prompt, PromptChunk};

impl Engine {
    /// Most tokens that can be prefilled alone.
    pub(crate) fn longest_context(&self) -> usize {
        let prefix = self.prefix().map_or(1, |prefix| prefix.tokens.len());
        let before = self.averaged().map_or(prefix, |averaged| averaged.longest());
        self.decoder().config().context.saturating_sub(before).max(1)
    }

    /// The prompt with its documents in one piece each, as far as they can be prefilled alone.
    pub(super) fn contexts(&self, prompt: &Prompt) -> Prompt {
        prompt.contexts(self.longest_context())
    }

    /// The prompt in the parts that a method reuses: for one with statistics documents are in one piece.
    pub(crate) fn parts_of<'a>(&self, prompt: &'a Prompt, method: &dyn FusionMethod) -> Cow<'a, Prompt> {
        match method.statistics().is_empty() {
            true => Cow::Borrowed(prompt),
            false => Cow::Owned(self.contexts(prompt)),
        }
    }

    /// The identity of a document chunk under this model and these settings, at any place but right behind the system part.
    pub(crate) fn chunk_id(&self, chunk: &PromptChunk) -> ChunkId {
        let first = self.first_chunk_id(chunk);
        match self.averaged().filter(|_| chunk.left.is_empty()) {
            Some(averaged) => ChunkId { prefix: Some(averaged.digest), ..first },
            None => first,
        }
    }

    /// The identity of a document chunk right behind the system part.
    pub(crate) fn first_chunk_id(&self, chunk: &PromptChunk) -> ChunkId {
        let bos = if self.tokenizer().bos().is_some() { BosPolicy::Dropped } else { BosPolicy::None };
        let prefix = match chunk.left.as_slice() {
            [] => self.prefix().map(|prefix| prefix.digest),
            left => Some(ChunkId::digest(&[&self.before_chunks(), left].concat())),
        };
        ChunkId { quantization: self.settings().store_dtype, prefix, ..self.id(bos, &chunk.tokens) }
    }

    /// The identity of a prompt's chunk.
    pub(crate) fn chunk_id_in(&self, prompt: &Prompt, index: usize) -> ChunkId {
        let chunk = &prompt.chunks[index];
        if index == 0 && prompt.system == self.before_chunks() {
            self.first_chunk_id(chunk)
        } else {
            self.chunk_id(chunk)
        }
    }

    /// A prompt's chunks with their identities in it. Without a system part they are those of chunks that may come to stand anywhere.
    pub(crate) fn named_in(&self, prompt: &Prompt) -> Vec<(ChunkId, PromptChunk)> {
        let named = |(index, chunk): (usize, &PromptChunk)| (self.chunk_id_in(prompt, index), chunk.clone());
        prompt.chunks.iter().enumerate().map(named).collect()
    }

    /// What the store has of a prompt, with identities: its chunks, or if `whole`, its contexts for methods with statistics.
    pub(super) fn stored_in(&self, prompt: &Prompt, whole: bool) -> Vec<(ChunkId, PromptChunk)> {
        match whole {
            true => self.named_in(&self.contexts(prompt)),
            false => self.named_in(prompt),
        }
    }

    /// Bytes of a token's keys and values at rest, over all layers, in a chunk of full length.
    pub fn stored_token_bytes(&self) -> usize {
        let tokens = vec![0; self.settings().chunk_tokens];
        let chunk =
            ChunkId { quantization: self.settings().store_dtype, ..self.id(BosPolicy::None, &tokens) };
        chunk.bytes().div_ceil(tokens.len() as u64) as usize
    }

    /// Keys of a prompt's chunks as its prefill looks them up, each with its number of tokens, in the prompt's order; if `whole`, those
    /// of its contexts for methods with statistics.
    pub fn keys_in(&self, prompt: &Prompt, whole: bool) -> Vec<(ChunkKey, usize)> {
        self.stored_in(prompt, whole).into_iter().map(|(id, chunk)| (id.key(), chunk.tokens.len())).collect()
    }

    /// Tokens that the prefill of a chunk computes.
    pub(crate) fn prefilled_tokens(&self, id: &ChunkId) -> usize {
        id.tokens.len() * self.averaged_for(id).len().max(1)
    }

    /// The prefixes of whose prefills the chunk of this identity is the mean; none if it is one prefill.
    pub(crate) fn averaged_for(&self, id: &ChunkId) -> &[Arc<PrefilledPrefix>] {
        match self.averaged() {
            Some(averaged) if id.prefix == Some(averaged.digest) => &averaged.prefixes,
            _ => &[],
        }
    }

    /// Keys of a document's chunks in the store, and if `whole`, the keys of its contexts for methods with statistics.
    pub fn keys_of(&self, chunks: &[PromptChunk], whole: bool) -> Vec<ChunkKey> {
        let prompt = Prompt { chunks: chunks.to_vec(), ..Prompt::default() };
        let mut all = prompt.chunks.clone();
        if whole {
            all.extend(self.contexts(&prompt).chunks);
        }
        let ids = |chunk: &PromptChunk| [self.chunk_id(chunk), self.first_chunk_id(chunk)];
        let mut keys: Vec<ChunkKey> = all.iter().flat_map(ids).map(|id| id.key()).collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    /// The identity of the chunk in the shared namespace, if there is one.
    pub(crate) fn shared(&self, id: &ChunkId) -> Option<ChunkId> {
        let namespace = self.settings().shared.clone()?;
        (namespace != id.namespace).then(|| ChunkId { namespace, ..id.clone() })
    }

    /// The identities under which a chunk is looked for: its own, then the one in the shared namespace, if there is one.
    pub(crate) fn places(&self, id: &ChunkId) -> impl Iterator<Item = ChunkId> + use<> {
        std::iter::once(id.clone()).chain(self.shared(id))
    }

    /// The identity of a system part, BOS included. It is a true prefix, and kept as computed.
    pub(crate) fn system_id(&self, tokens: &[u32]) -> ChunkId {
        self.id(BosPolicy::Kept, tokens)
    }

    fn id(&self, bos: BosPolicy, tokens: &[u32]) -> ChunkId {
        let shape = self.decoder().shape();
        ChunkId {
            model: self.fingerprint(),
            dtype: self.settings().kv,
            quantization: KvQuantization::Exact,
            layers: shape.layers,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            bos,
            prefix: None,
            numerics: self.settings().strict_numerics.then(|| self.numerics().to_owned()),
            namespace: self.settings().namespace.clone(),
            tokens: tokens.to_vec(),
        }
    }
}
