//! Oracles: answers over keys and values that no method could have, which tell where the rest of an error lies.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use refrain_eviction::Eviction;
use refrain_fusion::{FusionMethod, Pie};
use refrain_kernels::{Buffer, Slice};
use refrain_store::{Chunk, Layer, Store};

use crate::Result;
use crate::engine::Engine;
use crate::prefill::{AttentionCapture, PrefillJob, PrefillRequest};
use crate::prompt::Prompt;

/// The part of the reused keys and values that is taken from the full prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Oracle {
    /// The keys of all tokens.
    Keys,
    /// The values of all tokens.
    Values,
    /// Keys and values of the tokens that the method recomputes, which are reused in place of that.
    Chosen,
}

const NAMES: [(&str, Oracle); 3] =
    [("keys", Oracle::Keys), ("values", Oracle::Values), ("chosen", Oracle::Chosen)];

impl FromStr for Oracle {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Oracle, String> {
        let found = NAMES.iter().find(|(name, _)| *name == text).map(|(_, oracle)| *oracle);
        found.ok_or_else(|| format!("unknown oracle `{text}`: use keys, values or chosen"))
    }
}

impl fmt::Display for Oracle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES.iter().find(|(_, oracle)| oracle == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

impl Engine {
    /// An engine with a store of its own that holds the prompt's chunks as the oracle wants them, and the method that answers over
    /// them: `method`, or, where its tokens are true already, one that recomputes nothing. Chunks are those of this engine, which
    /// must have them.
    ///
    /// # Errors
    /// As for [`Engine::answer`].
    pub fn oracle(
        &self,
        prompt: &Prompt,
        method: &Arc<dyn FusionMethod>,
        oracle: Oracle,
    ) -> Result<(Engine, Arc<dyn FusionMethod>)> {
        let rows: Vec<u32> = match oracle {
            Oracle::Chosen => self.chosen_rows(prompt, method)?,
            Oracle::Keys | Oracle::Values => (0..prompt.len() as u32).collect(),
        };
        let exact = self.prefilled(&prompt.ids())?;
        let bytes = exact.iter().map(|(k, v)| k.bytes() + v.bytes()).sum::<usize>();
        let engine = self.with_store(Store::in_memory(4 * bytes as u64));
        let width = self.decoder().shape().width();
        for (index, span) in prompt.chunk_spans().into_iter().enumerate() {
            let Some(stored) = self.store().get(&self.chunk_id_in(prompt, index))? else { continue };
            let own = rows.iter().copied().filter(|row| span.contains(*row));
            let own: Vec<usize> = own.map(|row| row as usize).collect();
            let mix = |reused: Slice<'_>, exact: &Buffer, wanted: bool| {
                let mut mixed = reused.to_buffer();
                for row in own.iter().filter(|_| wanted) {
                    let at = (row - span.start as usize) * width;
                    mixed.write(at, exact.as_slice().range(row * width..(row + 1) * width));
                }
                mixed
            };
            let layer = |(at, (k, v)): (usize, &(Buffer, Buffer))| {
                let reused = stored.layer(at);
                let k = mix(reused.k(), k, oracle != Oracle::Values);
                let v = mix(reused.v(), v, oracle != Oracle::Keys);
                Layer::exact(k.as_slice(), v.as_slice())
            };
            let layers = exact.iter().enumerate().map(layer).collect();
            let mixed = Chunk::new(stored.id().clone(), stored.label(), layers)?;
            engine.store().put(mixed.with_numerics(self.numerics()))?;
        }
        Ok((engine, if oracle == Oracle::Chosen { Arc::new(Pie) } else { method.clone() }))
    }

    /// The rows that a method computes at the last layer.
    fn chosen_rows(&self, prompt: &Prompt, method: &Arc<dyn FusionMethod>) -> Result<Vec<u32>> {
        let (eviction, capture) = (Eviction::full().clone(), AttentionCapture::Nothing);
        let max_seq_len = self.max_seq_len(prompt, 1, &eviction)?;
        let request = PrefillRequest { method: method.clone(), eviction, max_seq_len, capture };
        Ok(PrefillJob::start(&self.to_measure(), prompt, request)?.run()?.stats.final_rows)
    }
}
