//! Identity of chunks in the store.

use refrain_store::{BosPolicy, ChunkId, ChunkKey, KvQuantization};

use crate::engine::Engine;
use crate::prompt::{Prompt, PromptChunk};

impl Engine {
    /// Most tokens that can be prefilled alone.
    pub(crate) fn longest_context(&self) -> usize {
        let before = self.prefix().map_or(1, |prefix| prefix.tokens.len());
        self.decoder().config().context.saturating_sub(before).max(1)
    }

    /// The identity of a document chunk under this model and these settings.
    pub(crate) fn chunk_id(&self, chunk: &PromptChunk) -> ChunkId {
        let bos = if self.tokenizer().bos().is_some() { BosPolicy::Dropped } else { BosPolicy::None };
        let prefix = match chunk.left.as_slice() {
            [] => self.prefix().map(|prefix| prefix.digest),
            left => Some(ChunkId::digest(&[&self.before_chunks(), left].concat())),
        };
        ChunkId { quantization: self.settings().store_dtype, prefix, ..self.id(bos, &chunk.tokens) }
    }

    /// Keys of a document's chunks in the store, and if `whole`, the keys of its contexts for methods with statistics.
    pub fn keys_of(&self, chunks: &[PromptChunk], whole: bool) -> Vec<ChunkKey> {
        let prompt = Prompt { chunks: chunks.to_vec(), ..Prompt::default() };
        let mut all = prompt.chunks.clone();
        if whole {
            all.extend(prompt.contexts(self.longest_context()).chunks);
        }
        let mut keys: Vec<ChunkKey> = all.iter().map(|chunk| self.chunk_id(chunk).key()).collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    /// The identity of the chunk in the shared namespace, if there is one.
    pub(crate) fn shared(&self, id: &ChunkId) -> Option<ChunkId> {
        let namespace = self.settings().shared.clone()?;
        (namespace != id.namespace).then(|| ChunkId { namespace, ..id.clone() })
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
            namespace: self.settings().namespace.clone(),
            tokens: tokens.to_vec(),
        }
    }
}
