//! Decoding: the next tokens of several sequences in one pass over the weights.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use refrain_kernels::{Device, DeviceFailure, KvRows, copy_range, parallel_each};
use refrain_model::Workspace;

use crate::Result;
use crate::cache::{DecodeToken, SequenceCache};
use crate::forward::{ActiveTokens, Flow, LayerAttention, forward};
use crate::sequence::Sequence;
use crate::step_cost::StepCost;

/// Tokens up to which a sequence's attention is not worth being shared among threads.
const ONE_THREAD: usize = 512;
/// Tokens whose attention takes a thread as long as sharing a sequence's attention among threads does.
const SHARING: usize = 100;

/// Memory of decoding steps, and what they have shown of their cost.
#[derive(Debug, Default)]
pub struct DecodeWorkspace {
    active: Option<ActiveTokens>,
    runs: Runs,
    pub(crate) cost: StepCost,
}

/// Tokens that follow each other in several sequences.
#[derive(Debug, Default)]
struct Runs {
    tokens: Vec<u32>,
    /// Index of the first token of each sequence, and the number of all.
    starts: Vec<usize>,
}

impl Runs {
    fn clear(&mut self) {
        self.tokens.clear();
        self.starts.clear();
        self.starts.push(0);
    }

    /// Ends the run of a sequence.
    fn end(&mut self) {
        self.starts.push(self.tokens.len());
    }

    /// Indices of the tokens of a sequence.
    fn of(&self, sequence: usize) -> Range<usize> {
        self.starts[sequence]..self.starts[sequence + 1]
    }
}

/// Chooses the next token of each sequence, whose last one is part of its answer, and further ones where a sequence proposes tokens that turn
/// out right. Tokens are the same whatever other sequences are there, and whatever is proposed.
///
/// # Errors
/// If the model has no embedding of a token, or the device cannot do the step.
///
/// # Panics
/// If the sequences are not of one model.
pub fn decode_step(sequences: &mut [&mut Sequence], workspace: &mut DecodeWorkspace) -> Result<()> {
    let started = Instant::now();
    let mut runs = std::mem::take(&mut workspace.runs);
    propose(sequences, &workspace.cost, &mut runs);
    let mut caches: Vec<&mut SequenceCache> =
        sequences.iter_mut().map(|sequence| &mut sequence.cache).collect();
    let logits = extend_runs(&mut caches, &runs, &mut workspace.active)?;
    let rows = runs.tokens.len();
    let vocab = logits.len() / rows.max(1);
    choose(sequences, &runs, logits, vocab);
    workspace.cost.learn(rows, started.elapsed().as_secs_f64());
    workspace.runs = runs;
    Ok(())
}

/// Chooses the next tokens of each sequence by the logits of its run, `tokens × vocab`, on a thread each: every sequence has a random generator of
/// its own.
fn choose(sequences: &mut [&mut Sequence], runs: &Runs, mut logits: &mut [f32], vocab: usize) {
    let Some(decoder) = sequences.first().map(|sequence| sequence.cache.decoder.clone()) else { return };
    let mut choices: Vec<(&mut Sequence, &[u32], &mut [f32])> = Vec::with_capacity(sequences.len());
    for (index, sequence) in sequences.iter_mut().enumerate() {
        let run = runs.of(index);
        let (own, others) = std::mem::take(&mut logits).split_at_mut(run.len() * vocab);
        logits = others;
        choices.push((sequence, &runs.tokens[run.start + 1..run.end], own));
    }
    parallel_each(&**decoder.device(), &mut choices, &|_, (sequence, proposal, own)| {
        sequence.verify(proposal, own.chunks_exact_mut(vocab));
    });
}

/// The tokens that are computed for each sequence: its next one, and those that it proposes to follow, as long as a further one is worth its
/// time.
fn propose(sequences: &mut [&mut Sequence], cost: &StepCost, runs: &mut Runs) {
    runs.clear();
    let mut rows = sequences.len();
    let mut tokens = rows as f64;
    for sequence in sequences {
        runs.tokens.push(sequence.next_token);
        // One more row pays if tokens a second grow.
        let pays = |likely: f64, rows, tokens: f64| likely > tokens * cost.share_of_row(rows);
        let acceptance = sequence.lookup.acceptance();
        let mut likely = acceptance;
        // Prompt and answer are searched only where a proposal could pay.
        let proposal = if pays(likely, rows, tokens) { sequence.propose() } else { &[] };
        for token in proposal {
            if !pays(likely, rows, tokens) {
                break;
            }
            runs.tokens.push(*token);
            (rows, tokens) = (rows + 1, tokens + likely);
            likely *= acceptance;
        }
        runs.end();
    }
}

/// Appends one token to each cache, and returns the logits after it, `caches × vocab`.
pub(crate) fn extend<'w>(
    caches: &mut [&mut SequenceCache],
    tokens: &[u32],
    workspace: &'w mut DecodeWorkspace,
) -> Result<&'w mut [f32]> {
    let DecodeWorkspace { active, runs, .. } = workspace;
    runs.clear();
    for token in tokens {
        runs.tokens.push(*token);
        runs.end();
    }
    extend_runs(caches, runs, active)
}

/// Appends a run of tokens to each cache, and returns the logits after each token, in order.
fn extend_runs<'w>(
    caches: &mut [&mut SequenceCache],
    runs: &Runs,
    active: &'w mut Option<ActiveTokens>,
) -> Result<&'w mut [f32]> {
    let Some(first) = caches.first() else { return Ok(&mut []) };
    let (decoder, dtype) = (first.decoder.clone(), first.cache.dtype());
    assert!(caches.iter().all(|cache| Arc::ptr_eq(&cache.decoder, &decoder)), "one model");
    let kept = active.take().filter(|active| Arc::ptr_eq(&active.decoder, &decoder));
    let computed = DeviceFailure::catch(|| {
        let mut tokens = kept.unwrap_or_else(|| ActiveTokens::new(&decoder, dtype));
        compute_runs(caches, runs, &mut tokens).map(|()| tokens)
    });
    Ok(active.insert(computed??).work.logits.as_mut_slice())
}

/// Computes the tokens of each run, and the logits after each.
fn compute_runs(caches: &mut [&mut SequenceCache], runs: &Runs, tokens: &mut ActiveTokens) -> Result<()> {
    let decoder = tokens.decoder.clone();
    tokens.work.each = true;
    decoder.embed(runs.tokens.len(), |row| runs.tokens[row], &mut tokens.hidden)?;
    for (index, cache) in caches.iter_mut().enumerate() {
        cache.prepare(runs.of(index).len());
    }
    let mut step = DecodeStep { parallel: each_on_its_own_thread(caches, &**decoder.device()), caches, runs };
    for layer in 0..decoder.config().num_layers() {
        forward(layer, tokens, &mut step)?;
    }
    caches.iter_mut().enumerate().for_each(|(index, cache)| cache.len += runs.of(index).len());
    tokens.logits();
    Ok(())
}

/// Whether threads take a sequence each, in place of sharing each sequence's attention.
fn each_on_its_own_thread(caches: &[&mut SequenceCache], device: &dyn Device) -> bool {
    let retained = || caches.iter().map(|cache| cache.cache.retained());
    let longest = retained().max().unwrap_or(0);
    let shared = retained().sum::<usize>() / device.threads() + SHARING * caches.len();
    caches.len() > 1 && (longest <= ONE_THREAD || longest <= shared)
}

/// Attention of the tokens of each sequence, over its own cache.
struct DecodeStep<'a, 'b> {
    caches: &'a mut [&'b mut SequenceCache],
    runs: &'a Runs,
    parallel: bool,
}

impl LayerAttention for DecodeStep<'_, '_> {
    fn prepare(&mut self, layer: usize, tokens: &mut ActiveTokens) -> Result<Flow> {
        tokens.resize_attended();
        let ActiveTokens { decoder, work, .. } = tokens;
        let Workspace { q, k, v, attended, .. } = work;
        let (device, width) = (&**decoder.device(), q.len() / self.runs.tokens.len());
        let attend = |i: usize, sequence: &mut SequenceCache| {
            let SequenceCache { cache, len, rows, .. } = sequence;
            // Tokens are appended one after the other, and each sees those before it, as in steps of one token each.
            for (row, own) in self.runs.of(i).zip(rows) {
                copy_range(device, q, row * width..(row + 1) * width, &mut own.q);
                device.resize(&mut own.attended, width);
                let token = DecodeToken {
                    decoder,
                    position: (*len + row - self.runs.of(i).start) as u32,
                    rotary: own.rotary.layer(layer).all(),
                    q: &mut own.q,
                    kv: (KvRows::Device(k, row), KvRows::Device(v, row)),
                    out: &mut own.attended,
                };
                cache.append_and_attend(layer, token);
            }
        };
        if self.parallel {
            parallel_each(device, self.caches, &|i, cache| attend(i, cache));
        } else {
            self.caches.iter_mut().enumerate().for_each(|(i, cache)| attend(i, cache));
        }
        for (i, cache) in self.caches.iter().enumerate() {
            for (row, own) in self.runs.of(i).zip(&cache.rows) {
                device.copy(&own.attended, 0..width, attended, row * width);
            }
        }
        Ok(Flow::Finish)
    }
}
