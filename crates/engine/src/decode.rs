//! Decoding: one token of each of several sequences in one pass over the weights.

use std::sync::Arc;

use refrain_kernels::{Device, KvRows, copy_range, parallel_each};
use refrain_model::Workspace;

use crate::Result;
use crate::cache::{DecodeToken, SequenceCache};
use crate::forward::{ActiveTokens, Flow, LayerAttention, forward};
use crate::sequence::Sequence;

/// Tokens up to which a sequence's attention is not worth being shared among threads.
const ONE_THREAD: usize = 512;

/// Memory of decoding steps.
#[derive(Debug, Default)]
pub struct DecodeWorkspace(Option<ActiveTokens>);

/// Chooses the next token of each sequence, whose last one is part of its answer. A token is the same whatever other sequences
/// are there.
///
/// # Errors
/// If the model has no embedding of a token.
///
/// # Panics
/// If the sequences are not of one model.
pub fn decode_step(sequences: &mut [&mut Sequence], workspace: &mut DecodeWorkspace) -> Result<()> {
    let tokens: Vec<u32> = sequences.iter().map(|sequence| sequence.next_token).collect();
    let mut caches: Vec<&mut SequenceCache> =
        sequences.iter_mut().map(|sequence| &mut sequence.cache).collect();
    let logits = extend(&mut caches, &tokens, workspace)?;
    let vocab = logits.len() / tokens.len().max(1);
    for (sequence, logits) in sequences.iter_mut().zip(logits.chunks_exact_mut(vocab.max(1))) {
        let at = sequence.generator.tokens.len();
        sequence.next_token = sequence.generator.choose(logits, at);
    }
    Ok(())
}

/// Appends one token to each cache, and returns the logits after it, `caches × vocab`.
pub(crate) fn extend<'w>(
    caches: &mut [&mut SequenceCache],
    tokens: &[u32],
    workspace: &'w mut DecodeWorkspace,
) -> Result<&'w mut [f32]> {
    let Some(first) = caches.first() else { return Ok(&mut []) };
    let decoder = first.decoder.clone();
    assert!(caches.iter().all(|cache| Arc::ptr_eq(&cache.decoder, &decoder)), "one model");
    workspace.0.take_if(|active| !Arc::ptr_eq(&active.decoder, &decoder));
    let dtype = first.cache.dtype();
    let active = workspace.0.get_or_insert_with(|| ActiveTokens::new(&decoder, dtype));
    active.work.each = true;
    decoder.embed(tokens.iter().copied(), &mut active.hidden)?;
    for SequenceCache { cache, len, rotary, .. } in caches.iter_mut().map(|cache| &mut **cache) {
        cache.rotary(*len as u32, rotary);
    }
    let mut step = DecodeStep { parallel: each_on_its_own_thread(caches, &**decoder.device()), caches };
    for layer in 0..decoder.config().num_layers() {
        forward(layer, active, &mut step)?;
    }
    caches.iter_mut().for_each(|cache| cache.len += 1);
    Ok(active.logits())
}

/// Whether threads take a sequence each, in place of sharing each sequence's attention.
fn each_on_its_own_thread(caches: &[&mut SequenceCache], device: &dyn Device) -> bool {
    let retained = || caches.iter().map(|cache| cache.cache.retained());
    let longest = retained().max().unwrap_or(0);
    caches.len() > 1 && (longest <= ONE_THREAD || longest * device.threads() <= retained().sum())
}

/// Attention of one token of each sequence, over its own cache.
struct DecodeStep<'a, 'b> {
    caches: &'a mut [&'b mut SequenceCache],
    parallel: bool,
}

impl LayerAttention for DecodeStep<'_, '_> {
    fn prepare(&mut self, layer: usize, tokens: &mut ActiveTokens) -> Result<Flow> {
        tokens.resize_attended();
        let ActiveTokens { decoder, work, .. } = tokens;
        let Workspace { q, k, v, attended, .. } = work;
        let (device, width) = (&**decoder.device(), q.len() / self.caches.len());
        let attend = |i: usize, sequence: &mut SequenceCache| {
            let SequenceCache { cache, len, rotary, q: own, attended, .. } = sequence;
            copy_range(device, q, i * width..(i + 1) * width, own);
            device.resize(attended, width);
            let token = DecodeToken {
                decoder,
                position: *len as u32,
                rotary: rotary.layer(layer).all(),
                q: own,
                kv: (KvRows::Device(k, i), KvRows::Device(v, i)),
                out: attended,
            };
            cache.append_and_attend(layer, token);
        };
        if self.parallel {
            parallel_each(device, self.caches, &|i, cache| attend(i, cache));
        } else {
            self.caches.iter_mut().enumerate().for_each(|(i, cache)| attend(i, cache));
        }
        for (i, cache) in self.caches.iter().enumerate() {
            device.copy(&cache.attended, 0..width, attended, i * width);
        }
        Ok(Flow::Finish)
    }
}
